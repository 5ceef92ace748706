"""Libraries that only some commands need, and the extra of each."""

from __future__ import annotations

EXTRAS = {
    "tree_sitter": "kernels",
    "tree_sitter_c": "kernels",
    "ray": "ray",
    "cryptography": "sign",
    "gguf": "quantise",
}
"""By the module that is imported."""


def absence_of(error: BaseException) -> str | None:
    """A line that names the extra of a library that is not installed; None for every other error."""
    module = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    if module not in EXTRAS:
        return None
    return f'{module} is not installed, which this needs: pip install "phasewise[{EXTRAS[module]}]"'

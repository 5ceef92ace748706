"""The name that a kernel family of one build gets: it changes with the machine code, and with nothing else.

`gemm-avx2-5f1c9e2b7a04`: the family, the instruction set, and a hash over what the compiler was given,
which is the family's sources and vocabulary (without comments and layout), the flags and the compiler's
version. Timings are kept under this name, so those of another build are never used by mistake. setup.py
runs this file; nothing at run time needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

FAMILIES = {
    "gemm": (
        "gemm.h",
        "blocks.h",
        "sparse.h",
        "families/gemm*",
        "families/quantise.c",
        "families/byte_scale.h",
    ),
    "attention": (
        "families/attention.c",
        "families/attention/*",
        "families/rows/softmax.c",
        "families/exp.h",
        "families/sixteen.h",
        "families/byte_scale.h",
    ),
}
"""The families whose schedules are tuned, each with its own files."""

VOCABULARY = ("isa/*", "simd/*")

HASH_CHARS = 12

_OTHER_FLAG = re.compile(
    r"-(W|g|I|pipe$|f(file|debug|macro|profile)-prefix-map=|frandom-seed=|fdiagnostics-)"
)

_COMMENT_OR_TEXT = re.compile(r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\])*"', re.DOTALL)


def kernel_abi(
    family: str, isa: str, sources: Mapping[str, str], flags: Sequence[str], compiler_version: str
) -> str:
    """The name of `family` as compiled for `isa`. Of `sources` (name to text) only the family's own count."""
    patterns = (*FAMILIES[family], *VOCABULARY)
    made_of = {
        "sources": {
            name: essence(text)
            for name, text in sorted(sources.items())
            if any(fnmatch(name, pattern) for pattern in patterns)
        },
        "flags": code_flags(flags),
        "compiler": compiler_version,
    }
    digest = hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
    return f"{family}-{isa}-{digest[:HASH_CHARS]}"


def code_flags(flags: Sequence[str]) -> list[str]:
    """The flags that machine code may follow from: no warnings, debug tables, folders or seeds of names."""
    return [flag for flag in flags if not _OTHER_FLAG.match(flag)]


def essence(text: str) -> str:
    """The text of a C source without comments, and with one space for any run of white space."""
    bare = _COMMENT_OR_TEXT.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    return " ".join(bare.split())


def abi_macros(
    kernels: Path, isa: str, compiler: Sequence[str], flags: Sequence[str]
) -> list[tuple[str, str]]:
    """Macros that setup.py defines for an instruction set's table, C strings: `PW_GEMM_ABI` and its like."""
    sources = _sources(kernels, isa, compiler, flags)
    all_flags = [*flags, *os.environ.get("CFLAGS", "").split()]
    version = _run([*compiler, "-E", "-P", "-x", "c", "-"], "__VERSION__\n").strip()
    return [
        (f"PW_{family.upper()}_ABI", f'"{kernel_abi(family, isa, sources, all_flags, version)}"')
        for family in FAMILIES
    ]


def _sources(kernels: Path, isa: str, compiler: Sequence[str], flags: Sequence[str]) -> dict[str, str]:
    """The source files of an instruction set's units as the compiler sees them, name to text."""
    units = sorted((kernels / "families").glob("*.c"))
    rules = _run([*compiler, *flags, "-MM", "-I", str(kernels), "-include", f"isa/{isa}.h", *map(str, units)])
    paths = {Path(word) for word in rules.replace("\\\n", " ").split() if not word.endswith(":")}
    return {path.relative_to(kernels).as_posix(): path.read_text() for path in paths}


def _run(command: Sequence[str], text: str = "") -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout

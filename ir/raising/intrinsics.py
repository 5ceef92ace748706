"""Meaning of intrinsics: the type of each result, and the operation of the high level that says the same.

One table for an instruction set, made when it is first asked for. An intrinsic that is not in the table is
refused by name; none is approximated.
"""

from __future__ import annotations

from phasewise.ir.builders import NEON_NAMES, NEON_TYPES, X86_NAMES, X86_TYPES, Table
from phasewise.ir.raising.intrinsics_neon import neon
from phasewise.ir.raising.intrinsics_x86 import x86
from phasewise.ir.types import Type, Vec


def table_of(isa: str) -> Table:
    """The intrinsics of a source's instruction set."""
    return neon() if isa.startswith("neon") else x86()


def register_types(isa: str) -> dict[str, Type]:
    return NEON_TYPES if isa.startswith("neon") else X86_TYPES


def register_name(isa: str, of: Vec) -> str | None:
    return (NEON_NAMES if isa.startswith("neon") else X86_NAMES).get(of)

"""The schedule lookup: a weight's arithmetic, and by which schedule m rows run.

Programs are built by what a lookup for each phase says, and without one every product runs by the kernels'
own default. `tuner.lookup.ScheduleTable` is the one of a database. Schedules change speed, never a result;
the arithmetic may (gemm.h), so all phases of a model share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.cython_kernels.packing import COLUMN_GROUP, PackedWeight

CANONICAL = "canonical"
"""The choice of arithmetic by which every weight's products have the same bits on every CPU."""
TILES = "tiles"
"""The choice by which quantised and bf16 weights have the arithmetic of the tile unit in both phases."""
OF_ONE_INSTRUCTION_SET = frozenset({"bf16_dot", "bf16_tile", "f16_fma"})
"""Compute paths that round by an instruction's own rules. All other paths give the same bits on every CPU."""
_ON_TILES = "bf16_tile"
SAME_BITS = {"int8_tile": "int8_dot"}
"""Compute paths whose bits are those of another one, and that other one."""
MAX_ROW_RANGES = 64
"""Most ranges of one weight (PW_MAX_ROW_RANGES)."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """The schedule of products of up to `last_m` rows, from the end of the range before."""

    last_m: int
    schedule: Mapping[str, Any] | None
    """The range's schedule as `_native.default_schedule` gives it, by the names of
    `kerneldb.records.Schedule`; None: the default."""
    why: str
    """The origin of the schedule, in words."""


def canonical_path(weight: PackedWeight) -> str:
    """The path whose bits every CPU gives: the default here if it has them, else the default of CPUs without
    dots of 16 bits or a tile unit."""
    from phasewise.cython_kernels._native import compute_paths

    default, *others = compute_paths(weight.kind, weight.group)
    shared = "int8_dot" if "int8_dot" in (default, *others) else "fma"
    return default if SAME_BITS.get(default) == shared else shared


def tiles_path(weight: PackedWeight) -> str | None:
    """The path of the tile unit's arithmetic of bf16; None where there is no unit, and for what is never
    multiplied as bf16: f32, f16, and bytes with a scale for a column.
    """
    if weight.kind in ("f32", "f16") or (weight.kind == "q8" and weight.group == COLUMN_GROUP):
        return None
    from phasewise.cython_kernels._native import compute_paths

    paths = compute_paths(weight.kind, weight.group)
    return _ON_TILES if _ON_TILES in paths else None


def has_tiles_arithmetic() -> bool:
    """True if the instruction set in use multiplies bf16 on a tile unit."""
    from phasewise.cython_kernels._native import compute_paths

    return _ON_TILES in compute_paths("bf16")


class ScheduleLookup:
    """The tuned schedules of one phase's cores. This one has none: all runs by the kernels' defaults."""

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        """Compute path (None: the default of the instruction set in use) and number of k parts.

        The same for every M, and for every weight of this format and shape.
        """
        return None, 1

    @property
    def bands(self) -> Sequence[ScheduleLookup]:
        """The lookups of the cores of each band that the phase's plan has; defaults for further bands."""
        return ()

    def products(self, weight: PackedWeight, max_m: int) -> Sequence[RowRange]:
        """The ranges of products with a weight, at most MAX_ROW_RANGES, ascending; beyond the last one the
        default runs."""
        return ()

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> Sequence[RowRange]:
        """The ranges of attention, by the rows of a step's longest slice. kv_format: `f16` or `f32`; n and k:
        what all query heads, and all KV heads, have in dimensions."""
        return ()


@dataclass(frozen=True)
class CanonicalBut(ScheduleLookup):
    """A lookup with nothing tuned: weights that have the named path are multiplied by it, all others by what
    every CPU shares. None: all by that."""

    path: str | None

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        from phasewise.cython_kernels._native import compute_paths

        is_own = self.path in compute_paths(weight.kind, weight.group)
        return (self.path if is_own else canonical_path(weight)), 1

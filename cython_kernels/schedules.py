"""The schedule lookup: a weight's arithmetic, and by which schedule m rows run.

Programs are built by what a lookup for each phase says, and without one every product runs by the kernels'
own default. `tuner.lookup.ScheduleTable` is the one of a database. Schedules change speed, never a result;
the arithmetic may (gemm.h), so all phases of a model share one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.cython_kernels.packing import PackedWeight

MAX_ROW_RANGES = 64
"""Ranges that one weight may have (PW_MAX_ROW_RANGES)."""


@dataclass(frozen=True, slots=True)
class RowRange:
    """The schedule of products of up to `last_m` rows, from the end of the range before."""

    last_m: int
    schedule: Mapping[str, Any] | None
    """As `_native.default_schedule` gives it, by the names of `kerneldb.records.Schedule`; None: that one."""
    why: str
    """For people: where the schedule comes from."""


class ScheduleLookup:
    """The tuned schedules of one phase's cores. This one has none: all runs by the kernels' defaults."""

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        """Compute path (None: the default of the instruction set in use) and number of k parts.

        The same for every M, and for every weight of this format and shape.
        """
        return None, 1

    def own_path(self, weight: PackedWeight) -> str | None:
        """The compute path by which this phase alone multiplies by the weight; None: the model's arithmetic.

        A token's numbers then depend on the phase that computed it.
        """
        return None

    def products(self, weight: PackedWeight, max_m: int) -> Sequence[RowRange]:
        """At most MAX_ROW_RANGES, ascending; beyond the last one the default runs."""
        return ()

    def attention(self, kv_format: str, n: int, k: int, max_m: int) -> Sequence[RowRange]:
        """The same for attention, by the rows of a step's longest slice.

        kv_format: `f16` or `f32`; n and k: what all query heads, and all KV heads, have in dimensions.
        """
        return ()

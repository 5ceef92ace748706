"""Linear ops of a program: every weight with its arithmetic, its schedules and its adapters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from phasewise.cython_kernels._native import Program, compute_paths
from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.packing import PANEL, PackedWeight
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.models.low_rank import Adapter, behind_zeros
from phasewise.serving.models.parts.experts import Experts

Parts = list[tuple[PackedWeight, int]]
Place = tuple[int, int]  # offset and row stride in the arena
Rows = Literal["every", "gathered", "logits"]


@dataclass(frozen=True, slots=True)
class PlacedProduct:
    """The place of a product's schedules by one table in a program, and the weight that they are of."""

    op: int
    part: int
    table: int
    weight: PackedWeight
    arithmetic: tuple[str | None, int]


def with_default_path(weight: PackedWeight, arithmetic: tuple[str | None, int]) -> tuple[str, int]:
    """An arithmetic with the name of its path, the default one's where it names none."""
    path, k_parts = arithmetic
    return path or compute_paths(weight.kind, weight.group)[0], k_parts


@dataclass(frozen=True, slots=True)
class Linears:
    """Adds linear ops to a program, every weight with its arithmetic and its schedules.

    The arithmetic is the whole weight's on every rank; schedules are for this rank's part of it.
    """

    program: Program
    lookups: Sequence[ScheduleLookup]
    most_rows: int
    division: Division | None
    adapters: Sequence[Adapter] = ()
    placed: list[PlacedProduct] = field(default_factory=list)

    def add(
        self,
        parts: Parts,
        reads: dict[str, Any],
        source: Place,
        target: Place,
        reader: str | None = None,
        **options: Any,
    ) -> None:
        """Program.linear, and what the lookups say about its weights. reader: what adapters call the op."""
        options |= reads
        options["arithmetics"] = [self._arithmetic(weight) for weight, _ in parts]
        kind = options.pop("source")
        op = self.program.linear(parts, kind, *source, *target, **options)
        for number, adapter in enumerate(self.adapters, start=1):
            if reader is not None and (update := adapter.updates.get(reader)) is not None:
                self.program.adapt(op, number, update.down, update.scales, _within(update.ups, parts))
        for table, lookup in enumerate(self.lookups):
            for part, (whole, _) in enumerate(parts):
                weight = whole if self.division is None else self.division.weight(whole, table)
                self._schedule(op, part, table, lookup, weight)
                self._place(op, part, table, weight)

    def add_experts(
        self,
        experts: Experts,
        stack: PackedWeight,
        expert: PackedWeight,
        reads: dict[str, Any],
        source: Place,
        target: Place,
        rows: Rows,
    ) -> None:
        """Program.experts; the schedules are those of one expert's weight on one thread."""
        options = {**reads, "arithmetic": self._arithmetic(expert), "rows": rows}
        kind = options.pop("source")
        op = self.program.experts(experts, stack, kind, *source, *target, **options)
        for table, lookup in enumerate(self.lookups):
            self._schedule(op, 0, table, lookup, expert)
            self._place(op, 0, table, expert)

    def add_heads(
        self,
        count: int,
        stack: PackedWeight,
        head: PackedWeight,
        source: Place,
        target: Place,
        step: int,
    ) -> None:
        """Program.heads; the schedules are those of one head's weight on one thread."""
        arithmetic = self._arithmetic(head)
        op = self.program.heads(stack, count, *source, *target, step, arithmetic=arithmetic)
        for table, lookup in enumerate(self.lookups):
            self._schedule(op, 0, table, lookup, head)
            self._place(op, 0, table, head)

    def _place(self, op: int, part: int, table: int, weight: PackedWeight | None) -> None:
        if weight is not None:
            self.placed.append(PlacedProduct(op, part, table, weight, self._arithmetic(weight)))

    def _schedule(
        self, op: int, part: int, table: int, lookup: ScheduleLookup, weight: PackedWeight | None
    ) -> None:
        ranges = [] if weight is None else lookup.products(weight, self.most_rows)
        schedules = [(rows.last_m, rows.schedule) for rows in ranges]
        self.program.set_schedules(op, part, schedules, table)

    def _arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return self.lookups[0].arithmetic(weight) if self.lookups else (None, 1)


def _within(ups: Sequence[tuple[int, PackedWeight]], parts: Parts) -> list[tuple[int, PackedWeight]]:
    """Each from a panel of its part on: rows of zeros go before outputs that begin within one."""
    placed = []
    for column, up in ups:
        first = max(start for _, start in parts if start <= column)
        before = (column - first) % PANEL
        placed.append((column - before, behind_zeros(up, before) if before else up))
    return placed

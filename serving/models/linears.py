"""Linear operations of a program: every weight with its arithmetic, its schedules and its adapters (LoRA).

Adapters of weights that read the same rows ("layers.3.qkv": q, k and v) are one update, whose first product
is one matrix. A matrix is stored as bf16 where every number is a bf16 number, else as float32; nothing is
rounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program, compute_paths
from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.packing import PANEL, Kind, PackedWeight, from_bf16, pack_thin, to_bf16, unpack
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.models.parts.experts import Experts

Matrix = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LowRank:
    """An adapter of one weight: y += scale * B (A x), A float32 [rank, inputs], B [outputs, rank]."""

    a: Matrix
    b: Matrix
    scale: float

    @property
    def rank(self) -> int:
        return len(self.a)


@dataclass(frozen=True)
class Update:
    """The part of an adapter that is added to the outputs of weights which read the same rows. `down`: each
    weight's A, one below the other, [sum of ranks, inputs]. `scales`: a factor for each output of `down`.
    `ups`: for each weight the first column of its outputs, and B, [outputs, rank]."""

    down: PackedWeight
    scales: npt.NDArray[np.float32]
    ups: tuple[tuple[int, PackedWeight], ...]

    @property
    def n_bytes(self) -> int:
        return self.down.nbytes + sum(up.nbytes for _, up in self.ups)


@dataclass(frozen=True)
class Adapter:
    """An adapter of one model. `updates`: updates by the product that they change, e.g. "layers.3.qkv".
    `content_hash`: SHA-256 of the adapter's numbers, places and scales, the same for every file format."""

    name: str
    content_hash: str
    updates: Mapping[str, Update]

    @property
    def n_bytes(self) -> int:
        """Bytes of the adapter that a step reads."""
        return sum(update.n_bytes for update in self.updates.values())


def update_of(parts: Sequence[tuple[int, LowRank]]) -> Update:
    """Join adapters of weights that read the same rows, each with its first output column, to one update."""
    down = np.concatenate([part.a for _, part in parts])
    scales = np.concatenate([np.full(part.rank, part.scale, np.float32) for _, part in parts])
    ups = tuple((column, pack_thin(part.b, _kind(part.b))) for column, part in parts)
    return Update(pack_thin(down, _kind(down)), scales, ups)


def _kind(matrix: Matrix) -> Kind:
    return "bf16" if (from_bf16(to_bf16(matrix)) == matrix).all() else "f32"


def behind_zeros(up: PackedWeight, n_zeros: int) -> PackedWeight:
    """Put `n_zeros` outputs that are always zero before the outputs of a weight of `pack_thin`."""
    rows = unpack(up)
    return pack_thin(np.concatenate([np.zeros((n_zeros, up.k), np.float32), rows]), up.kind)


def flat(adapters: Sequence[Adapter]) -> tuple[dict[str, PackedWeight], dict[str, npt.NDArray[np.float32]]]:
    """Collect weights and vectors of all adapters under unique names, as `unflat` reads them."""
    weights: dict[str, PackedWeight] = {}
    vectors: dict[str, npt.NDArray[np.float32]] = {}
    for index, adapter in enumerate(adapters):
        for reader, update in adapter.updates.items():
            stem = f"{index}/{reader}"
            vectors[stem] = update.scales
            weights[f"{stem}/down"] = update.down
            weights |= {f"{stem}/up/{column}": up for column, up in update.ups}
    return weights, vectors


def unflat(
    weights: Mapping[str, PackedWeight], vectors: Mapping[str, npt.NDArray[np.float32]]
) -> tuple[Adapter, ...]:
    """The adapters that `flat` was given, without names and hashes."""
    updates: dict[int, dict[str, Update]] = {}
    ups: dict[str, list[tuple[int, PackedWeight]]] = {}
    for name, weight in weights.items():
        stem, _, column = name.partition("/up/")
        if column:
            ups.setdefault(stem, []).append((int(column), weight))
    for stem, scales in vectors.items():
        index, _, reader = stem.partition("/")
        update = Update(weights[f"{stem}/down"], scales, tuple(ups[stem]))
        updates.setdefault(int(index), {})[reader] = update
    return tuple(Adapter("", "", updates[index]) for index in sorted(updates))


Parts = list[tuple[PackedWeight, int]]
Place = tuple[int, int]  # offset and row stride in the arena
Rows = Literal["every", "gathered", "logits"]


@dataclass(frozen=True, slots=True)
class PlacedProduct:
    """The place in a program of a weight's schedules from one table."""

    op: int
    part: int
    table: int
    weight: PackedWeight
    arithmetic: tuple[str | None, int]


def with_default_path(weight: PackedWeight, arithmetic: tuple[str | None, int]) -> tuple[str, int]:
    """The arithmetic with its path named, the default path of the weight's kind for None."""
    path, k_parts = arithmetic
    return path or compute_paths(weight.kind, weight.group)[0], k_parts


@dataclass(frozen=True, slots=True)
class Linears:
    """Adds linear ops to a program, every weight with its arithmetic and its schedules.

    The arithmetic is the whole weight's on every rank; schedules are for this rank's part of it."""

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
        """Add `Program.linear` with its weights' arithmetic, schedules and adapters. `reader`: its name in
        adapters."""
        options |= reads
        options["arithmetics"] = [self._arithmetic(weight) for weight, _ in parts]
        kind = options.pop("source")
        op = self.program.linear(parts, kind, *source, *target, **options)
        for number, adapter in enumerate(self.adapters, start=1):
            if reader is not None and (update := adapter.updates.get(reader)) is not None:
                self.program.adapt(op, number, update.down, update.scales, _within(update.ups, parts))
        for table in range(len(self.lookups)):
            for part, (whole, _) in enumerate(parts):
                weight = whole if self.division is None else self.division.weight(whole, table)
                self._schedule(op, part, table, weight)

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
        """Add `Program.experts` with the schedules of one expert's weight on one thread."""
        options = {**reads, "arithmetic": self._arithmetic(expert), "rows": rows}
        kind = options.pop("source")
        op = self.program.experts(experts, stack, kind, *source, *target, **options)
        for table in range(len(self.lookups)):
            self._schedule(op, 0, table, expert)

    def add_heads(
        self, count: int, stack: PackedWeight, head: PackedWeight, source: Place, target: Place, step: int
    ) -> None:
        """Add `Program.heads` with the schedules of one head's weight on one thread."""
        arithmetic = self._arithmetic(head)
        op = self.program.heads(stack, count, *source, *target, step, arithmetic=arithmetic)
        for table in range(len(self.lookups)):
            self._schedule(op, 0, table, head)

    def _schedule(self, op: int, part: int, table: int, weight: PackedWeight | None) -> None:
        """Set a weight's schedules from one table; `weight` None: this rank has no part of the weight."""
        ranges = [] if weight is None else self.lookups[table].products(weight, self.most_rows)
        self.program.set_schedules(op, part, [(rows.last_m, rows.schedule) for rows in ranges], table)
        if weight is not None:
            self.placed.append(PlacedProduct(op, part, table, weight, self._arithmetic(weight)))

    def _arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return self.lookups[0].arithmetic(weight) if self.lookups else (None, 1)


def _within(ups: Sequence[tuple[int, PackedWeight]], parts: Parts) -> list[tuple[int, PackedWeight]]:
    """Begin each of `ups` at a panel of its part: rows of zeros fill the panel before it."""
    placed = []
    for column, up in ups:
        first = max(start for _, start in parts if start <= column)
        before = (column - first) % PANEL
        placed.append((column - before, behind_zeros(up, before) if before else up))
    return placed

"""Adapters beside a model's packed weights: low-rank products that rows may have on top (LoRA).

They are kept by what reads them: weights that read the same rows ("layers.3.qkv": q, k and v) are one update,
whose first product is one matrix. Numbers are stored as bf16 where every one of a matrix is a bf16 number,
else as float32; nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.packing import (
    Kind,
    PackedWeight,
    from_bf16,
    pack_thin,
    to_bf16,
    unpack,
)

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
    """The part of an adapter that is added to the outputs of weights which read the same rows.

    down: [sum of ranks, inputs], A below A. scales: of each of its outputs. ups: of each weight the first
    column of its outputs and B, [outputs, rank].
    """

    down: PackedWeight
    scales: npt.NDArray[np.float32]
    ups: tuple[tuple[int, PackedWeight], ...]

    @property
    def n_bytes(self) -> int:
        return self.down.nbytes + sum(up.nbytes for _, up in self.ups)


@dataclass(frozen=True)
class Adapter:
    """An adapter of one model. updates: by what reads the same rows, e.g. "layers.3.qkv".

    content_hash: SHA-256 of its numbers, their places and scales, whatever the file's format.
    """

    name: str
    content_hash: str
    updates: Mapping[str, Update]

    @property
    def n_bytes(self) -> int:
        """Bytes of it that a step reads."""
        return sum(update.n_bytes for update in self.updates.values())


def update_of(parts: Sequence[tuple[int, LowRank]]) -> Update:
    """The update of weights, each with the column that its outputs begin at."""
    down = np.concatenate([part.a for _, part in parts])
    scales = np.concatenate([np.full(part.rank, part.scale, np.float32) for _, part in parts])
    ups = tuple((column, pack_thin(part.b, _kind(part.b))) for column, part in parts)
    return Update(pack_thin(down, _kind(down)), scales, ups)


def _kind(matrix: Matrix) -> Kind:
    return "bf16" if (from_bf16(to_bf16(matrix)) == matrix).all() else "f32"


def behind_zeros(up: PackedWeight, n_zeros: int) -> PackedWeight:
    """A weight of `pack_thin` with so many outputs that are always zero before its own."""
    rows = unpack(up)
    return pack_thin(np.concatenate([np.zeros((n_zeros, up.k), np.float32), rows]), up.kind)


def flat(adapters: Sequence[Adapter]) -> tuple[dict[str, PackedWeight], dict[str, npt.NDArray[np.float32]]]:
    """Weights and vectors of all adapters by names of their own, as `unflat` reads them."""
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
    """The adapters that `flat` was given, without their names."""
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

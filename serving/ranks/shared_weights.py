"""A model's arrays as another process finds them: in the packed file that is mapped anyway, or in a copy.

Arrays of this process alone, and weights that should lie on several NUMA nodes, are copied into a segment
once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy.typing as npt

from phasewise.cython_kernels.division import Division, share
from phasewise.cython_kernels.packing import SLOT_UNIT, Array, PackedWeight
from phasewise.serving.models.low_rank import flat, unflat
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.segments import Segment
from phasewise.serving.ranks.rank_teams import TABLES

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """One array, from the first byte of what holds it."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: npt.NDArray[Any], offset: int) -> ArrayPlace:
        return cls(offset, array.shape, array.dtype.str)


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A packed weight without its numbers. arrays: those of `PackedWeight.arrays`."""

    kind: str
    n: int
    k: int
    group: int
    zero_point: int
    top_exponent: int
    is_sparse: bool
    arrays: tuple[ArrayPlace, ...]


@dataclass(frozen=True)
class Places:
    """The places of all arrays of a model, in something of `n_bytes` bytes that a descriptor stands for."""

    n_bytes: int
    weights: Mapping[str, WeightPlace]
    vectors: Mapping[str, ArrayPlace]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Places:
        """The places that `to_json` wrote."""
        weights = {
            name: WeightPlace(
                **{**weight, "arrays": tuple(_array_place(array) for array in weight["arrays"])}
            )
            for name, weight in fields["weights"].items()
        }
        return cls(
            fields["n_bytes"], weights, {name: _array_place(v) for name, v in fields["vectors"].items()}
        )

    def views(self, segment: Segment) -> tuple[dict[str, PackedWeight], dict[str, Array]]:
        """Weights and vectors over `segment`, by name."""

        def view(place: ArrayPlace) -> Array:
            return segment.view(place.offset, place.shape, place.dtype)

        weights = {}
        for name, place in self.weights.items():
            arrays = [view(array) for array in place.arrays]
            offsets = arrays.pop() if place.is_sparse else None
            values, scales, mins = [*arrays, None, None][:3]
            assert values is not None
            kind: Any = place.kind
            weights[name] = PackedWeight(
                kind,
                place.n,
                place.k,
                place.group,
                place.zero_point,
                values,
                scales,
                mins,
                place.top_exponent,
                offsets,
            )
        return weights, {name: view(place) for name, place in self.vectors.items()}


def places_in_file(model: PackedModel) -> Places:
    """The places of the weights of a model mapped from its packed file."""
    assert model.file is not None
    address = model.file.address
    weights = {
        name: _weight_place(weight, [array.ctypes.data - address for array in weight.arrays])
        for name, weight in model.weights.items()
    }
    vectors = {name: ArrayPlace.of(v, v.ctypes.data - address) for name, v in model.vectors.items()}
    return Places(model.file.n_bytes, weights, vectors)


def places_in_segment(model: PackedModel) -> Places:
    """The places of a copy of every array, one after another."""
    end = 0

    def reserve(array: Array) -> int:
        nonlocal end
        offset, end = end, end + -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        return offset

    weights = {
        name: _weight_place(weight, [reserve(array) for array in weight.arrays])
        for name, weight in model.weights.items()
    }
    vectors = {name: ArrayPlace.of(vector, reserve(vector)) for name, vector in model.vectors.items()}
    return Places(max(end, 1), weights, vectors)


@dataclass(frozen=True, slots=True)
class Holding:
    """Arrays behind a descriptor that other processes inherit."""

    fd: int
    places: Places


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A model whose arrays other ranks can map."""

    model: PackedModel
    """As the first rank reads it."""
    weights: Holding
    source: Holding | None
    """From where each rank copies its own panels to `weights`; None: they are there."""
    copied_bytes: int
    adapters: Holding | None = None
    """None: the model has none."""


@contextmanager
def share_weights(model: PackedModel, division: Division, spread: bool) -> Iterator[SharedWeights]:
    """The model's arrays, and those of its adapters, which every rank reads whole."""
    with _shared_model(model, division, spread) as shared:
        if not model.adapters:
            yield shared
            return
        weights, vectors = flat(model.adapters)
        read = replace(model, weights=weights, vectors=vectors, file=None, adapters=())
        with _shared_model(read, division, spread=False) as copy:
            named = tuple(
                replace(own, name=adapter.name, content_hash=adapter.content_hash)
                for own, adapter in zip(
                    unflat(copy.model.weights, copy.model.vectors), model.adapters, strict=True
                )
            )
            yield replace(
                shared,
                model=replace(shared.model, adapters=named),
                adapters=copy.weights,
                copied_bytes=shared.copied_bytes + copy.copied_bytes,
            )


@contextmanager
def _shared_model(model: PackedModel, division: Division, spread: bool) -> Iterator[SharedWeights]:
    """The packed file that is mapped already, or a copy; its descriptors are open within the block.

    spread: every rank has its own panels copied to where it runs, the first one here.
    """
    with ExitStack() as open_fds:
        fd = model.file.open_again() if model.file else None
        file = None
        if fd is not None:
            open_fds.callback(os.close, fd)
            file = Holding(fd, places_in_file(model))
            if not spread:
                yield SharedWeights(model, file, None, 0)
                return
        places = places_in_segment(model)
        segment = Segment.create(places.n_bytes, "weights")
        open_fds.callback(segment.close)
        weights, vectors = places.views(segment)
        copy = replace(model, weights=weights, vectors=vectors, file=None)
        for name, vector in model.vectors.items():
            vectors[name][...] = vector
        copy_panels(model.weights, weights, division if file else None)
        yield SharedWeights(copy, Holding(segment.fd, places), file, places.n_bytes)


def copy_panels(
    source: Mapping[str, PackedWeight], target: Mapping[str, PackedWeight], division: Division | None
) -> None:
    """The panels that a rank computes in decode, which memory bounds: their pages are then touched where
    they will be read. No division: all panels."""
    for name, weight in source.items():
        begin, end = 0, weight.panels
        if division is not None:
            teams = division.teams[TABLES["decode"]] or division.teams[TABLES["prefill"]]
            begin, end = share(weight.panels, teams, division.rank)
        _copy_some(weight, target[name], begin, end)


def _copy_some(weight: PackedWeight, target: PackedWeight, begin: int, end: int) -> None:
    """Panels [begin, end). Of a sparse weight all offsets, which say where panels lie."""
    pairs = list(zip(weight.arrays, target.arrays, strict=True))
    if weight.offsets is not None:
        (values, written), *pairs, (offsets, all_offsets) = pairs
        all_offsets[...] = offsets
        starts = [*(int(first) * SLOT_UNIT for first in weight.offsets[:, 0]), values.size]
        written[starts[begin] : starts[end]] = values[starts[begin] : starts[end]]
    for read, written in pairs:
        written[begin:end] = read[begin:end]


def _weight_place(weight: PackedWeight, offsets: list[int]) -> WeightPlace:
    arrays = zip(weight.arrays, offsets, strict=True)
    return WeightPlace(
        weight.kind,
        weight.n,
        weight.k,
        weight.group,
        weight.zero_point,
        weight.top_exponent,
        weight.is_sparse,
        tuple(ArrayPlace.of(array, offset) for array, offset in arrays),
    )


def _array_place(fields: Mapping[str, Any]) -> ArrayPlace:
    return ArrayPlace(fields["offset"], tuple(fields["shape"]), fields["dtype"])

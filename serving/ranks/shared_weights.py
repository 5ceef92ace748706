"""A model's arrays for other processes: in the packed file that is mapped anyway, or in a copy. Arrays of
this process alone, and weights to be placed on several NUMA nodes, are copied into a segment once."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import bytes_by_node, huge_pages_within, own_page, place_on_nodes
from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.packing import SLOT_UNIT, Array, PackedWeight
from phasewise.serving.models.linears import flat, unflat
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.headroom import available_bytes
from phasewise.serving.processes.segments import PAGE, Mapped, Segment
from phasewise.serving.ranks.rank_layout import RankLayout
from phasewise.serving.ranks.rank_memory import ByNode, Nodes, placing, warn_of_refusals, warn_of_strays
from phasewise.serving.ranks.rank_teams import TABLES

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64
LEAST_HUGE_BYTES = 4 << 20
"""Least bytes of a rank's panels for which huge pages are asked: they contain at least one."""


@dataclass(frozen=True, slots=True)
class ArrayPlace:
    """Place of one array, counted from the first byte of its file or segment."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, array: npt.NDArray[Any], offset: int) -> ArrayPlace:
        return cls(offset, array.shape, array.dtype.str)


_ARRAYS = ("values", "scales", "mins", "offsets")
"""The fields of a packed weight that are arrays, in the order of `PackedWeight.arrays`."""


@dataclass(frozen=True, slots=True)
class WeightPlace:
    """A packed weight by its fields: the places of its arrays, and all others."""

    others: Mapping[str, Any]
    arrays: Mapping[str, ArrayPlace]

    @classmethod
    def of(cls, weight: PackedWeight, offsets: list[int]) -> WeightPlace:
        """`offsets`: of each of `PackedWeight.arrays`."""
        others = {part.name: getattr(weight, part.name) for part in fields(weight)}
        arrays = [(name, array) for name in _ARRAYS if (array := others.pop(name)) is not None]
        places = zip(arrays, offsets, strict=True)
        return cls(others, {name: ArrayPlace.of(array, offset) for (name, array), offset in places})


@dataclass(frozen=True)
class Places:
    """Places of all arrays of a model in a file or segment of `n_bytes`."""

    n_bytes: int
    weights: Mapping[str, WeightPlace]
    vectors: Mapping[str, ArrayPlace]

    def views(self, segment: Mapped) -> tuple[dict[str, PackedWeight], dict[str, Array]]:
        """Weights and vectors over `segment`, by name."""

        def view(place: ArrayPlace) -> Array:
            return segment.view(place.offset, place.shape, place.dtype)

        weights = {}
        for name, place in self.weights.items():
            arrays: dict[str, Any] = dict.fromkeys(_ARRAYS)
            arrays |= {each: view(own) for each, own in place.arrays.items()}
            weights[name] = PackedWeight(**place.others, **arrays)
        return weights, {name: view(place) for name, place in self.vectors.items()}


def places_in_file(model: PackedModel) -> Places:
    """Places of the arrays of a model that is mapped from its packed file."""
    assert model.file is not None
    address = model.file.address
    weights = {
        name: WeightPlace.of(weight, [array.ctypes.data - address for array in weight.arrays])
        for name, weight in model.weights.items()
    }
    vectors = {name: ArrayPlace.of(v, v.ctypes.data - address) for name, v in model.vectors.items()}
    return Places(model.file.n_bytes, weights, vectors)


def places_in_segment(model: PackedModel, of_weights: int = ALIGNMENT) -> Places:
    """Places for a copy of every array, one after another. `of_weights`: alignment of the weights' arrays."""
    end = 0

    def reserve(array: Array, alignment: int) -> int:
        nonlocal end
        offset = -(-end // alignment) * alignment
        end = offset + array.nbytes
        return offset

    weights = {
        name: WeightPlace.of(weight, [reserve(array, of_weights) for array in weight.arrays])
        for name, weight in model.weights.items()
    }
    end = -(-end // of_weights) * of_weights  # no vector shares a page with a weight
    vectors = {
        name: ArrayPlace.of(vector, reserve(vector, ALIGNMENT)) for name, vector in model.vectors.items()
    }
    return Places(max(end, 1), weights, vectors)


@dataclass(frozen=True, slots=True)
class Holding:
    """Arrays behind a file descriptor that other processes inherit."""

    fd: int
    places: Places


@dataclass(frozen=True, slots=True)
class SharedWeights:
    """A model whose arrays other ranks can map."""

    model: PackedModel
    """The model over the arrays that the first rank reads."""
    weights: Holding
    source: Holding | None
    """Source from which each rank copies its own panels to `weights`; None: they are in place."""
    copied_bytes: int
    """Bytes of the copy in `weights`; 0: there is none."""
    by_node: Mapping[int, ByNode | None] = field(default_factory=dict)
    """Bytes by NUMA node of the panels copied in this process, by rank."""
    adapters: Holding | None = None
    """Arrays of the adapters; None: the model has none."""


@contextmanager
def share_weights(model: PackedModel, layout: RankLayout) -> Iterator[SharedWeights]:
    """Share the model's arrays, and those of its adapters, which every rank reads whole, within the block."""
    with _shared_model(model, layout, layout.places_memory) as shared:
        if not model.adapters:
            yield shared
            return
        weights, vectors = flat(model.adapters)
        read = replace(model, weights=weights, vectors=vectors, file=None, adapters=())
        with _shared_model(read, layout, spread=False) as copy:
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
def _shared_model(model: PackedModel, layout: RankLayout, spread: bool) -> Iterator[SharedWeights]:
    """Share the mapped packed file, or a copy; descriptors are open within the block. `spread`: every rank's
    panels are copied to its NUMA nodes: here for the first rank, or for all if there is no packed file."""
    with ExitStack() as open_fds:
        fd = model.file.open_again() if model.file else None
        file = None
        if fd is not None:
            open_fds.callback(os.close, fd)
            file = Holding(fd, places_in_file(model))
            if not spread:
                yield SharedWeights(model, file, None, 0)
                return
        places = places_in_segment(model, PAGE if spread else ALIGNMENT)
        segment = Segment.create(places.n_bytes, "weights")
        open_fds.callback(segment.close)
        weights, vectors = places.views(segment)
        copy = replace(model, weights=weights, vectors=vectors, file=None)
        by_node: dict[int, ByNode | None] = {}
        with placing(layout.nodes(0)):
            for name, vector in model.vectors.items():
                vectors[name][...] = vector
            if not spread:
                copy_panels(model.weights, weights, None, huge=False)
        for rank in () if not spread else (0,) if file else range(layout.n_ranks):
            with placing(layout.nodes(rank)):
                huge = len(layout.nodes(rank)) == 1
                copy_panels(model.weights, weights, layout.division(rank), huge)
            by_node[rank] = panels_by_node(weights, layout.division(rank))
        yield SharedWeights(copy, Holding(segment.fd, places), file, places.n_bytes, by_node)


def copy_panels(
    source: Mapping[str, PackedWeight],
    target: Mapping[str, PackedWeight],
    division: Division | None,
    huge: bool,
    apart: bool = False,
) -> None:
    """Copy the panels that a rank computes in decode, which touches their pages near the rank. `division`:
    None: all panels. `huge`: ask for huge pages, which would be uneven on interleaved nodes. A page shared by
    two ranks belongs to the first. `apart`: give this process a page of its own where it is the second."""
    for name, weight in source.items():
        begin, end = _own_panels(weight, division)
        if weight.offsets is not None:
            target[name].arrays[-1][...] = weight.offsets
        parts = _parts(target[name], weight.offsets, begin, end)
        for (read, first, last), (written, *_) in zip(
            _parts(weight, weight.offsets, begin, end), parts, strict=True
        ):
            if first == last:
                continue
            if huge and last - first >= LEAST_HUGE_BYTES:
                huge_pages_within(written[first:last])
            elif apart and (before := min(first, _page_offset(written, first))):
                own_page(written, first)  # a refusal costs speed alone
                first -= before
            last = min(len(written), last + -_page_offset(written, last) % PAGE)
            written[first:last] = read[first:last]


def _page_offset(array: Bytes, place: int) -> int:
    """Offset of byte `place` of an array within its page."""
    return (array.ctypes.data + place) % PAGE


def panels_by_node(weights: Mapping[str, PackedWeight], division: Division | None) -> ByNode | None:
    """Bytes by NUMA node of the panels that `copy_panels` has written; None: the system does not tell."""
    total: Counter[int] = Counter()
    for weight in weights.values():
        for array, first, last in _parts(weight, weight.offsets, *_own_panels(weight, division)):
            own = bytes_by_node(array, first, last)
            if own is None:
                return None
            total.update(own)
    return dict(total)


def _own_panels(weight: PackedWeight, division: Division | None) -> tuple[int, int]:
    """Panels [begin, end) of a rank in decode, or in prefill if there is no decode plan."""
    if division is None:
        return 0, weight.panels
    return division.panels(weight, TABLES["decode" if division.teams[TABLES["decode"]] else "prefill"])


def _parts(weight: PackedWeight, offsets: Array | None, begin: int, end: int) -> list[tuple[Bytes, int, int]]:
    """The bytes of each array, and the range of panels [begin, end) within them. `offsets`: panel offsets of
    a sparse weight; None: the weight is dense."""
    if offsets is None:
        return [_bytes_of_panels(array, begin, end) for array in weight.arrays]
    values, *others, _ = weight.arrays
    starts = [*(int(first) * SLOT_UNIT for first in offsets[:, 0]), values.size]
    of_values = (_bytes(values), starts[begin] * values.itemsize, starts[end] * values.itemsize)
    return [of_values, *(_bytes_of_panels(array, begin, end) for array in others)]


def _bytes_of_panels(array: Array, begin: int, end: int) -> tuple[Bytes, int, int]:
    each = array.nbytes // len(array)
    return _bytes(array), begin * each, end * each


def _bytes(array: Array) -> Bytes:
    return array.reshape(-1).view(np.uint8)


_log = logging.getLogger(__name__)


def weights_near(model: PackedModel, nodes: Nodes, further_bytes: int) -> PackedModel:
    """The model with its weights on `nodes`, or the same model if there are none or memory is too short for a
    copy. `further_bytes`: other memory that the model needs. RanksError: the system grants no memory."""
    if not nodes:
        return model
    places = places_in_segment(model)
    left = available_bytes()
    if left is not None and places.n_bytes + further_bytes > left:
        _log.warning(
            "%s: its weights stay where the system has read them, for a copy on NUMA node %s needs %.0f MiB"
            " more than the %.0f MiB that are free",
            model.name,
            ",".join(map(str, nodes)),
            (places.n_bytes + further_bytes - left) / 2**20,
            left / 2**20,
        )
        return model
    memory = Mapped.own(places.n_bytes)
    answer = place_on_nodes(memory.memory, 0, memory.n_bytes, nodes)
    weights, vectors = places.views(memory)
    copy_panels(model.weights, weights, None, huge=False)  # `memory` has asked for them
    for name, vector in model.vectors.items():
        vectors[name][...] = vector
    if model.file is not None:
        model.file.release()
    warn_of_refusals({0: answer})
    if answer == 0:
        warn_of_strays(0, panels_by_node(weights, None), nodes)
    return replace(model, weights=weights, vectors=vectors, file=None)

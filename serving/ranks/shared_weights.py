"""A model's arrays as another process finds them: in the packed file that is mapped anyway, or in a copy.

Arrays of this process alone, and weights that should lie on several NUMA nodes, are copied into a segment
once.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
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
"""The least panels of a rank for which huge pages are asked: within them there is at least one."""


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

    def views(self, segment: Mapped) -> tuple[dict[str, PackedWeight], dict[str, Array]]:
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


def places_in_segment(model: PackedModel, of_weights: int = ALIGNMENT) -> Places:
    """The places of a copy of every array, one after another. of_weights: the alignment of theirs."""
    end = 0

    def reserve(array: Array, alignment: int) -> int:
        nonlocal end
        offset = -(-end // alignment) * alignment
        end = offset + array.nbytes
        return offset

    weights = {
        name: _weight_place(weight, [reserve(array, of_weights) for array in weight.arrays])
        for name, weight in model.weights.items()
    }
    end = -(-end // of_weights) * of_weights  # no vector shares a page with a weight
    vectors = {
        name: ArrayPlace.of(vector, reserve(vector, ALIGNMENT)) for name, vector in model.vectors.items()
    }
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
    """Bytes of the copy that is to be made, or was just made."""
    by_node: Mapping[int, ByNode | None] = field(default_factory=dict)
    """By rank, bytes by NUMA node of the panels that were copied here."""
    adapters: Holding | None = None
    """None: the model has none."""

    def without_source(self) -> SharedWeights:
        """As ranks that are started anew on the same layout find them: every panel is in its place."""
        return replace(self, source=None, copied_bytes=0, by_node={})


@contextmanager
def share_weights(model: PackedModel, layout: RankLayout) -> Iterator[SharedWeights]:
    """The model's arrays, and those of its adapters, which every rank reads whole."""
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
    """The packed file that is mapped already, or a copy; its descriptors are open within the block. spread:
    every rank has its own panels copied to where it runs: the first one here, and all where no file has
    them."""
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
    """The panels that a rank computes in decode, which memory bounds: their pages are then touched where they
    will be read. No division: all panels. huge: ask for huge pages; by turns over nodes they would lie
    unevenly. Two ranks may have parts of one page. The first of them has it, whole; apart: this process has a
    page of its own in its place where it is the second."""
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
    """The number of bytes from the beginning of a byte's page to it."""
    return (array.ctypes.data + place) % PAGE


def panels_by_node(weights: Mapping[str, PackedWeight], division: Division | None) -> ByNode | None:
    """Bytes by NUMA node of the panels that `copy_panels` has written; None where it is not told."""
    total: Counter[int] = Counter()
    for weight in weights.values():
        for array, first, last in _parts(weight, weight.offsets, *_own_panels(weight, division)):
            own = bytes_by_node(array, first, last)
            if own is None:
                return None
            total.update(own)
    return dict(total)


def _own_panels(weight: PackedWeight, division: Division | None) -> tuple[int, int]:
    """The panels of a rank in decode, or in prefill where nothing else is planned."""
    if division is None:
        return 0, weight.panels
    return division.panels(weight, TABLES["decode" if division.teams[TABLES["decode"]] else "prefill"])


def _parts(weight: PackedWeight, offsets: Array | None, begin: int, end: int) -> list[tuple[Bytes, int, int]]:
    """The bytes of each array, and which of them are panels [begin, end). offsets: those of a sparse weight,
    which say where panels lie."""
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


_log = logging.getLogger(__name__)


def weights_near(model: PackedModel, nodes: Nodes, further_bytes: int) -> PackedModel:
    """`model` with its weights on `nodes`; itself where there are none, or where memory is too short for two.
    further_bytes: of memory that the model needs besides. RanksError where the system grants none."""
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

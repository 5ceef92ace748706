"""Pages that two ranks share: each has its own, and whoever reads other panels finds them all."""

from __future__ import annotations

import mmap
import os
from dataclasses import replace
from random import Random
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing, sparse
from phasewise.cython_kernels._native import own_page
from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.processes.segments import PAGE, Segment
from phasewise.serving.ranks.shared_weights import copy_panels, places_in_segment
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.tiers import examples


def weights_of(kinds: list[str], seed: int) -> dict[str, PackedWeight]:
    rng = np.random.default_rng(seed)
    weights: dict[str, PackedWeight] = {}
    for number, kind in enumerate(kinds):
        n, k = int(rng.integers(1, 400)), 32 * int(rng.integers(1, 20))
        dense = rng.standard_normal((n, k), np.float32)
        if kind == "sparse":
            dense[rng.random(dense.shape) < 0.7] = 0
            weights[str(number)] = sparse.to_sparse(packing.pack_dense(dense, "bf16"))
        else:
            weights[str(number)] = (
                packing.pack_quant(packing.quantise(dense, 8, True))
                if kind == "q8"
                else packing.pack_dense(dense, cast("packing.Kind", kind))
            )
    return weights


def same(ours: PackedWeight, theirs: PackedWeight, begin: int, end: int) -> bool:
    """Panels [begin, end) of both, in the arrays that are cut by panels."""
    if theirs.is_sparse:
        assert theirs.offsets is not None
        starts = [*(int(first) * packing.SLOT_UNIT for first in theirs.offsets[:, 0]), theirs.values.size]
        return bool(
            (ours.values[starts[begin] : starts[end]] == theirs.values[starts[begin] : starts[end]]).all()
        )
    return all(
        (own[begin:end] == other[begin:end]).all()
        for own, other in zip(ours.arrays, theirs.arrays, strict=True)
    )


@examples(60)
@given(
    kinds=st.lists(st.sampled_from(("f32", "bf16", "q8", "sparse")), min_size=1, max_size=4),
    shares=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    order=st.randoms(use_true_random=False),
    seed=st.integers(0, 1000),
)
def test_ranks_in_any_order_leave_every_panel_to_all(
    kinds: list[str], shares: list[int], order: Random, seed: int
) -> None:
    """Each rank maps the copy by itself, as processes do; one that comes later finds all panels.
    Vectors stay.
    """
    source = weights_of(kinds, seed)
    norm = np.arange(1, 100, dtype=np.float32)
    places = places_in_segment(
        replace(tiny_model(tiny_config()), weights=source, vectors={"norm": norm}), PAGE
    )
    first = Segment.create(places.n_bytes, "test")
    try:
        mapped = [first, *(Segment(first.fd, first.n_bytes) for _ in shares)]
        views, vectors = zip(*map(places.views, mapped), strict=True)
        vectors[0]["norm"][...] = norm
        ranks = [*range(1, len(shares))]
        order.shuffle(ranks)
        for rank in (0, *ranks):
            copy_panels(source, views[rank], Division((tuple(shares),) * 2, rank), huge=True, apart=rank > 0)
        for name, weight in source.items():
            assert all(same(view[name], weight, 0, weight.panels) for view in (views[0], views[-1]))
            for rank, view in enumerate(views[:-1]):
                own = Division((tuple(shares),) * 2, rank).panels(weight, 1)
                assert same(view[name], weight, *own)
        assert all((each["norm"] == norm).all() for each in vectors)
    finally:
        first.close()


def test_a_page_of_ones_own_is_seen_by_nobody_else() -> None:
    fd = os.memfd_create("phasewise-test")
    os.ftruncate(fd, 3 * PAGE)
    ours, theirs = (mmap.mmap(fd, 3 * PAGE) for _ in range(2))
    os.close(fd)
    theirs[:] = b"x" * (3 * PAGE)

    assert own_page(ours, PAGE + 5) == 0
    assert ours[PAGE : 2 * PAGE] == bytes(PAGE)
    ours[PAGE] = 7
    assert theirs[:] == b"x" * (3 * PAGE)
    assert ours[:PAGE] == ours[2 * PAGE :] == b"x" * PAGE
    with pytest.raises(ValueError, match="byte"):
        own_page(ours, 3 * PAGE)

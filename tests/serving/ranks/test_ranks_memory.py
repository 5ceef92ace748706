"""The kernel is asked to place the memory of ranks, and its refusal is told in one line."""

from __future__ import annotations

import errno
import logging
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
from phasewise.cython_kernels._native import (
    bytes_by_node,
    huge_pages_within,
    own_page,
    place_on_nodes,
    prefer_nodes,
)
from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import RanksError
from phasewise.serving.processes.segments import PAGE, Segment
from phasewise.serving.ranks.rank_instructions import Report
from phasewise.serving.ranks.rank_memory import (
    Nodes,
    placing,
    stray_bytes,
    tell_of_others,
    warn_of_refusals,
    warn_of_strays,
)
from phasewise.serving.ranks.shared_weights import copy_panels, places_in_segment
from tests.support.models.reference_forward import tiny_config, tiny_model
from tests.support.tiers import examples


class Kernel:
    """Answers a memory policy with `answer`, and remembers the one in force."""

    def __init__(self, answer: int = 0) -> None:
        self.answer = answer
        self.nodes: Nodes | None = None

    def set_policy(self, nodes: Nodes | None) -> int:
        if self.answer == 0:
            self.nodes = nodes
        return self.answer


def test_a_policy_holds_for_the_block_and_no_longer() -> None:
    kernel = Kernel()
    with placing((1, 3), kernel.set_policy) as answer:
        assert (kernel.nodes, answer) == ((1, 3), 0)

    assert kernel.nodes is None


def test_a_denied_policy_is_one_warning_that_names_the_flag(caplog: pytest.LogCaptureFixture) -> None:
    answers = {}
    for rank in range(4):
        with placing((rank % 2,), Kernel(errno.EPERM).set_policy) as answers[rank]:
            pass
    with caplog.at_level(logging.WARNING):
        warn_of_refusals(answers)

    (record,) = caplog.records
    assert "--cap-add SYS_NICE" in record.getMessage()
    assert "rank 0, 1, 2, 3" in record.getMessage()


def test_a_report_tells_bytes_by_node() -> None:
    report = Report(None, 0, {0: 5, 3: 7})

    assert Report.from_line(report.to_line()) == report
    assert Report.from_line(Report("no room").to_line()) == Report("no room")


def test_a_node_that_is_not_there_is_no_matter_of_permission(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_refusals({1: errno.EINVAL})

    assert "SYS_NICE" not in caplog.text
    assert "rank 1" in caplog.text


def test_the_kernel_is_asked() -> None:
    """Granted, or refused with a reason: what a container allows is not ours to say."""
    allowed = {0, errno.EPERM, errno.ENOSYS}
    memory = mmap.mmap(-1, 1 << 16)

    assert prefer_nodes([0]) in allowed
    assert prefer_nodes(None) in allowed
    assert place_on_nodes(memory, 5000, 20000, [0]) in allowed
    assert prefer_nodes([1000]) in {errno.EINVAL, errno.EPERM, errno.ENOSYS}
    assert prefer_nodes([-1]) == prefer_nodes([0, 1 << 20]) == prefer_nodes([]) == errno.EINVAL
    with pytest.raises(ValueError, match="bytes"):
        place_on_nodes(memory, 0, (1 << 16) + 1, [0])
    with pytest.raises(ValueError, match="nodes"):
        prefer_nodes([0] * 2000)


def test_pages_are_counted_once_they_are_touched() -> None:
    memory = mmap.mmap(-1, 64 * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    huge_pages_within(memory)  # of no huge page whole: nothing changes
    if bytes_by_node(memory, 0, 64) is None:
        pytest.skip("a kernel without NUMA")
    assert bytes_by_node(memory, 0, len(memory)) == {}

    for page in (1, 2, 40):
        memory[page * mmap.PAGESIZE] = 1

    def counted(begin: int, end: int) -> int:
        return sum((bytes_by_node(memory, begin * mmap.PAGESIZE, end * mmap.PAGESIZE) or {}).values())

    assert counted(0, 64) == 3 * mmap.PAGESIZE
    assert [counted(0, 1), counted(1, 2), counted(2, 40), counted(40, 64)] == [0, *[mmap.PAGESIZE] * 3]
    with pytest.raises(ValueError, match="bytes"):
        bytes_by_node(memory, 5, 4)


@pytest.mark.parametrize(
    ("by_node", "nodes", "stray"),
    [
        ({0: 100}, (0,), 0),
        ({0: 60, 1: 40}, (0,), 40),
        ({0: 50, 1: 50}, (0, 1), 0),
        ({0: 75, 1: 25}, (0, 1), 25),
        ({2: 100}, (0, 1), 100),
        ({}, (0, 1), 0),
        ({0: 100}, (), 0),
    ],
)
def test_stray_bytes_are_those_that_would_have_to_move(
    by_node: dict[int, int], nodes: Nodes, stray: int
) -> None:
    assert stray_bytes(by_node, nodes) == stray


def test_memory_that_a_node_does_not_have_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_strays(1, {1: 500 << 20, 0: 300 << 20}, (1,))
    tell_of_others(2, (3,), (1,))

    full, bare = (record.getMessage() for record in caplog.records)
    assert "300 of 800 MiB of rank 1's weights found no room on NUMA node 1" in full
    assert bare == (
        "NUMA node 3 has no memory for this process: that of rank 2 lies on the nearest that has, 1"
    )


def test_memory_that_lies_as_planned_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_strays(0, {0: 98, 1: 2}, (0,))
    warn_of_strays(0, None, (0,))
    warn_of_strays(0, {0: 7}, ())
    tell_of_others(0, (0, 1), (0, 1))

    assert not caplog.records


def test_a_segment_is_zero_shared_and_nameless() -> None:
    segment = Segment.create(5000, "test")
    other = Segment(segment.fd, segment.n_bytes)
    numbers = segment.view(64, (3, 5), "float32")
    assert not numbers.any()
    numbers[1, 2] = 7

    assert other.view(64, (3, 5), "float32")[1, 2] == 7
    with pytest.raises(ValueError, match="at byte"):
        segment.view(segment.n_bytes - 8, (3,), "float32")
    segment.close()
    segment.close()
    assert numbers[1, 2] == 7


def test_a_segment_that_nobody_can_have_is_one_line() -> None:
    with pytest.raises(RanksError, match=r"refused \d+ MiB of memory that ranks share \(weights\)"):
        Segment.create(1 << 60, "weights")


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

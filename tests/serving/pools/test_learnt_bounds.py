"""Bounds learnt from answers of late, and what ODMA's buckets make of them."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.pools.buckets import FEWEST, LearntSizes, LengthWindow, PoolBounds, learnt
from phasewise.serving.pools.contiguous import ContiguousPool, peak
from phasewise.serving.pools.contract import ALIGNMENT, Demand, Estimate, PoolSettings
from phasewise.workflows.bench.kv.compared import FixedSizes, StaticSizes, WholeBuckets

LENGTHS = st.lists(st.integers(1, 4096), min_size=FEWEST, max_size=300)


@given(lengths=LENGTHS, n_buckets=st.integers(1, 16), top=st.floats(0.5, 1))
def test_bounds_are_few_aligned_and_ascend(lengths: list[int], n_buckets: int, top: float) -> None:
    bounds = learnt(tuple(sorted(lengths)), n_buckets, top).buckets

    assert 1 <= len(bounds) <= n_buckets
    assert list(bounds) == sorted(set(bounds))
    assert all(bound % ALIGNMENT == 0 for bound in bounds)
    assert sum(length <= bounds[-1] for length in lengths) >= top * len(lengths) - 1e-9


def test_buckets_are_equally_full() -> None:
    """The lengths are far apart, so that the alignment does not blur them."""
    rng = random.Random(1)
    lengths = sorted(rng.randrange(1, 100_000) for _ in range(1000))

    bounds = learnt(tuple(lengths), 5, 1.0).buckets

    shares = Counter(bisect_left(bounds, length) for length in lengths)
    assert all(abs(count - 200) <= 2 for count in shares.values())


def test_too_few_answers_teach_nothing() -> None:
    assert learnt((5,) * (FEWEST - 1), 4, 0.98) == PoolBounds()


@given(st.lists(st.integers(1, 50), max_size=100))
def test_only_the_window_is_remembered(answers: list[int]) -> None:
    lengths = LengthWindow(window=20)
    for answer in answers:
        lengths.add(answer)

    assert list(lengths.frozen()) == sorted(answers[-20:])


@given(lengths=LENGTHS, answer_tokens=st.integers(1, 5000))
def test_what_outlives_is_at_least_as_long(lengths: list[int], answer_tokens: int) -> None:
    """Quantiles ascend with their level, and lie between the shortest and the longest that are left."""
    bounds = learnt(tuple(sorted(lengths)), 4, 0.98)
    left = sorted(length for length in lengths if length >= answer_tokens)
    if not left:
        assert bounds.outlived(answer_tokens, 0.5) is bounds.mean_outlived(answer_tokens) is None
        return
    quantiles = [bounds.outlived(answer_tokens, level) for level in (0.0, 0.5, 1.0)]
    mean = bounds.mean_outlived(answer_tokens)
    assert quantiles[0] == left[0]
    assert quantiles[2] == left[-1]
    assert quantiles[1] in left
    assert mean is not None
    assert math.isclose(mean, sum(left) / len(left))


@given(requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 50)), min_size=1, max_size=8))
def test_the_peak_is_what_a_clock_would_see(requests: list[tuple[int, int]]) -> None:
    """One slot a step for each request until its end."""
    ticks = range(max(to_come for to_come, _ in requests) + 1)
    seen = [sum(held + now for to_come, held in requests if to_come >= now) for now in ticks]

    assert peak(requests) == max(seen)


def taught(kind: type[LearntSizes] = LearntSizes, **settings: object) -> LearntSizes:
    """Sizes that have seen answers of 10, 20 ... 1000 tokens: bounds of 256, 512, 752 and 992."""
    sizes = kind(
        PoolSettings(2000, n_buckets=4, refresh_every=1, top_level=0.99, large_level=0.9, **settings)  # type: ignore[arg-type]
    )
    for answer in range(10, 1010, 10):
        sizes.ended(Demand(5, 2000, 5), answer)
    assert sizes.refresh()
    assert sizes.bounds == (256, 512, 752, 992)
    return sizes


def demand(output_tokens: float, uncertainty: float, most: int = 2000) -> Demand:
    return Demand(5, most, 5, Estimate(output_tokens, uncertainty))


def test_the_large_bucket_takes_the_unsure_the_unknown_and_the_long() -> None:
    """And hands out what answers became that were at least as long, nine in ten of them."""
    sizes = taught(WholeBuckets, tau=0.8)

    for unsure in (demand(20, 0.81), Demand(5, 2000, 5)):
        assert sizes.first(unsure)[::2] == (5 + 900, None)
    assert sizes.first(demand(995, 0))[::2] == (5 + 1000, None)
    assert sizes.first(demand(1500, 0)).n_positions == 2000
    assert sizes.next(demand(100, 0), 5 + 901)[::2] == (5 + 990, None)


@given(lengths=LENGTHS, most_answer=st.integers(1, 5000))
def test_without_a_predictor_requests_belong_to_learnt_buckets(lengths: list[int], most_answer: int) -> None:
    """By the recent answers and max_tokens; the large bucket has what is expected beyond every bound."""
    sizes = LearntSizes(PoolSettings(6000, refresh_every=1))
    for length in lengths:
        sizes.ended(Demand(5, 6000, 5), length)
    sizes.refresh()

    size = sizes.first(Demand(5, 5 + most_answer, 5))

    expected = min(sum(lengths) / len(lengths), most_answer)
    holding = [bucket for bucket, bound in enumerate(sizes.bounds) if bound >= expected]
    assert size.bucket == (holding[0] if holding else None)
    assert size.end_positions == 5 + math.ceil(expected)
    assert sizes.large_bound >= sizes.bounds[-1]


def test_no_block_is_longer_than_its_request_can_become() -> None:
    sizes = taught()

    for asked in (demand(700, 0, most=105), Demand(5, 105, 5), demand(5, 0, most=105)):
        size = sizes.first(asked)
        assert size.n_positions <= 105
        assert size.end_positions <= 105


def test_blocks_climb_the_bounds_up_to_the_estimate() -> None:
    """First the smallest bucket's, then the next; the last is as long as the answer is thought to become."""
    sizes = taught(alpha=0)
    asked = demand(600, 0)

    assert sizes.first(asked) == (5 + 256, 5 + 600, 2)
    assert sizes.next(asked, 5 + 257) == (5 + 512, 5 + 600, 2)
    assert sizes.next(asked, 5 + 513) == (5 + 600, 5 + 600, 2)
    assert sizes.next(asked, 5 + 601).bucket is None


def test_new_bounds_leave_running_requests_alone() -> None:
    """Blocks of old bounds go back to the arena when they are freed; none is lost."""
    sizes = LearntSizes(PoolSettings(500, n_buckets=2, refresh_every=FEWEST))
    pool = ContiguousPool(8192, sizes)
    before = pool.reserve("stays", Demand(10, 500, 10))
    for length in (20, 200):
        for number in range(FEWEST):
            assert pool.reserve(str(number), Demand(10, 500, 10, Estimate(length, 0)))
        for number in range(FEWEST):
            pool.release(str(number), length)
        assert pool.refresh()
        pool.check()

    assert before is not None
    assert pool.placements() == {"stays": before.placement}
    assert pool.stats().refreshes == 2
    assert pool.stats().slots_free == 8192 - before.placement.n_slots


@pytest.mark.parametrize("n_requests", [3, 40])
def test_requests_are_let_in_by_what_they_will_need(n_requests: int) -> None:
    """With exact estimates nothing promised is more than there is, the reserve left out."""
    sizes = taught(reserve_share=0.25)
    pool = ContiguousPool(8000, sizes)
    let_in = [
        name for name in range(n_requests) if pool.reserve(str(name), demand(800, 0, most=1000)) is not None
    ]

    assert len(let_in) == min(n_requests, 6000 // 805)


@pytest.mark.parametrize("estimate", [None, Estimate(30, 0)])
def test_free_slots_are_room_wherever_they_lie(estimate: Estimate | None) -> None:
    """Every second of the blocks is given back: those that stay make way until no slot is free."""
    pool = ContiguousPool(640, taught(reserve_share=0.0))
    names = [str(index) for index in range(20)]
    for name in names:
        assert pool.reserve(name, Demand(30, 400, 30, Estimate(1, 0))) is not None
    for name in names[::2]:
        pool.release(name)
    assert pool.stats().largest_reservable < 64

    grant = pool.reserve("long", Demand(200, 300, 200, estimate))
    assert grant is not None
    assert grant.moves
    for n_positions in range(201, 301):
        assert pool.grow("long", n_positions) is not None
    length = 31
    while pool.stats().slots_free:
        assert pool.grow("1", length) is not None
        length += 1
        pool.check()


def test_other_policies_move_nobody_for_another() -> None:
    """Static pre-allocation and S3's buckets are as their authors have them."""
    for sizes in (StaticSizes(64), FixedSizes(64, 4), WholeBuckets(PoolSettings(64))):
        assert not sizes.squeezes
        assert sizes.reserve_share == 0

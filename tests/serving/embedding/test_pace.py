"""A device's time for what it holds, from its batches of late."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.lane import Lane, LaneState
from phasewise.serving.embedding.lateness import FIRST_SHARE
from phasewise.serving.embedding.pace import KEPT, LAST_BATCHES, LEAST_TOKENS, RECENT_BATCHES, DevicePace
from phasewise.serving.embedding.queues import Depth, DeviceQueue
from tests.support.servers.fake_embedding import FakeWorker
from tests.support.tiers import examples


def lane_of(slo_s: float, depth: Depth, batch_s: float = 0.0, rank: int = 1) -> Lane:
    return Lane.over(DeviceQueue("one", rank, depth, batch_s=batch_s), FakeWorker, FakeWorker(), slo_s)


@examples(100)
@given(
    slo_s=st.floats(0.05, 5),
    s_per_token=st.floats(1e-6, 1e-2),
    depth=st.integers(100, 100_000),
    batch_share=st.floats(0, 0.5),
)
def test_what_is_held_is_computed_within_the_promise(
    slo_s: float, s_per_token: float, depth: int, batch_share: float
) -> None:
    batch_s = batch_share * slo_s
    lane = lane_of(slo_s, Depth(depth, depth), batch_s)
    for _ in range(5):
        lane.pace.computed(600, batch_s + 600 * s_per_token)
    usable_s = slo_s * (1 - KEPT - FIRST_SHARE)

    lane.heed(7.0, 7.0 + slo_s * (1 - KEPT))

    def seconds(tokens: float) -> float:
        n_batches = max(1, math.ceil(tokens / lane.most_in_batch.tokens - 1e-6))
        return n_batches * batch_s + tokens * lane.pace.s_per_token

    held_s = seconds(lane.queue.share * depth)
    assert 0 <= lane.queue.share <= 1
    assert held_s <= usable_s * (1 + 1e-6) or lane.queue.share == 0
    if seconds(depth) <= usable_s * (1 - 1e-6):
        assert lane.queue.share == 1


@examples(50)
@given(slo_s=st.floats(0.05, 5), depth=st.integers(1, 500), batch_share=st.floats(0, 0.5))
def test_a_plan_s_depth_may_be_used_from_the_start(slo_s: float, depth: int, batch_share: float) -> None:
    lane = lane_of(slo_s, Depth(depth, 75 * depth), batch_share * slo_s, rank=0)

    assert LaneState.of(lane, 3.0).depth == Depth(depth, 75 * depth)


def test_without_a_promise_all_of_the_depth_may_be_used() -> None:
    lane = lane_of(math.inf, Depth(10, 1000))
    lane.pace.computed(1000, 1e6)

    assert LaneState.of(lane, 3.0).depth == Depth(10, 1000)


def test_a_request_that_came_late_has_less_room() -> None:
    lane = lane_of(1.0, Depth(100, 10_000))
    shares = []
    for age_s in (0.0, 0.2, 0.5, 2.0):
        lane.heed(5.0, 5.0 - age_s + 1 - KEPT)
        shares.append(lane.queue.share)

    assert shares == pytest.approx([1.0, 0.75, 0.375, 0.0])


def test_it_forgets_what_is_long_ago() -> None:
    pace = DevicePace()
    for _ in range(RECENT_BATCHES):
        pace.computed(1000, 1.0)
    assert pace.s_per_token == pytest.approx(1e-3)
    for _ in range(RECENT_BATCHES):
        pace.computed(1000, 0.001)

    assert pace.s_per_token == pytest.approx(1e-6)


def test_it_slows_down_sooner_than_it_speeds_up() -> None:
    pace = DevicePace()
    for _ in range(RECENT_BATCHES):
        pace.computed(1000, 0.001)
    for _ in range(LAST_BATCHES):
        pace.computed(1000, 1.0)
    assert pace.s_per_token == pytest.approx(1e-3)
    for _ in range(LAST_BATCHES):
        pace.computed(1000, 0.001)

    assert pace.s_per_token > 1e-4


def test_a_plan_s_time_is_the_least_and_what_a_batch_takes_by_itself_is_no_token_s() -> None:
    pace = DevicePace(batch_s=0.3, planned_s_per_token=1e-4)
    pace.computed(1000, 0.31)
    assert pace.s_per_token == 1e-4

    pace.computed(1000, 0.9)

    assert pace.s_per_token == pytest.approx((0.01 + 0.6) / 2000)


def test_a_small_batch_says_little() -> None:
    """The first input of an idle server takes long; a burst after it is not refused for that."""
    pace = DevicePace()
    pace.computed(10, 0.05)

    assert pace.s_per_token == pytest.approx(0.05 / LEAST_TOKENS)


def test_a_share_is_of_both_depths_and_one_input_always_has_room() -> None:
    queue = DeviceQueue("cpu:0", 1, Depth(10, 1000), share=0.25)

    assert queue.has_room(5000)
    queue.inputs, queue.tokens = 1, 100
    assert queue.has_room(150)
    assert not queue.has_room(151)
    queue.inputs = 2
    assert not queue.has_room(1)

"""A device computes what it holds within its promise, however slow it has become."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.pace import LAST_BATCHES, LEAST_SHARE, MARGIN, RECENT_BATCHES, DevicePace
from phasewise.serving.embedding.queues import Depth, DeviceQueue
from tests.support.tiers import examples


@given(slo_s=st.floats(0.05, 5), s_per_token=st.floats(1e-6, 1e-2), depth=st.integers(100, 100_000))
@examples(100)
def test_what_is_held_is_computed_within_the_promise(slo_s: float, s_per_token: float, depth: int) -> None:
    pace = DevicePace(slo_s, depth)

    share = [pace.computed(600, 600 * s_per_token) for _ in range(5)][-1]

    assert LEAST_SHARE <= share <= 1
    if share > LEAST_SHARE:
        assert share * depth * s_per_token <= slo_s * (1 - MARGIN) * (1 + 1e-9)
    if depth * s_per_token <= slo_s * (1 - MARGIN):
        assert share == pytest.approx(1)


def test_it_forgets_what_is_long_ago() -> None:
    pace = DevicePace(1.0, 10_000)
    for _ in range(RECENT_BATCHES):
        slow = pace.computed(1000, 1.0)
    for _ in range(RECENT_BATCHES):
        quick = pace.computed(1000, 0.001)

    assert slow == pytest.approx((1 - MARGIN) / 10)
    assert quick == 1


def test_it_slows_down_sooner_than_it_speeds_up() -> None:
    pace = DevicePace(1.0, 10_000)
    for _ in range(RECENT_BATCHES):
        pace.computed(1000, 0.001)
    for _ in range(LAST_BATCHES):
        slow = pace.computed(1000, 1.0)
    for _ in range(LAST_BATCHES):
        still = pace.computed(1000, 0.001)

    assert slow == pytest.approx((1 - MARGIN) / 10)
    assert still < 1


def test_a_share_is_of_both_depths_and_one_input_always_has_room() -> None:
    queue = DeviceQueue("cpu:0", 1, Depth(10, 1000), share=0.25)

    assert queue.has_room(5000)
    queue.inputs, queue.tokens = 1, 100
    assert queue.has_room(150)
    assert not queue.has_room(151)
    queue.inputs = 2
    assert not queue.has_room(1)


def test_a_small_batch_says_little() -> None:
    """The first input of an idle server takes long; a burst after it is not refused for that."""
    pace = DevicePace(1.0, 5000)

    assert pace.computed(10, 0.05) == 1

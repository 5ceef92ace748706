"""Depths of devices: the paper's regression, and the time for what a device holds."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.depth import (
    LatencyLine,
    admission_depth,
    fit,
    line_through,
    predict_and_try,
    probe_sizes,
    stress,
)
from phasewise.serving.embedding.lane import Lane
from phasewise.serving.embedding.lateness import FIRST_SHARE
from phasewise.serving.embedding.pace import KEPT, LAST_BATCHES, LEAST_TOKENS, RECENT_BATCHES, DevicePace
from phasewise.serving.embedding.queues import Depth, DeviceQueue
from tests.support.servers.fake_embedding import FakeWorker
from tests.support.simulated_embedding import ModelledDevice, largest_concurrency, simulate
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

    lane.heed(3.0, 3.0 + lane.slo_s * (1 - KEPT))
    assert lane.queue.usable == Depth(depth, 75 * depth)


def test_without_a_promise_all_of_the_depth_may_be_used() -> None:
    lane = lane_of(math.inf, Depth(10, 1000))
    lane.pace.computed(1000, 1e6)

    lane.heed(3.0, math.inf)
    assert lane.queue.usable == Depth(10, 1000)


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


# Table III, "linear regression": depths under 1 s and 2 s.
TABLE3 = {"V100": (40, 96), "Xeon": (8, 20), "Atlas": (84, 195), "Kunpeng": (2, 15)}
BETA_S = {"V100": 0.286, "Xeon": 0.333, "Atlas": 0.243, "Kunpeng": 0.846}


def line_of(name: str) -> LatencyLine:
    within_1s, within_2s = TABLE3[name]
    return line_through((within_1s, 1.0), (within_2s, 2.0))


@pytest.mark.parametrize("name", TABLE3)
def test_table_three_gives_back_beta(name: str) -> None:
    assert line_of(name).beta_s == pytest.approx(BETA_S[name], abs=5e-4)
    assert [line_of(name).largest_within(slo_s) for slo_s in (1, 2)] == list(TABLE3[name])


def test_table_three_gives_back_the_ratios_of_alpha() -> None:
    assert line_of("V100").alpha_s / line_of("Xeon").alpha_s == pytest.approx(0.214, abs=5e-4)
    assert line_of("Atlas").alpha_s / line_of("Kunpeng").alpha_s == pytest.approx(0.117, abs=5e-4)


@examples(60)
@given(alpha=st.floats(1e-6, 1), beta=st.floats(0, 1), slo=st.floats(0.01, 10))
def test_a_line_is_found_again_and_its_depth_is_the_last_within(
    alpha: float, beta: float, slo: float
) -> None:
    true = LatencyLine(alpha, beta)
    sizes = probe_sizes(64)

    fitted = fit(sizes, [true.seconds(size) for size in sizes])
    depth = true.largest_within(slo)

    assert fitted.alpha_s == pytest.approx(alpha, rel=1e-6, abs=1e-9)
    assert fitted.beta_s == pytest.approx(beta, rel=1e-6, abs=1e-7)
    assert depth == 0 or true.seconds(depth) <= slo * (1 + 1e-6)
    assert true.seconds(depth + 1) > slo * (1 - 1e-6)


def test_neither_part_of_a_line_is_negative() -> None:
    assert fit([1, 2, 3], [0.1, 1.0, 2.0]).beta_s == 0
    assert fit([1, 2, 3], [3.0, 2.0, 1.0]) == LatencyLine(0.0, 2.0)
    with pytest.raises(ValueError, match="two different"):
        fit([4, 4], [1.0, 1.0])


@examples(40)
@given(alpha=st.floats(0.001, 0.5), beta=st.floats(0, 0.9), guess=st.integers(0, 200))
def test_a_stress_test_finds_the_depth_of_the_line(alpha: float, beta: float, guess: int) -> None:
    line = LatencyLine(alpha, beta)

    async def seconds(load: int) -> float:
        return line.seconds(load)

    measured = asyncio.run(stress(seconds, 1.0, guess))

    depth = line.largest_within(1.0)
    assert depth - max(1, guess // 40) <= measured <= depth


@examples(40)
@given(alpha=st.floats(0.001, 0.4), beta=st.floats(0, 0.5), bend=st.floats(-0.02, 0.02))
def test_the_depth_by_the_line_is_the_depth_by_trying(alpha: float, beta: float, bend: float) -> None:
    """Also of a device that is not quite a line: within 5 % or one input."""
    line = LatencyLine(alpha, beta)

    async def seconds(load: int) -> float:
        return line.seconds(load) * (1 + bend * load * alpha)

    depths = asyncio.run(predict_and_try(seconds, 1.0))

    assert depths.predicted == pytest.approx(depths.tried, rel=0.05, abs=1)


def test_a_server_holds_what_ends_in_time_where_it_comes_at_once() -> None:
    depth = admission_depth(LatencyLine(0.001, 0.1), 1.0, 75, 0.1)

    assert depth.tokens == 800
    assert depth.inputs == 10


# Table I: what the fine-tuned depths of both devices hold together, under 1 s and 2 s.
TABLE1 = {
    ("V100", "Xeon"): ((44, 8, 1.0), (96, 22, 2.0)),
    ("Atlas", "Kunpeng"): ((84, 2, 1.0), (172, 8, 2.0)),
}


@pytest.mark.parametrize("pair", TABLE1)
def test_queues_over_modelled_devices_hold_the_sum_of_their_depths(pair: tuple[str, str]) -> None:
    """C_A + C_B of the paper, by the production queues on simulated time."""
    for column, slo_s in enumerate((1.0, 2.0)):
        devices = [
            ModelledDevice(name, rank, line_of(name), TABLE3[name][column]) for rank, name in enumerate(pair)
        ]
        alone = largest_concurrency(devices[:1], slo_s)

        both = largest_concurrency(devices, slo_s)

        assert alone == TABLE3[pair[0]][column]
        assert both == alone + TABLE3[pair[1]][column]


def test_nothing_is_lost_or_doubled_on_simulated_time() -> None:
    devices = [
        ModelledDevice("a", 0, LatencyLine(0.01, 0.1), 8),
        ModelledDevice("b", 1, LatencyLine(0.05, 0.2), 4),
    ]
    arrivals = [number * 0.004 for number in range(1000)]

    outcome = simulate(devices, arrivals)

    assert len(outcome.latencies_s) + outcome.refused == len(arrivals)
    assert sum(outcome.by_device.values()) == len(outcome.latencies_s)
    assert outcome.refused > 0
    assert outcome.longest_s <= 2 * (0.05 * 4 + 0.2)

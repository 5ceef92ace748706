"""More clients never get less, whatever steps take: the scheduler and its pacing on simulated time."""

from __future__ import annotations

import itertools
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.simulated.steps import Curve, StepTimes
from tests.support.closed_loop import ClosedLoop
from tests.support.tiers import examples

CLIENTS = (2, 4, 8, 16, 32, 64)
ROWS = (1, 2, 4, 6, 8, 12, 16, 24, 32)
CLIFF = [0.0185, 0.0149, 0.0173, 0.070, 0.0734, 0.077, 0.0812, 0.110, 0.1397]
"""Of a 1.07 B file in Q4_K_M on two cores: six rows take four times what four take."""


def steps_of(decode_s: list[float], fixed_s: float, token_s: float) -> StepTimes:
    prefill = Curve([(0, fixed_s), (512, fixed_s + 512 * token_s)])
    return StepTimes(
        prefill, Curve([(0, 0.0), (1, 0.0)]), Curve(list(zip(map(float, ROWS), decode_s, strict=True)))
    )


def loops(steps: StepTimes, lengths: tuple[int, int], tpot_ms: float = 100.0) -> list[ClosedLoop]:
    return [ClosedLoop(steps, n, max(40, 6 * n), itertools.repeat(lengths), tpot_ms=tpot_ms) for n in CLIENTS]


def assert_more_clients_get_no_less(closed_loops: list[ClosedLoop], least: float) -> None:
    rates = [loop.tokens_per_s for loop in closed_loops]
    for index, rate in enumerate(rates[1:], 1):
        assert rate >= least * max(rates[:index]), dict(zip(CLIENTS, rates, strict=True))
    waits = {n: loop.most_by_work for n, loop in zip(CLIENTS, closed_loops, strict=True)}
    assert max(waits.values()) <= 1.3, waits


@pytest.mark.many
@pytest.mark.parametrize("lengths", [(128, 48), (512, 32), (64, 200)])
def test_a_cliff_between_four_rows_and_six_costs_no_client_anything(lengths: tuple[int, int]) -> None:
    closed_loops = loops(steps_of(CLIFF, 0.05, 0.0034), lengths)

    assert_more_clients_get_no_less(closed_loops, 0.95)


def test_where_the_promise_is_out_of_reach_throughput_is_that_of_a_looser_one() -> None:
    """A promise that cannot be kept costs nothing either: crumbs of prompts would."""
    steps = steps_of([1.4 * decode_s for decode_s in CLIFF], 0.06, 0.0034)
    strict, loose = (loops(steps, (128, 48), tpot_ms)[-2:] for tpot_ms in (100.0, 1000.0))

    for strict_loop, other in zip(strict, loose, strict=True):
        assert strict_loop.tokens_per_s >= 0.9 * other.tokens_per_s
        assert median(strict_loop.ttfts_s) <= 1.3 * median(other.ttfts_s)


@pytest.mark.slow
@examples(10)
@given(
    first_s=st.floats(0.005, 0.06),
    factors=st.lists(st.sampled_from([0.7, 1.0, 1.05, 1.3, 1.6, 2.0, 3.0, 4.0]), min_size=8, max_size=8),
    token_s=st.floats(0.0005, 0.005),
    lengths=st.sampled_from([(128, 48), (32, 128), (300, 30)]),
)
def test_more_clients_get_no_less_whatever_steps_take(
    first_s: float, factors: list[float], token_s: float, lengths: tuple[int, int]
) -> None:
    """Cliffs, plateaus, and steps that are faster with more rows. Trying others costs a little.

    A row takes at most four times as long in a step of many as alone.
    """
    drawn_s = itertools.accumulate(factors, lambda before, factor: before * factor, initial=first_s)
    decode_s = [min(step_s, 4 * rows * first_s) for step_s, rows in zip(drawn_s, ROWS, strict=True)]

    assert_more_clients_get_no_less(loops(steps_of(decode_s, 0.0, token_s), lengths), 0.85)

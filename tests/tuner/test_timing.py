"""Timing: what must hold of the estimate, the race and the comparison, whatever the nanoseconds are."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.kerneldb.records import MAX_GAIN
from phasewise.tuner import timing
from phasewise.tuner.timing import (
    Samples,
    Turn,
    compare,
    duel,
    estimate_ns,
    loop_means,
    plan_turn,
    race,
)

NS = st.integers(1, 10**12)
MANY_NS = st.lists(NS, min_size=1, max_size=60)


@given(samples=MANY_NS, rng=st.randoms(use_true_random=False))
def test_the_estimate_lies_among_the_samples_in_any_order(samples: list[int], rng: Random) -> None:
    shuffled = rng.sample(samples, len(samples))

    assert min(samples) <= estimate_ns(samples) <= max(samples)
    assert estimate_ns(shuffled) == estimate_ns(samples)


@given(samples=MANY_NS, burst=NS)
def test_bursts_that_hit_half_of_the_samples_do_not_move_the_estimate_beyond_the_others(
    samples: list[int], burst: int
) -> None:
    disturbed = samples + [max(samples) + burst] * len(samples)

    assert estimate_ns(samples) <= estimate_ns(disturbed) <= max(samples)


@given(call_ns=st.integers(0, 10**11))
def test_a_turn_is_long_against_the_clock_and_never_longer_than_it_must_be(call_ns: int) -> None:
    turn = plan_turn(call_ns)
    call_ns = max(1, call_ns)

    assert turn.calls_a_loop * call_ns >= timing.MIN_SAMPLE_NS
    assert turn.calls == 1 or turn.calls * call_ns <= timing.TURN_NS
    assert 1 <= turn.loops <= timing.MAX_TURN_SAMPLES


def test_a_sample_is_the_mean_of_its_loop() -> None:
    assert loop_means(np.array([1, 3, 10, 20, 0, 1]), Turn(3, 2)) == (2, 15, 1)


class Machine:
    """Takes of constant products on a machine whose pace `pace(turn number)` changes with time."""

    def __init__(self, pace: Callable[[int], float] = lambda _: 1.0) -> None:
        self.order: list[int] = []
        self._pace = pace

    def take(self, call_ns: int) -> timing.Take:
        def samples() -> Samples:
            self.order.append(call_ns)
            return (round(call_ns * self._pace(len(self.order))),)

        return samples


def test_contestants_take_turns_in_changing_order() -> None:
    machine = Machine()
    taken = race([machine.take(ns) for ns in (100, 101, 102)])

    assert machine.order[:6] == [100, 101, 102, 102, 101, 100]
    assert [len(samples) for samples in taken] == [timing.ROUNDS] * 3


def test_the_hopeless_leave_early_and_keep_what_they_took() -> None:
    machine = Machine()
    taken = race([machine.take(ns) for ns in (100, 130, 500)])

    assert [len(samples) for samples in taken] == [timing.ROUNDS, 3, 2]
    assert race([]) == []


@pytest.mark.parametrize("period", [7, 20, 50])
def test_a_pace_that_changes_for_everybody_does_not_change_the_ranking(period: int) -> None:
    """The machine runs at half speed every other `period` turns, as memory does here."""
    machine = Machine(lambda turn: 1.0 + (turn // period) % 2)
    call_ns = [1000 + 40 * step for step in range(8)]
    estimates = [estimate_ns(samples) for samples in race([machine.take(ns) for ns in call_ns])]

    assert estimates.index(min(estimates)) == 0


def test_a_constant_gain_is_believed_on_a_changing_machine() -> None:
    machine = Machine(lambda turn: 1.0 + turn % 13 / 10)
    comparison = compare(duel(machine.take(11_000), machine.take(10_000), pairs=40))

    assert comparison.proves_faster
    assert comparison.gain_low <= comparison.gain <= comparison.gain_high
    assert comparison.pairs == 40


def test_who_begins_a_pair_alternates() -> None:
    machine = Machine()
    taken = duel(machine.take(1), machine.take(2), pairs=3)

    assert machine.order == [1, 2, 2, 1, 1, 2]
    assert taken == [((1,), (2,))] * 3


@given(st.lists(st.tuples(NS, NS), min_size=1, max_size=40))
def test_the_comparison_is_symmetric_and_its_interval_holds_the_median(pairs: list[tuple[int, int]]) -> None:
    there = compare([((before,), (after,)) for before, after in pairs])
    back = compare([((after,), (before,)) for before, after in pairs])

    assert there.gain_low <= there.gain <= there.gain_high
    assert not (there.proves_faster and back.proves_faster)
    assert MAX_GAIN in (there.gain_high, back.gain_high) or there.gain_low == pytest.approx(
        1 / back.gain_high
    )


def test_few_pairs_prove_nothing() -> None:
    assert not compare([((200,), (100,))] * 5).proves_faster
    assert compare([((200,), (100,))] * timing.PAIRS).proves_faster


def test_equals_are_rarely_taken_for_faster() -> None:
    """At 99 % confidence one side is wrong once in two hundred; the noise is skewed."""
    rng = np.random.default_rng(3)

    def believed() -> bool:
        pairs = rng.lognormal(9, 0.3, (timing.PAIRS, 2)).astype(int).tolist()
        return compare([((before,), (after,)) for before, after in pairs]).proves_faster

    assert sum(believed() for _ in range(2000)) <= 20

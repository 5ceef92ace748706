"""Measurements: the estimate, the race and the comparison, the machine's limits, states and conditions."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa
from phasewise.kerneldb.records import MAX_GAIN
from phasewise.tuner import timing
from phasewise.tuner.conditions import Conditions, CpuTicks, Look, Watch, between, children_s, is_disturbed
from phasewise.tuner.machine_limits import peak_flops, read_bandwidth, read_in_pieces
from phasewise.tuner.native import RETRIES, CoreLoops, Yardstick, steadily
from phasewise.tuner.timing import Samples, compare, duel, estimate_ns, plan_turn, race
from tests.support.tiers import examples

NS = st.integers(1, 10**12)
MANY_NS = st.lists(NS, min_size=1, max_size=60)


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


@given(st.lists(st.tuples(NS, NS), min_size=1, max_size=40))
def test_the_comparison_is_symmetric_and_its_interval_holds_the_median(pairs: list[tuple[int, int]]) -> None:
    there = compare([((before,), (after,)) for before, after in pairs])
    back = compare([((after,), (before,)) for before, after in pairs])

    assert there.gain_low <= there.gain <= there.gain_high
    assert not (there.proves_faster and back.proves_faster)
    assert MAX_GAIN in (there.gain_high, back.gain_high) or there.gain_low == pytest.approx(
        1 / back.gain_high
    )


def test_equals_are_rarely_taken_for_faster() -> None:
    """At 99 % confidence one side is wrong once in two hundred; the noise is skewed."""
    rng = np.random.default_rng(3)

    def believed() -> bool:
        pairs = rng.lognormal(9, 0.3, (timing.PAIRS, 2)).astype(int).tolist()
        return compare([((before,), (after,)) for before, after in pairs]).proves_faster

    assert sum(believed() for _ in range(2000)) <= 20


CPUINFO = """processor\t: 0
model name\t: A
cpu MHz\t\t: 2300.000
flags\t\t: fpu

processor\t: 1
model name\t: A
cpu MHz\t\t: 2500.000
"""


def test_own_time_is_neither_steal_nor_somebody_elses() -> None:
    before = Look(CpuTicks(1000, 500, 0), 5.0, None)
    after = Look(CpuTicks(1200, 540, 20), 6.0, 2400.0)
    conditions = between(before, after, ticks_a_second=100)

    assert conditions == Conditions(steal=0.1, others=0.2, mhz=2400.0)
    assert is_disturbed(conditions.fields())
    assert conditions.fields() == {"steal": 0.1, "others": 0.2, "mhz": 2400.0}


def test_a_busy_neighbour_is_seen(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(CPUINFO)
    (tmp_path / "stat").write_text("cpu0 0 0 0 0 0 0 0 0 0 0\n")
    watch = Watch([0], tmp_path)
    (tmp_path / "stat").write_text("cpu0 9000 0 0 0 0 0 0 1000 0 0\n")
    lap = watch.lap()

    assert lap.steal == 0.1
    assert lap.others == pytest.approx(0.9, abs=0.01)


def test_what_children_use_is_our_own(tmp_path: Path) -> None:
    """Ranks are processes of their own; one that has just ended is no reason to fail."""
    (tmp_path / "self/task/7").mkdir(parents=True)
    (tmp_path / "self/task/7/children").write_text("11 12 ")
    (tmp_path / "11").mkdir()
    (tmp_path / "11/stat").write_text("11 (a (rank) 1) S 7 " + "0 " * 9 + "150 50 9 9 20 0")

    assert children_s(tmp_path, ticks_a_second=100) == 2.0
    assert children_s(tmp_path / "none", ticks_a_second=100) == 0.0


@pytest.mark.parametrize("name", isa.usable())
@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1025, 1 << 20])
def test_less_than_a_kilobyte_is_left_unread(name: str, size: int) -> None:
    with isa.using(name):
        read_bytes = _native.limit_read(np.ones(size, dtype=np.uint8))

    assert read_bytes % 512 == 0
    assert size - 1024 < read_bytes <= size


@examples(60)
@given(size=st.integers(0, 5000), words=st.sampled_from([1, 8, 9, 32, 512]), scattered=st.booleans())
def test_every_piece_is_read_once_in_either_order(size: int, words: int, scattered: bool) -> None:
    """As many as the largest power of two that fits."""
    buffer = np.random.default_rng(size).integers(0, 1 << 50, size=size, dtype=np.uint64)
    n_pieces = 1 << (size // words).bit_length() - 1 if size >= words else 0

    n_bytes, total = _native.limit_read_pieces(buffer, words, scattered)

    assert n_bytes == 8 * n_pieces * words
    assert total == int(buffer[: n_pieces * words].sum())


def test_reads_in_pieces_are_rates_of_both_orders() -> None:
    before = os.sched_getaffinity(0)

    reads = read_in_pieces(sorted(before)[:2], 64, 1 << 20, repeats=1)

    assert reads.piece_bytes == 64
    assert reads.in_order_bytes_per_s > 0
    assert reads.share == reads.scattered_bytes_per_s / reads.in_order_bytes_per_s > 0
    assert os.sched_getaffinity(0) == before


def test_limits_are_rates_of_all_cores_and_leave_the_caller_unpinned() -> None:
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]

    assert peak_flops("f32", cores, repeats=1) > 0
    assert read_bandwidth(cores, 1 << 20, repeats=2) > 0
    assert os.sched_getaffinity(0) == before


def test_a_core_that_may_not_be_used_is_an_error_and_no_hang() -> None:
    allowed = sorted(os.sched_getaffinity(0))

    with pytest.raises(OSError, match="Invalid argument"):
        peak_flops("f32", [1023, *allowed], repeats=1)


def read(*spans_ns: Sequence[float]) -> Yardstick:
    """A yardstick that reads these, one after the other, and the last for ever."""
    readings: Iterator[Sequence[float]] = itertools.chain(spans_ns, itertools.repeat(spans_ns[-1]))
    return Yardstick(lambda: next(readings))


def test_the_pace_is_that_of_the_slowest_core_beside_its_best() -> None:
    yardstick = read((100, 100), (200, 100), (50, 100), (100, 400))

    assert [yardstick.pace() for _ in range(4)] == [1.0, 0.5, 1.0, 0.25]


@pytest.mark.parametrize("slow", ["before", "after"])
def test_what_was_timed_in_a_slow_state_is_timed_again(slow: str) -> None:
    takes = itertools.count()
    yardstick = read((100,), *([(200,), (100,)] if slow == "before" else [(100,), (200,)]), (100,))
    yardstick.pace()

    assert steadily(lambda: next(takes), yardstick, pause_s=0) == (1, 1.0)


def test_a_host_that_stays_slow_marks_what_was_timed() -> None:
    takes = itertools.count()
    yardstick = read((100,), (200,))
    yardstick.pace()

    last, pace = steadily(lambda: next(takes), yardstick, pause_s=0)

    assert (last, pace) == (RETRIES, 0.5)
    assert is_disturbed(Conditions(0.0, 0.0, None, pace).fields())
    assert not is_disturbed(Conditions(0.0, 0.0, None, 1.0).fields())


def test_real_cores_have_a_pace() -> None:
    loops = CoreLoops(sorted(os.sched_getaffinity(0))[:2])
    try:
        yardstick = Yardstick(loops)
        assert all(0 < yardstick.pace() <= 1 for _ in range(3))
    finally:
        loops.close()

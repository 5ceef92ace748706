"""Counters of threads: totals from a fake kernel, extrapolation, what is not counted, refusals in a line."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology.processor_counters import (
    SOFTWARE,
    CounterTotals,
    EventCode,
    KernelCounter,
    ProcessorCounters,
    Reading,
    event_codes,
    threads_under,
    why_not,
)

INTEL, AMD = "GenuineIntel", "AuthenticAMD"
TASK_CLOCK = (SOFTWARE, 1)


class FakeKernel:
    """Counts by thread and event, which a test sets; refuses events by their code."""

    def __init__(
        self, refused: Mapping[EventCode, int] | None = None, ended: frozenset[int] = frozenset()
    ) -> None:
        self.refused = refused or {}
        self.ended = ended
        self.readings: dict[tuple[int, EventCode], Reading] = {}
        self.n_open = 0

    def open(self, thread: int, event: EventCode) -> FakeCounter:
        if event in self.refused:
            raise OSError(self.refused[event], "refused")
        if thread in self.ended:
            raise ProcessLookupError(errno.ESRCH, "no such thread")
        self.n_open += 1
        return FakeCounter(self, (thread, event))


class FakeCounter(KernelCounter):
    def __init__(self, kernel: FakeKernel, key: tuple[int, EventCode]) -> None:
        self._kernel = kernel
        self._key = key

    def read(self) -> Reading:
        return self._kernel.readings.get(self._key, Reading(0, 0, 0))

    def close(self) -> None:
        self._kernel.n_open -= 1


def first_codes(vendor: str = INTEL) -> dict[str, EventCode]:
    return {event: codes[0] for event, codes in event_codes(vendor).items()}


@given(st.lists(st.tuples(*[st.integers(0, 10**9)] * 5), min_size=1, max_size=5))
def test_counts_of_all_threads_are_added_since_the_last_lap(counts: list[tuple[int, ...]]) -> None:
    kernel = FakeKernel()
    codes = first_codes()
    threads = list(range(len(counts)))
    counters = ProcessorCounters(threads, INTEL, kernel.open)
    assert counters.absence is None
    for _ in range(2):
        for thread, own in zip(threads, counts, strict=True):
            for code, count in zip(codes.values(), own, strict=True):
                before = kernel.readings.get((thread, code), Reading(0, 0, 0))
                kernel.readings[thread, code] = Reading(
                    before.count + count, before.wanted_ns + 10, before.counted_ns + 10
                )
        wanted = [float(sum(column)) for column in zip(*counts, strict=True)]
        assert counters.lap() == CounterTotals(*wanted)
    counters.close()
    assert kernel.n_open == 0


@given(st.integers(0, 10**9), st.integers(1, 1000), st.integers(1, 20))
def test_a_counter_that_took_turns_is_extrapolated(count: int, counted_ns: int, turns: int) -> None:
    kernel = FakeKernel()
    counters = ProcessorCounters([7], INTEL, kernel.open)
    for code in first_codes().values():
        kernel.readings[7, code] = Reading(count, turns * counted_ns, counted_ns)
    totals = counters.lap()
    assert totals is not None
    assert totals.cycles == count * turns
    kernel.readings = {key: Reading(count, 10**9, counted_ns) for key in kernel.readings}  # never its turn
    assert counters.lap() == CounterTotals(0.0, 0.0, 0.0, 0.0, 0.0)


def test_ratios_are_of_what_is_counted() -> None:
    totals = CounterTotals(2000.0, 1000.0, 30.0, None, 500.0)
    assert totals.instructions_per_cycle == 0.5
    assert totals.llc_misses_pki == 30.0
    assert totals.dtlb_misses_pki is None
    assert totals.stalled_share == 0.25
    nothing = CounterTotals(0.0, 0.0, 0.0, 0.0, 0.0)
    assert (nothing.instructions_per_cycle, nothing.llc_misses_pki, nothing.stalled_share) == (
        0.0,
        None,
        None,
    )


def test_an_event_that_this_core_does_not_count_is_left_out_and_closed() -> None:
    codes = first_codes(AMD)
    kernel = FakeKernel({codes["llc_misses"]: errno.ENOENT, codes["stalls"]: errno.EINVAL})
    counters = ProcessorCounters([1, 2], AMD, kernel.open)
    assert counters.absence is None
    assert kernel.n_open == 2 * 3
    totals = counters.lap()
    assert totals is not None
    assert (totals.llc_misses, totals.dtlb_misses, totals.stalls) == (None, 0.0, None)


def test_intels_own_event_counts_stalls_where_the_general_one_is_not_known() -> None:
    general, own = event_codes(INTEL)["stalls"]
    kernel = FakeKernel({general: errno.ENOENT})
    counters = ProcessorCounters([1], INTEL, kernel.open)
    kernel.readings[1, own] = Reading(5, 1, 1)
    totals = counters.lap()
    assert totals is not None
    assert totals.stalls == 5.0


def test_threads_that_end_meanwhile_are_not_counted() -> None:
    kernel = FakeKernel(ended=frozenset({2}))
    counters = ProcessorCounters([1, 2, 3], INTEL, kernel.open)
    assert counters.absence is None
    assert kernel.n_open == 2 * len(first_codes())


@pytest.mark.parametrize("event", ["cycles", "instructions"])
def test_without_cycles_or_instructions_nothing_is_counted_and_a_line_says_why(event: str) -> None:
    kernel = FakeKernel({first_codes()[event]: errno.ENOENT})
    counters = ProcessorCounters([1, 2], INTEL, kernel.open)
    assert "virtual machines" in (counters.absence or "")
    assert counters.lap() is None
    assert kernel.n_open == 0


@pytest.mark.parametrize(
    ("code", "level", "said"),
    [
        (errno.EACCES, "4\n", "perf_event_paranoid is 4"),
        (errno.EPERM, "2\n", "--cap-add PERFMON"),
        (errno.EPERM, None, "--cap-add PERFMON"),
        (errno.ENOSYS, "2\n", "no perf_event_open"),
        (errno.EMFILE, "2\n", os.strerror(errno.EMFILE)),
    ],
)
def test_a_refusal_is_one_line_with_its_remedy(
    tmp_path: Path, code: int, level: str | None, said: str
) -> None:
    if level is not None:
        (tmp_path / "sys/kernel").mkdir(parents=True)
        (tmp_path / "sys/kernel/perf_event_paranoid").write_text(level)
    line = why_not(OSError(code, os.strerror(code)), tmp_path)
    assert said in line
    assert "\n" not in line


def test_the_kernels_own_clock_of_a_thread_is_read() -> None:
    """An event of software, which every machine has whose kernel lets a process count itself."""
    try:
        counter = KernelCounter(threading.get_native_id(), TASK_CLOCK)
    except OSError as error:
        pytest.skip(f"perf_event_open is refused here: {error.strerror}")
    first = counter.read()
    until = time.thread_time() + 0.005
    while time.thread_time() < until:
        pass
    second = counter.read()
    counter.close()
    assert second.count - first.count >= 4_000_000
    assert second.wanted_ns >= second.counted_ns > first.counted_ns


def test_threads_of_this_process_and_of_what_it_started_are_found(tmp_path: Path) -> None:
    for process, threads in {10: {10: "20", 11: ""}, 20: {20: "99", 21: ""}}.items():
        for thread, children in threads.items():
            folder = tmp_path / str(process) / "task" / str(thread)
            folder.mkdir(parents=True)
            (folder / "children").write_text(children)
    assert sorted(threads_under(10, tmp_path)) == [10, 11, 20, 21]
    assert threads_under(5, tmp_path) == []
    assert threading.get_native_id() in threads_under(os.getpid())

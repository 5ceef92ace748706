"""All-reduces over shared memory and plain copying by the same cores, timed in turns.

Every round times each system once, every other round in the opposite order, so that a drift of the machine
affects all of them. Before each all-reduce every rank writes its message anew, which is not timed: in the
engine the partial sums have just been computed as well, and are in the caches.
"""

from __future__ import annotations

import json
import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from phasewise._rows import Row
from phasewise._words import counted
from phasewise.cython_kernels import _native
from phasewise.topology import core_signature, placement_signature, read_machine
from phasewise.tuner.conditions import Watch
from phasewise.workflows.bench.allreduce.rank import COPY, shared_bytes
from phasewise.workflows.report import Report, silent


class RankError(Exception):
    """A rank of a system under comparison has ended, or never began."""

    exit_code = 1


@dataclass(frozen=True)
class System:
    """Something that adds up messages, or copies them."""

    name: str
    time: Callable[[int, int], list[int]]
    """(floats of a message, times) -> nanoseconds of the slowest rank, each time."""


class RankProcesses:
    """One process per rank; each answers a line of JSON with a line of JSON (see `rank`)."""

    def __init__(self, name: str, commands: Sequence[Sequence[str]], descriptors: Sequence[int] = ()) -> None:
        self.name = name
        self._processes = [
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=descriptors,
                start_new_session=True,  # Ctrl-C ends this process; ranks end when their stdin closes
            )
            for command in commands
        ]
        try:
            self._answers()
        except RankError:
            self.close()
            raise

    def system(self, name: str) -> System:
        def time(floats: int, times: int) -> list[int]:
            self._ask({"system": name, "floats": floats, "times": times})
            return [max(ns) for ns in zip(*(answer["ns"] for answer in self._answers()), strict=True)]

        return System(name, time)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _ask(self, request: dict[str, Any]) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # the rank has died: _answer raises
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()

    def _answers(self) -> list[dict[str, Any]]:
        return [self._answer(rank, process) for rank, process in enumerate(self._processes)]

    def _answer(self, rank: int, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RankError(f"rank {rank} of {self.name} ended with exit code {process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def our_systems(cores: Sequence[int], kinds: Sequence[str], most_floats: int) -> Iterator[list[System]]:
    """All-reduces of these kinds with one rank per core, and plain copying, over memory freed at the end."""
    ranks = len(cores)
    size = shared_bytes(ranks, most_floats)
    descriptor = os.memfd_create("phasewise-bench-allreduce")
    try:
        os.ftruncate(descriptor, size)
        _initialise_group(descriptor, ranks)
        commands = [
            [sys.executable, "-m", "phasewise.workflows.bench.allreduce.rank"]
            + [str(number) for number in (descriptor, rank, ranks, cpu, most_floats)]
            for rank, cpu in enumerate(cores)
        ]
        with closing(RankProcesses("phasewise", commands, [descriptor])) as processes:
            yield [processes.system(name) for name in (*kinds, COPY)]
    finally:
        os.close(descriptor)


def _initialise_group(descriptor: int, ranks: int) -> None:
    _native.Group(mmap.mmap(descriptor, _native.group_bytes(ranks)), ranks).initialise()


TURN_NS = 3_000_000
"""Length of one system's turn: long against the request for it, short against another guest's burst."""

TRIES = 5
"""All-reduces that are timed first, to find how many fill a turn."""

MOST_TIMES = 1000
LEAST_TIMES = 3

OpenOthers = Callable[[Sequence[int]], AbstractContextManager[list[System]]]
"""Opens further systems with one rank per core, on these cores."""


@dataclass(frozen=True)
class AllReduceGrid:
    """The grid of measurements: every size with every number of ranks, and all kinds each time."""

    cores: tuple[int, ...]
    rank_counts: Sequence[int]
    message_bytes: Sequence[int]
    kinds: Sequence[str]
    rounds: int


class AllReduceRow(Row):
    """One system adding up messages of one size, or copying them, over one rank a core."""

    ranks: int
    message_bytes: int
    system: str
    median_ns: int
    """Median over the rounds; a round is the median of its turns, and a turn the time of its slowest rank."""
    lowest_ns: int
    highest_ns: int
    gbps: float
    """Bytes of one message per nanosecond of the median."""
    copy_fraction: float
    """Median over the rounds of our speed over that of plain copying in the same round."""
    cores: Sequence[int]
    core_signature: str
    placement_signature: str
    steal: float
    """Share of the cores' time that other guests had meanwhile."""
    samples_ns: Sequence[int]
    """One for each round."""


def size_text(size: int) -> str:
    """`64 KiB`, or bytes where it is no whole number of KiB."""
    for bits, unit in ((20, "MiB"), (10, "KiB")):
        if size % (1 << bits) == 0:
            return f"{size >> bits} {unit}"
    return f"{size} B"


def no_others(cores: Sequence[int]) -> AbstractContextManager[list[System]]:
    """Only our own all-reduces."""
    return nullcontext([])


def all_reduce_rows(
    grid: AllReduceGrid, open_others: OpenOthers = no_others, report: Report = silent
) -> Iterator[AllReduceRow]:
    """Measure the grid: for each number of ranks and each size, one row per system."""
    most_floats = max(grid.message_bytes) // 4
    for ranks in grid.rank_counts:
        cores = grid.cores[:ranks]
        with our_systems(cores, grid.kinds, most_floats) as ours, open_others(cores) as others:
            for size in grid.message_bytes:
                report(f"{counted(ranks, 'rank')}, {size_text(size)}")
                watch = Watch(cores)
                samples = _in_turns([*ours, *others], size // 4, grid.rounds)
                yield from _rows(size, cores, samples, watch.lap().steal)


def _in_turns(systems: Sequence[System], floats: int, rounds: int) -> Mapping[str, list[float]]:
    """Median time of every system, round by round, nanoseconds."""
    times = {system.name: _times_a_turn(system, floats) for system in systems}
    samples: dict[str, list[float]] = {system.name: [] for system in systems}
    for number in range(rounds):
        for system in systems if number % 2 else reversed(systems):
            taken = system.time(floats, times[system.name])
            samples[system.name].append(statistics.median(taken))
    return samples


def _times_a_turn(system: System, floats: int) -> int:
    typical_ns = max(1.0, statistics.median(system.time(floats, TRIES)))
    return max(LEAST_TIMES, min(MOST_TIMES, round(TURN_NS / typical_ns)))


def _rows(
    size: int, cores: Sequence[int], samples: Mapping[str, list[float]], steal: float
) -> Iterator[AllReduceRow]:
    machine = read_machine()
    for name, taken in samples.items():
        median_ns = statistics.median(taken)
        shares = [copy_ns / ns for copy_ns, ns in zip(samples[COPY], taken, strict=True)]
        yield AllReduceRow(
            ranks=len(cores),
            message_bytes=size,
            system=name,
            median_ns=round(median_ns),
            lowest_ns=round(min(taken)),
            highest_ns=round(max(taken)),
            gbps=size / median_ns,
            copy_fraction=statistics.median(shares),
            cores=tuple(cores),
            core_signature=core_signature(machine),
            placement_signature=placement_signature(machine, cores),
            steal=round(steal, 4),
            samples_ns=[round(ns) for ns in taken],
        )

"""`phasewise bench allreduce` between its options and its rows: every system, and plain copying, in turns.

Every round times each system once, every other round in the opposite order, so that a drift of the machine
meets all of them. Before each all-reduce, outside what is timed, every rank writes its message anew: that is
how partial sums come to be, and where they lie in the caches then.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from phasewise.cli.all_reduce_formats import AllReduceRow, size_text
from phasewise.cli.all_reduce_rank import COPY
from phasewise.cli.all_reduce_ranks import System, our_systems
from phasewise.cli.present import note
from phasewise.topology import core_signature, placement_signature, read_machine
from phasewise.tuner.conditions import Watch

TURN_NS = (
    3_000_000  # of each system in a round: long against asking for it, short against a neighbour's burst
)
TRIES = 5  # to learn how many make a turn
MOST_TIMES = 1000
LEAST_TIMES = 3

OpenOthers = Callable[[Sequence[int]], AbstractContextManager[list[System]]]
"""Of one rank a core, on these cores."""


@dataclass(frozen=True)
class Grid:
    """What is measured: every size with every number of ranks, and all kinds each time."""

    cores: tuple[int, ...]
    rank_counts: Sequence[int]
    message_bytes: Sequence[int]
    kinds: Sequence[str]
    rounds: int


def no_others(cores: Sequence[int]) -> AbstractContextManager[list[System]]:
    """Only our own all-reduces."""
    return nullcontext([])


def all_reduce_rows(grid: Grid, open_others: OpenOthers = no_others) -> Iterator[AllReduceRow]:
    """Measure the grid: for each number of ranks and each size, a row a system."""
    most_floats = max(grid.message_bytes) // 4
    for ranks in grid.rank_counts:
        cores = grid.cores[:ranks]
        with our_systems(cores, grid.kinds, most_floats) as ours, open_others(cores) as others:
            for size in grid.message_bytes:
                note(f"{ranks} ranks, {size_text(size)}")
                watch = Watch(cores)
                samples = _in_turns([*ours, *others], size // 4, grid.rounds)
                yield from _rows(size, cores, samples, watch.lap().steal)


def _in_turns(systems: Sequence[System], floats: int, rounds: int) -> Mapping[str, list[float]]:
    """What every system's turns took, round by round."""
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

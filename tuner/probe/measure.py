"""Probing the machine at hand within a time: pairs of cores in an order that tells the most first.

One PU of every core is looked at. Three things are measured, each until its share of the time is over: how
long a cache line takes between two cores, and how much of its rate a core loses while another reads, from
buffers that the last cache holds and from buffers that it does not. Disturbances are noted, not waited out.

The order of pairs is the same for the same seed. Symmetry (A.1) makes the inside of one shared part stand for
all of them, so its pairs come first and whole; then the insides of its likes; then pairs across parts, of
which a sample tells enough.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import combinations, cycle, islice, product
from pathlib import Path
from random import Random
from statistics import median
from typing import Protocol

import numpy as np

from phasewise._words import counted
from phasewise.topology import Kind, Machine
from phasewise.tuner.conditions import Watch
from phasewise.tuner.probe.groups import (
    ClusterLevel,
    Matrix,
    Source,
    hints_of,
    interference_levels,
    latency_levels,
)
from phasewise.tuner.probe.result import Interference, Probe
from phasewise.tuner.topotree import TopoTree, fundamental

Pair = tuple[int, int]


def ordered_pairs(parts: Sequence[Sequence[int]], rng: Random) -> list[Pair]:
    """Every pair of the indices in `parts` once, in the order in which to measure them."""
    inside = [_shuffled(combinations(part, 2), rng) for part in parts]
    across = [
        pair
        for first, second in combinations(range(len(parts)), 2)
        for pair in product(parts[first], parts[second])
    ]
    return [*(pair for pairs in inside for pair in pairs), *_shuffled(across, rng)]


def _shuffled(pairs: Iterable[Pair], rng: Random) -> list[Pair]:
    mixed = list(pairs)
    rng.shuffle(mixed)
    return mixed


MIB = 1 << 20
LATENCY_UNTIL, CACHE_UNTIL, MEMORY_UNTIL = 0.4, 0.65, 0.95
"""Shares of the time after which each measurement ends; what one leaves over, the next one has."""

LATENCY_PASSES, READ_PASSES = 8, 5
"""Most passes over all pairs, of latencies and of reads; a pair's number is the least of its latencies, the
median of its reads."""

MAX_READERS = 32
"""Most cores that are compared by bandwidth: a part of a node, whose like the others are (A.1)."""

SMALLEST_STREAM_BYTES, LEAST_STREAM_BYTES, MOST_STREAM_BYTES = 16 * MIB, 64 * MIB, 512 * MIB
MOST_CACHED_BYTES = 32 * MIB
MEMORY_SHARE = 0.25
"""Share of the free memory that all buffers together may take."""

TOUCHED_BYTES_PER_S, TOUCH_SHARE = 2 << 30, 0.05
"""Slowest rate at which fresh memory is got, and the share of the budget that getting it may take."""

STREAM_S, LEAST_CACHED_S, CACHED_S_PER_BYTE = 0.010, 0.005, 1e-9
"""Seconds of one reading: of a stream, and of a cached buffer at least and for each byte, so that it is read
ten times or so."""

MAX_SIBLINGS = 4
SEED = 0

Report = Callable[[str], None]
Deadline = Callable[[], bool]


class BandwidthReading(Protocol):
    def rates(self, active: Sequence[int], duration_s: float) -> Sequence[float]:
        """Bytes per second of each reader; those whose place is in `active` read at once."""
        ...


class Instruments(Protocol):
    """The instruments of a measurement; `tuner.probe.native` has those of this machine."""

    def one_way_ns(self, first: int, second: int) -> Sequence[float]:
        """Time that a cache line takes between two PUs, one number a round; empty where the host gave no
        time.
        """
        ...

    def readers(self, pus: Sequence[int], size_bytes: int) -> AbstractContextManager[BandwidthReading]:
        """A reader on each PU with a buffer of its own. MemoryError where there is no room."""
        ...


def probe(
    machine: Machine,
    budget_s: float,
    instruments: Instruments,
    report: Report = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Probe:
    """Measure a machine, cluster its cores and propose groups.

    Ends soon after `budget_s`; with fewer than two cores there is nothing to do.
    """
    began = clock()
    tree = fundamental(machine).tree
    pus = probed_pus(machine, tree)
    watch = Watch(machine.allowed_pus)

    def until(share: float) -> Deadline:
        return lambda: clock() >= began + share * budget_s

    latency = np.full((len(pus), len(pus)), np.nan)
    levels: list[ClusterLevel] = []
    interference: dict[Source, Interference] = {}
    if len(pus) > 1:
        report(f"latency between {counted(len(pus), 'core')}")
        _fill_latencies(latency, pus, _by_node(machine, pus), instruments, until(LATENCY_UNTIL))
        levels += latency_levels(tree, pus, latency)
        for buffers in _buffers(machine, pus, budget_s):
            report(
                f"pairs of {counted(len(buffers.pus), 'core')} reading {buffers.size_bytes // MIB} MiB each"
            )
            measured = _interference(buffers, instruments, until(buffers.until))
            interference[buffers.source] = measured
            levels += interference_levels(tree, measured.pus, measured.lost, buffers.source)
    return Probe(
        pus=pus,
        latency_ns=latency,
        siblings_ns=_siblings_ns(machine, instruments),
        interference=interference,
        levels=tuple(levels),
        groups=hints_of(levels),
        conditions=watch.lap().fields(),
        elapsed_s=clock() - began,
        budget_s=budget_s,
    )


def probed_pus(machine: Machine, tree: TopoTree) -> tuple[int, ...]:
    """The first PU of every core that the tree has, in its order."""
    firsts = {core[0] for core in machine.allowed_cores()}
    return tuple(pu for pu in tree.pus if pu in firsts)


def _by_node(machine: Machine, pus: Sequence[int]) -> list[list[int]]:
    """The places of `pus` by NUMA node, the fullest node first."""
    nodes = [set(node.cpus) for node in machine.nodes(Kind.NUMA)]
    parts = [[place for place, pu in enumerate(pus) if pu in node] for node in nodes]
    return sorted((part for part in parts if part), key=len, reverse=True)


def _passes(order: Sequence[Pair], times: int, is_over: Deadline) -> Iterator[Pair]:
    """The pairs again and again, until the time is over; always at least one."""
    for number, pair in enumerate(islice(cycle(order), times * len(order))):
        if number and is_over():
            return
        yield pair


def _fill_latencies(
    latency: Matrix,
    pus: Sequence[int],
    nodes: Sequence[Sequence[int]],
    instruments: Instruments,
    is_over: Deadline,
) -> None:
    """Per pair, the least of its passes (each a median of rounds): a disturbance can only add delay."""
    for first, second in _passes(ordered_pairs(nodes, Random(SEED)), LATENCY_PASSES, is_over):
        rounds = instruments.one_way_ns(pus[first], pus[second])
        if rounds:
            least = np.fmin(latency[first, second], median(rounds))
            latency[first, second] = latency[second, first] = least


def _siblings_ns(machine: Machine, instruments: Instruments) -> float | None:
    """Nanoseconds between two PUs of one core, the median over a few cores; None without SMT."""
    cores = [core for core in machine.allowed_cores() if len(core) > 1][:MAX_SIBLINGS]
    medians = [median(rounds) for core in cores if (rounds := instruments.one_way_ns(core[0], core[1]))]
    return median(medians) if medians else None


@dataclass(frozen=True)
class _Buffers:
    """One reading experiment: who reads how much, how long at a time, and when its share of the time ends."""

    source: Source
    pus: tuple[int, ...]
    size_bytes: int
    duration_s: float
    until: float


def _buffers(machine: Machine, pus: Sequence[int], budget_s: float) -> list[_Buffers]:
    """The experiments to make: cached reads where the machine says how large its caches are; streams where
    there is room for them."""
    readers = tuple(pus[place] for place in _by_node(machine, pus)[0][:MAX_READERS])
    if len(readers) < 2:
        return []
    l2, l3 = (_cache_bytes(machine, kind, readers[0]) for kind in (Kind.L2, Kind.L3))
    cached = min(l3 // 4, MOST_CACHED_BYTES) // MIB * MIB
    free = MEMORY_SHARE * _free_bytes(Path("/proc/meminfo"))
    room = int(min(free, TOUCH_SHARE * budget_s * TOUCHED_BYTES_PER_S)) // len(readers)
    streamed = min(max(2 * l3, LEAST_STREAM_BYTES), MOST_STREAM_BYTES, room) // MIB * MIB
    wanted = []
    if cached > l2:
        duration_s = max(LEAST_CACHED_S, cached * CACHED_S_PER_BYTE)
        wanted.append(_Buffers("cache", readers, cached, duration_s, CACHE_UNTIL))
    if streamed >= SMALLEST_STREAM_BYTES and 2 * streamed > l3:
        wanted.append(_Buffers("memory", readers, streamed, STREAM_S, MEMORY_UNTIL))
    return wanted


def _cache_bytes(machine: Machine, kind: Kind, pu: int) -> int:
    """Bytes of the cache of this kind above a PU; 0 where there is none or its size is not known."""
    return next((node.size_bytes or 0 for node in machine.nodes(kind) if pu in node.cpus), 0)


def _free_bytes(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def _interference(buffers: _Buffers, instruments: Instruments, is_over: Deadline) -> Interference:
    """The losses of each pair: one reads alone, both together, the other alone, so that slow changes of pace
    cancel out."""
    pus, n = buffers.pus, len(buffers.pus)
    lost: dict[Pair, list[float]] = defaultdict(list)
    alone: dict[int, list[float]] = defaultdict(list)
    with instruments.readers(pus, buffers.size_bytes) as readers:
        for pair in _passes(ordered_pairs([range(n)], Random(SEED)), READ_PASSES, is_over):
            first, second = pair
            own = {first: readers.rates([first], buffers.duration_s)[first]}
            both = readers.rates(pair, buffers.duration_s)
            own[second] = readers.rates([second], buffers.duration_s)[second]
            for place, other in (pair, pair[::-1]):
                alone[place].append(own[place])
                lost[place, other].append(1 - both[place] / own[place])
    matrix = np.full((n, n), np.nan)
    for (place, other), samples in lost.items():
        matrix[place, other] = median(samples)
    rates = tuple(median(alone[place]) if alone[place] else None for place in range(n))
    return Interference(pus, buffers.size_bytes, rates, matrix)

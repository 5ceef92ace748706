"""The protocol of searches: a search is a generator that asks for timings and is sent samples.

A search yields a list of schedules and is sent one sample for each, in the same order; at the end it returns
the best. It reads no clock, keeps nothing and knows no budget: the caller times a batch (interleaved, since
only samples taken side by side compare well on a noisy machine), stores it, and may `close()` the search at
any time. Given the same samples a search asks the same questions, so replaying stored samples resumes it.
Hence no search iterates over a set or draws from a generator that it did not seed itself."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

from phasewise.kerneldb.records import Sample, Schedule


@dataclass(frozen=True)
class SearchOptions:
    """Options of the searches of products and groups, with the paper's numbers where it gives them. Shares
    are of times; 0.01 is one per cent."""

    batch: int = 12
    """Schedules that are timed side by side, including the fastest so far again."""
    gain: float = 0.01
    """Share by which a step of the fast start must be faster, else it is rolled back."""
    fine_gain: float = 0.008
    """Share by which a step of the finetune must be faster, else it is not taken."""
    keep_within: float = 0.5
    """Micro-kernels and grids slower than their batch's best by more than this share are dropped."""
    kept_kernels: int = 4
    """Micro-kernels that get a fast start."""
    lines: int = 2
    """Micro-kernels whose slices are tried with every length of a pass over k."""
    finalists: int = 2
    """Pairs of micro-kernel and grid that are finetuned."""
    moves: int = 3
    """The most moves of each finetuned schedule; noise would make moves gain for ever."""
    patience: int = 1
    """Rounds of the finetune without a gain before it ends."""
    window: int = 16
    """The paper's sigma: for this many shapes every micro-kernel is a candidate, then only winners."""
    per_octave: int = 4
    """The m of each octave beyond the window that are tuned; others use a neighbour's schedule."""
    reuse_from: int = 64
    """The m from which schedules may be fixed: products are no longer skinny."""
    steady: int = 3
    """Consecutive shapes that must confirm the slice before it is fixed."""
    slice_threshold: float = 0.25
    """Share by which each side of a slice may differ from the last slices' average and still confirm them."""
    reuse_within: float = 0.03
    """Share by which the previous slice may be slower than the found one and still be confirmed. A fixed
    slice is given up if the default beats it by more."""
    finals: int = 4
    """Fastest schedules of each m that are timed again beside the default before one is chosen: the better
    half of twice as many."""
    final_laps: int = 3
    """Times that each of the `finals` is timed again."""
    stay_within: float = 0.01
    """Share by which the previous slice may be slower and still be kept."""
    probes: int = 4
    """The number of m at which arithmetics are compared before one is chosen for the group."""
    switch_gain: float = 0.02
    """Share by which another arithmetic must be faster than the default over all m together."""
    split_gain: float = 0.05
    """`switch_gain` of an arithmetic that sums k in another number of parts."""
    fewest_rows_keep: float = 0.97
    """Share of their speed that the fewest rows, those of an answer, must keep under another arithmetic."""


T = TypeVar("T")
Asked = TypeVar("Asked")
Answers = TypeVar("Answers")
PassedOn = TypeVar("PassedOn")
Taken = TypeVar("Taken")
Search: TypeAlias = Generator[list[Schedule], list[Sample], T]
"""The search of one product: it yields lists of schedules and returns T, usually a schedule. A schedule asked
for again is timed again."""


@dataclass(frozen=True, slots=True)
class TimingBatch:
    """One batch of a group's search: schedules to time for `m` rows, interleaved."""

    m: int
    schedules: tuple[Schedule, ...]
    """The schedules to time, all different. The answer is one sample for each, in this order."""
    takes: tuple[int, ...]
    """The number of earlier requests of each schedule at this m. A request with 0 may be answered by the
    first stored sample, with 1 by the second, and so on, so that no sample answers twice."""


GroupSearch: TypeAlias = Generator[TimingBatch, list[Sample], T]
"""The search of a weight's products over many m: see `group.tune_group`."""


def together(searches: Sequence[Search[T]]) -> Search[list[T]]:
    """Run searches side by side, joining their requests into one batch; returns all results, in order."""
    results: dict[int, T] = {}
    waiting: dict[int, list[Schedule]] = {}
    answers: dict[int, list[Sample] | None] = dict.fromkeys(range(len(searches)))
    while answers:
        for index, answer in answers.items():
            try:
                waiting[index] = next(searches[index]) if answer is None else searches[index].send(answer)
            except StopIteration as done:
                results[index] = done.value
        asked = list(dict.fromkeys(schedule for batch in waiting.values() for schedule in batch))
        samples = dict(zip(asked, (yield asked), strict=True)) if asked else {}
        answers = {index: [samples[schedule] for schedule in batch] for index, batch in waiting.items()}
        waiting = {}
    return [results[index] for index in range(len(searches))]


def referenced(search: Search[T], memory: dict[Schedule, Sample], most: int) -> Search[T]:
    """The search with the samples of different batches made comparable, for a machine that changes its pace.
    Each batch, of at most `most` schedules, times the fastest one so far once more, and the others count by
    their ratio to it. `memory` gets every new sample on that scale; schedules in it are not asked for."""

    def answer(asked: list[Schedule]) -> Search[list[Sample]]:
        fresh = [schedule for schedule in dict.fromkeys(asked) if schedule not in memory]
        for start in range(0, len(fresh), most - 1):
            samples = yield from beside_the_best(fresh[start : start + most - 1], memory)
            memory.update((sample.schedule, sample) for sample in samples)
        return [memory[schedule] for schedule in asked]

    return relayed(search, answer)


def beside_the_best(schedules: list[Schedule], earlier: Mapping[Schedule, Sample]) -> Search[list[Sample]]:
    """New samples of schedules, scaled to the best known schedule, which is timed again with them."""
    if not earlier:
        return (yield schedules)
    best = fastest(list(earlier.values()))
    others = [schedule for schedule in schedules if schedule != best.schedule]
    again, *samples = yield [best.schedule, *others]
    scaled = {sample.schedule: _scaled(sample, cost(best) / cost(again)) for sample in (again, *samples)}
    return [scaled[schedule] for schedule in schedules]


def _scaled(sample: Sample, factor: float) -> Sample:
    return replace(sample, estimate_ns=max(1, round(sample.estimate_ns * factor)))


def side_by_side(schedules: Sequence[Schedule], laps: int) -> Search[list[Sample]]:
    """New samples of a few schedules, timed together `laps` times, in order. A sample's estimate is the
    geometric mean over laps of its cost relative to the lap's, so that laps at different paces of the machine
    count equally."""
    taken: list[list[Sample]] = []
    for _ in range(laps):
        taken.append((yield list(schedules)))  # noqa: PERF401 - a comprehension cannot yield
    pace_ns = [statistics.geometric_mean(map(cost, lap)) for lap in taken]
    middle_ns = statistics.geometric_mean(pace_ns)
    return [
        replace(
            first,
            samples_ns=tuple(ns for lap in taken for ns in lap[index].samples_ns),
            estimate_ns=_mean_ratio([cost(lap[index]) for lap in taken], pace_ns, middle_ns),
        )
        for index, first in enumerate(taken[0])
    ]


def _mean_ratio(costs_ns: Sequence[int], pace_ns: Sequence[float], middle_ns: float) -> int:
    ratios = (own / pace for own, pace in zip(costs_ns, pace_ns, strict=True))
    return max(1, round(statistics.geometric_mean(ratios) * middle_ns))


def drive(search: Generator[Asked, Answers, T], answer: Callable[[Asked], Answers]) -> T:
    """Answer every batch that a search, a group's search or a walk asks for; returns its result."""
    try:
        asked = next(search)
        while True:
            asked = search.send(answer(asked))
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def relayed(
    search: Generator[Asked, Answers, T], answer: Callable[[Asked], Generator[PassedOn, Taken, Answers]]
) -> Generator[PassedOn, Taken, T]:
    """The search with each batch answered by the generator `answer`, which may ask questions of its own."""
    try:
        asked = next(search)
        while True:
            asked = search.send((yield from answer(asked)))
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def fastest(samples: Sequence[Sample]) -> Sample:
    """The sample of least cost, the earliest of equals."""
    return min(samples, key=cost)


def cost(sample: Sample) -> int:
    """The quantity of a sample that searches minimise."""
    return sample.estimate_ns

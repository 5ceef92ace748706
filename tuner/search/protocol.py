"""How a search and its caller talk: a search is a generator that asks for timings and is sent samples.

A search yields a list of schedules and is sent one sample for each, in the same order; in the end it returns
what it found best. It reads no clock, keeps nothing and knows no budget: the caller times a batch
(interleaved, since only what was timed side by side compares well on a noisy machine), stores it, and may
`close()` the search at any time. Given the same samples a search asks the same questions, so that replaying
what was stored resumes it. Hence no search iterates over a set or draws from a generator that it did not seed
itself.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from phasewise.kerneldb.records import Sample, Schedule

T = TypeVar("T")
Search: TypeAlias = Generator[list[Schedule], list[Sample], T]
"""One product is searched: asks are lists of schedules, T is what is found (usually a schedule)."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One batch of a group's search: time these schedules for `m` rows, interleaved."""

    m: int
    schedules: tuple[Schedule, ...]
    """All different. The answer is a list of one sample for each, in this order."""
    take: int = 0
    """Counts fresh samples of one schedule at one m: take 0 may be the first one stored, take 1 the second
    one, and so on. No (m, schedule, take) is asked twice."""


GroupSearch: TypeAlias = Generator[Ask, list[Sample], T]
"""The products of one weight over many m are searched, see `group.tune_group`."""


def together(searches: Sequence[Search[T]]) -> Search[list[T]]:
    """Run searches side by side: what they ask at the same time is one batch. All results, in order."""
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


def remembered(search: Search[T], memory: dict[Schedule, Sample]) -> Search[T]:
    """The same search, without asking for what `memory` holds, which gets every new sample."""
    try:
        asked = next(search)
        while True:
            fresh = [schedule for schedule in dict.fromkeys(asked) if schedule not in memory]
            if fresh:
                memory.update(zip(fresh, (yield fresh), strict=True))
            asked = search.send([memory[schedule] for schedule in asked])
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def asked_once(search: GroupSearch[T]) -> GroupSearch[T]:
    """The same group search, answering itself what was asked before."""
    memory: dict[tuple[int, Schedule, int], Sample] = {}
    try:
        ask = next(search)
        while True:
            keys = {schedule: (ask.m, schedule, ask.take) for schedule in ask.schedules}
            fresh = tuple(schedule for schedule, key in keys.items() if key not in memory)
            if fresh:
                samples = yield Ask(ask.m, fresh, ask.take)
                memory.update(zip((keys[schedule] for schedule in fresh), samples, strict=True))
            ask = search.send([memory[keys[schedule]] for schedule in ask.schedules])
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def drive(search: Search[T], time: Callable[[list[Schedule]], list[Sample]]) -> T:
    """Answer every batch with `time` until the search returns."""
    try:
        asked = next(search)
        while True:
            asked = search.send(time(asked))
    except StopIteration as done:
        return done.value  # type: ignore[no-any-return]


def fastest(samples: Sequence[Sample]) -> Sample:
    """The sample of least cost, the earliest of equals."""
    return min(samples, key=cost)


def cost(sample: Sample) -> int:
    """What a search makes small."""
    return sample.estimate_ns

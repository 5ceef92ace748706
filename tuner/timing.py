"""The time of a product on a machine that others use too.

A kernel clocks its own calls; this module decides how often it is called and what the nanoseconds mean.
Everything is a pure function, or calls a `Take` that was passed in.

- Short calls are clocked in loops (`loop_means`), so that one sample is long against the clock.
- Schedules to compare are timed in turns (`race`), because a neighbour's burst, or a change of memory's pace,
  lasts longer than a turn and then hits all of them. Hopeless schedules leave the race early.
- The estimate is the mean of the fastest quarter of the samples. Disturbances only ever lengthen a call, and
  on a shared machine they may hit more than half of the calls, which moves the median; the minimum alone
  would reward one lucky reading. Raw samples are kept, so this choice can change.
- A difference is believed only after pairs of turns, one of each in changing order, and only if the
  confidence interval of the median ratio (`compare`) begins above 1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from phasewise.kerneldb.records import MAX_GAIN, Comparison, Sample

TURN_NS = 1_500_000  # of calls: long against a barrier and a timer tick, short against a burst
MIN_SAMPLE_NS = 20_000  # a thousand times the clock's own cost
MAX_TURN_SAMPLES = 8  # what a turn leaves in the database
ROUNDS = 5
MARGINS = {2: 1.6, 3: 1.25}
"""By rounds done, the ratio to the best up to which a schedule stays in the race."""
PAIRS = 15
CONFIDENCE = 0.99  # a tuning run makes a hundred comparisons

Samples: TypeAlias = tuple[int, ...]
Take: TypeAlias = Callable[[], Samples]
"""A function that runs a product some times in one turn; returns nanoseconds of each call."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The number of calls in one turn: `loops` samples of `calls_a_loop` calls each."""

    loops: int
    calls_a_loop: int

    @property
    def calls(self) -> int:
        return self.loops * self.calls_a_loop


def plan_turn(call_ns: int) -> Turn:
    """The turn for a product that takes about `call_ns`; a long product is called once."""
    call_ns = max(1, call_ns)
    calls_a_loop = math.ceil(MIN_SAMPLE_NS / call_ns)
    loops = TURN_NS // (calls_a_loop * call_ns)
    return Turn(max(1, min(MAX_TURN_SAMPLES, loops)), calls_a_loop)


def loop_means(call_ns: npt.NDArray[np.int64], turn: Turn) -> Samples:
    """The mean nanoseconds per call of each loop of a turn, as samples of at least 1 ns."""
    assert call_ns.shape == (turn.calls,), f"{call_ns.shape} calls, {turn.calls} planned"
    means: npt.NDArray[Any] = call_ns.reshape(turn.loops, turn.calls_a_loop).mean(axis=1)
    return tuple(max(1, round(mean)) for mean in means.tolist())


def estimate_ns(samples_ns: Sequence[int]) -> int:
    """The mean of the fastest quarter of the samples (their number rounded up)."""
    fastest = sorted(samples_ns)[: math.ceil(len(samples_ns) / 4)]
    return round(statistics.fmean(fastest))


def race(takes: Sequence[Take]) -> list[Samples]:
    """Time all contestants in turns, every second round backwards; MARGINS drops slow contestants early.
    Returns all samples of each contestant, in order."""
    taken: list[Samples] = [() for _ in takes]
    running = list(range(len(takes)))
    for done in range(1, ROUNDS + 1):
        for contestant in running if done % 2 else reversed(running):
            taken[contestant] += takes[contestant]()
        if done in MARGINS:
            running = _within(MARGINS[done], running, taken)
    return taken


def _within(margin: float, running: Sequence[int], taken: Sequence[Samples]) -> list[int]:
    estimates = {contestant: estimate_ns(taken[contestant]) for contestant in running}
    limit = margin * min(estimates.values(), default=0)
    return [contestant for contestant in running if estimates[contestant] <= limit]


@dataclass(frozen=True)
class Duel:
    """Two schedules timed in pairs: the comparison, and a sample of each."""

    comparison: Comparison
    incumbent: Sample
    candidate: Sample


def duel(incumbent: Take, candidate: Take, pairs: int = PAIRS) -> list[tuple[Samples, Samples]]:
    """Time two schedules in pairs of turns, the incumbent's samples first; who begins alternates."""
    taken = []
    for pair in range(pairs):
        if pair % 2:
            of_candidate, of_incumbent = candidate(), incumbent()
        else:
            of_incumbent, of_candidate = incumbent(), candidate()
        taken.append((of_incumbent, of_candidate))
    return taken


def compare(taken: Sequence[tuple[Samples, Samples]]) -> Comparison:
    """The comparison of a duel: the median over pairs of incumbent / candidate. The interval is a sign
    test's, which assumes no shape of noise."""
    gains = sorted(min(MAX_GAIN, estimate_ns(before) / estimate_ns(after)) for before, after in taken)
    low, high = _sign_test_interval(gains)
    return Comparison(statistics.median(gains), low, high, CONFIDENCE, len(gains))


def _sign_test_interval(ordered: Sequence[float]) -> tuple[float, float]:
    """The interval of the median between two order statistics; 0 to MAX_GAIN for too few pairs. With `out`
    values left out at each end, it misses the median with probability 2 P(Binomial(n, 1/2) < out)."""
    count, missed, out = len(ordered), 0.0, 0
    while out < count:
        missed += 2 * math.comb(count, out) / 2**count
        if missed > 1 - CONFIDENCE:
            break
        out += 1
    return (0.0, MAX_GAIN) if out == 0 else (ordered[out - 1], ordered[count - out])

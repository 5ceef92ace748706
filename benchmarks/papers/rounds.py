"""Tournament by successive halving: comparison in rounds of contestants whose timings scatter by more than
they differ.

Contestants take short turns in many rounds, each round in another order. A machine changes its pace for
seconds at a time, a round takes a few dozen milliseconds: within a round all meet the same machine, so only
ratios within rounds count, and of these the median over the rounds.

The best of many by such medians is still the luckiest of the good ones. So what is said about the best comes
from other rounds than those that chose it (`against_best`): each half of the rounds judges what the other
half chose. Intervals are of a bootstrap over rounds.

Everything is a pure function of nanoseconds, or calls takes that were handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from phasewise.tuner.timing import Take, estimate_ns

Times: TypeAlias = npt.NDArray[np.float64]
"""Nanoseconds [rounds, contestants]."""

T = TypeVar("T")
Race: TypeAlias = Callable[[Sequence[T], int], Times]
"""Times of some contestants, by round."""

RESAMPLES = 1000
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """The time of one contestant as a multiple of another's: the median over rounds, and its interval."""

    middle: float
    low: float
    high: float
    confidence: float
    rounds: int


def shuffled_rounds(takes: Sequence[Take], rounds: int, seed: int = 0) -> Times:
    """One turn of every contestant in each round, in an order drawn anew."""
    dice, times = Random(seed), np.empty((rounds, len(takes)))
    order = list(range(len(takes)))
    for number in range(rounds):
        dice.shuffle(order)
        for contestant in order:
            times[number, contestant] = estimate_ns(takes[contestant]())
    return times


def standing(times: Times) -> npt.NDArray[np.float64]:
    """Per contestant, the median over rounds of its time divided by the round's median time."""
    within = times / np.median(times, axis=1, keepdims=True)
    return np.asarray(np.median(within, axis=0))


def ratio(times: Times, of: int, to: int, seed: int = 0) -> Ratio:
    """The time of one contestant as a multiple of another's that was named beforehand."""
    return _of_rounds(times[:, of] / times[:, to], seed)


def against_best(times: Times, of: int, among: Sequence[int], seed: int = 0) -> Ratio:
    """The time of a contestant as a multiple of the best of `among`; no round both chooses and judges.

    Needs two rounds. The other half may choose one that is not quite the best: then this is low by as much as
    that one is slower, which rounds make as small as one likes; it is never high by the luck of the chosen.
    """
    assert len(times) >= 2, "one half of the rounds chooses, the other judges"
    columns, halves = np.asarray(among), (times[::2], times[1::2])
    judged = [
        judging[:, of] / judging[:, columns[np.argmin(standing(choosing)[columns])]]
        for choosing, judging in (halves, halves[::-1])
    ]
    return _of_rounds(np.concatenate(judged), seed)


def halved(contestants: Sequence[T], race: Race[T], keep: int, rounds: int = 4) -> list[T]:
    """The best `keep`, best first: the slower half leaves after `rounds`, of the rest after twice as many.

    And so on: every stage costs as much, and the last ones are told apart best.
    """
    running = list(contestants)
    while len(running) > keep:
        ranks = np.argsort(standing(race(running, rounds)), kind="stable")
        running = [running[index] for index in ranks[: max(keep, -(-len(running) // 2))]]
        rounds *= 2
    return running


def _of_rounds(ratios: npt.NDArray[np.float64], seed: int) -> Ratio:
    drawn = np.random.default_rng(seed).integers(0, len(ratios), (RESAMPLES, len(ratios)))
    medians = np.median(ratios[drawn], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Ratio(float(np.median(ratios)), float(low), float(high), CONFIDENCE, len(ratios))

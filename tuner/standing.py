"""The gain of the schedule in use over the kernels' own, from the duels that led to it.

A schedule may have been taken into use in several steps: its gain is the product of its duels', and so are
the ends of its interval, which is then wider than it has to be and never too narrow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from phasewise.kerneldb.records import MAX_GAIN, Comparison

if TYPE_CHECKING:
    from phasewise.kerneldb.records import Promotion, Schedule
    from phasewise.tuner.lookup import IsDefault


@dataclass(frozen=True)
class MeasuredRatio:
    """A measured gain over the kernels' own schedule, or of one thing over another, with its interval;
    exactly 1 for the same."""

    gain: float = 1.0
    low: float = 1.0
    high: float = 1.0

    def times(self, won: Comparison) -> MeasuredRatio:
        """The gain after one more duel was won."""
        high = min(MAX_GAIN, self.high * won.gain_high)
        return MeasuredRatio(self.gain * won.gain, self.low * won.gain_low, high)


def ratio_of(comparison: Comparison) -> MeasuredRatio:
    """The gain of one comparison with its interval."""
    return MeasuredRatio().times(comparison)


def mean_of(gains: Iterable[MeasuredRatio]) -> MeasuredRatio:
    """The geometric means of gains and of the ends of their intervals."""
    several = list(gains)
    return MeasuredRatio(
        *(_mean(getattr(each, name) for each in several) for name in ("gain", "low", "high"))
    )


def _mean(ratios: Iterable[float]) -> float:
    logarithms = [math.log(max(ratio, 1e-9)) for ratio in ratios]
    return math.exp(math.fsum(logarithms) / len(logarithms))


class ScheduleInUse(NamedTuple):
    """The schedule in use for a product, and its gain."""

    schedule: Schedule
    gain: MeasuredRatio


def in_use_after(before: ScheduleInUse | None, won: Promotion, is_default: IsDefault) -> ScheduleInUse:
    """The schedule in use after a duel. A first winner that is not proven faster, of a duel with something of
    which `is_default` knows nothing, is taken for the default."""
    winner, loser, comparison = won.schedule, won.incumbent, won.comparison
    if is_default(won.problem, winner):
        return ScheduleInUse(winner, MeasuredRatio())
    if before is None:
        beat_default = loser is None or is_default(won.problem, loser) or comparison.proves_faster
        return ScheduleInUse(winner, MeasuredRatio().times(comparison) if beat_default else MeasuredRatio())
    if winner == before.schedule:  # it stays
        return before
    return ScheduleInUse(winner, before.gain.times(comparison))

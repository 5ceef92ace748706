"""Is a server's memory flat over a run? Its slope, how sure that is, and what may be called flat.

Memory that is used for the first time rises in steps and then stops; what leaks goes on. So the slope is
that of the run without its beginning, by Theil and Sen's median of slopes, which one step moves little.
Neighbouring samples hang together, so the interval is drawn from blocks of them (a bootstrap of residuals).

Resident memory never falls to what is in use: it is the most that was ever in use, page by page, and the
most of a load that goes up and down at random is surpassed now and then, ever more rarely, without an end. So
an interval that leaves out 0 by a few pages in thousands of requests is no leak. A server that keeps
something of every request keeps a block of memory of each: `is_flat` asks whether the interval leaves out
the least one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]

PARTS = 40
"""Number of equal stretches of the run over which samples are averaged; a line is fitted through these."""
LEAST_BLOCK_BYTES = 16
"""Smallest block of Python's allocator; malloc's is 32."""
_NEIGHBOURS = 5
_DRAWS = 2000
_SHARE = 0.95


class Slope(NamedTuple):
    """Slope of y per unit of x, with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def is_zero_within_noise(self) -> bool:
        return self.low <= 0.0 <= self.high


def is_flat(bytes_a_request: Slope) -> bool:
    """True if even the interval's upper bound is less than a block of memory for each request.

    A run too short or too noisy to say so does not pass, as it would where its interval need only hold 0.
    """
    return bytes_a_request.high < LEAST_BLOCK_BYTES


def slope(samples: Sequence[tuple[float, float]]) -> Slope:
    """Slope of samples (x, y), x never falling. ValueError for fewer than PARTS samples, or a constant x."""
    if len(samples) < PARTS or samples[0][0] == samples[-1][0]:
        raise ValueError(f"{len(samples)} samples tell no slope; {PARTS} at least, of a run that moves")
    x, y = (
        np.array([part.mean() for part in np.array_split(np.array(values, dtype=np.float64), PARTS)])
        for values in zip(*samples, strict=True)
    )
    value = _theil_sen(x, y)
    line = value * x + np.median(y - value * x)
    rest = y - line
    dice = np.random.default_rng(0)
    drawn = [_theil_sen(x, line + _of_neighbours(rest, dice)) for _ in range(_DRAWS)]
    low, high = np.quantile(drawn, [(1 - _SHARE) / 2, (1 + _SHARE) / 2])
    return Slope(value, float(low), float(high))


def rises(samples: Sequence[tuple[float, float]], parts: int = 4) -> list[float]:
    """By how much y rises in each of `parts` equal stretches of x: alike in all where something leaks,
    less and less where memory is only used for the first time."""
    x, y = np.array(samples, dtype=np.float64).T
    heights = np.interp(np.linspace(x[0], x[-1], parts + 1), x, y)
    return [float(rise) for rise in np.diff(heights)]


def _theil_sen(x: Vector, y: Vector) -> float:
    first, second = np.triu_indices(len(x), 1)
    runs = x[second] - x[first]
    return float(np.median((y[second] - y[first])[runs > 0] / runs[runs > 0]))


def _of_neighbours(rest: Vector, dice: np.random.Generator) -> Vector:
    """As many residuals again, in whole blocks of neighbours."""
    starts = dice.integers(0, len(rest) - _NEIGHBOURS + 1, size=-(-len(rest) // _NEIGHBOURS))
    return np.concatenate([rest[start : start + _NEIGHBOURS] for start in starts])[: len(rest)]

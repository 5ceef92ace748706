"""A day's curve of queries (WindVE, Fig. 2): so many a second in each part of the day.

A curve is drawn, `diurnal:MEAN,PEAK`, or read from a file. The drawn one has its peak in the afternoon and
nothing twelve hours later: the paper's figure has the form and no numbers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from phasewise._files import read_input
from phasewise.tuner.errors import TraceError

HOURS = 24
PEAK_HOUR = 15
MOST_PARTS = 1440
MOST_RATE = 1e7
MAX_FILE_BYTES = 1 << 20

_DRAWN = re.compile(r"diurnal:([0-9.]{1,12}),([0-9.]{1,12})")


@dataclass(frozen=True)
class DayCurve:
    """A day in equal parts, each with its rate of queries: `rates`, in queries/s."""

    rates: tuple[float, ...]

    @property
    def mean(self) -> float:
        return sum(self.rates) / len(self.rates)

    @property
    def peak(self) -> float:
        return max(self.rates)


def day_curve(text: str) -> DayCurve:
    """The curve that `text` draws, or that the file it names has. TraceError in one line."""
    if not text.startswith("diurnal:"):
        return _read(text)
    match = _DRAWN.fullmatch(text)
    try:
        mean, peak = float(match[1]), float(match[2])  # type: ignore[index]
    except (TypeError, ValueError):
        raise TraceError(
            f"a drawn day is written like diurnal:20,60 (mean and peak, queries/s), not {text!r:.60}"
        ) from None
    if not 0 < peak <= MOST_RATE or not peak / HOURS < mean <= peak:
        raise TraceError(
            f"the mean of a drawn day lies between a {HOURS}th of its peak and the peak, not {text!r:.60}"
        )
    return diurnal(mean, peak)


def diurnal(mean: float, peak: float) -> DayCurve:
    """A day of 24 hours with this mean and peak: a power of a raised cosine, found by bisection."""
    angles = (2 * math.pi * (hour - PEAK_HOUR) / HOURS for hour in range(HOURS))
    shape = [max(1e-9, (1 + math.cos(angle)) / 2) for angle in angles]  # a nought has no powers

    def rates(power: float) -> tuple[float, ...]:
        return tuple(peak * part**power for part in shape)

    low, high = 0.0, 1.0
    while sum(rates(high)) / HOURS > mean:
        low, high = high, 2 * high
        if high > 1e6:
            break
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(rates(middle)) / HOURS > mean else (low, middle)
    return DayCurve(rates(high))


def _read(name: str) -> DayCurve:
    """Rates read from a file: a rate in each line, or `hour,rate`; a first line of words is passed over."""
    try:
        lines = read_input(name, MAX_FILE_BYTES).decode("utf-8-sig").splitlines()
    except OSError as error:
        raise TraceError(f"{name}: {error.strerror or error}") from None
    except ValueError:
        raise TraceError(f"{name!r:.300} is no file of rates: it is not UTF-8 text") from None
    cells = [line.rsplit(",", 1)[-1].strip() for line in lines if line.strip()]
    if cells and not _is_rate(cells[0]):
        cells = cells[1:]
    for cell in cells:
        if not _is_rate(cell):
            raise TraceError(f"{name}: a line of a day ends with its queries/s, not with {cell!r:.40}")
    rates = tuple(map(float, cells))
    if not 2 <= len(rates) <= MOST_PARTS or not any(rates):
        raise TraceError(f"{name}: a day has 2 to {MOST_PARTS} lines, one a part, and some queries")
    return DayCurve(rates)


def _is_rate(text: str) -> bool:
    try:
        return 0 <= float(text) <= MOST_RATE
    except ValueError:
        return False

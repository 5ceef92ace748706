"""The number of inputs that a device may hold under an SLO: WindVE's linear regression (section IV-B2), and
the stress test.

t(C) = alpha C + beta is how long a batch of C takes; the depth is the largest C with t(C) <= SLO. C counts
inputs of one length, or tokens.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from phasewise.serving.embedding.queues import Depth

MOST_LOAD = 1 << 14
Measure = Callable[[int], Awaitable[float]]
"""A measurement: number of inputs sent at once -> seconds until the last is answered."""


@dataclass(frozen=True)
class LatencyLine:
    """A line through latencies: `alpha_s` seconds per unit and `beta_s` per batch, >= 0 (equation 12)."""

    alpha_s: float
    beta_s: float

    def seconds(self, units: float) -> float:
        return self.alpha_s * units + self.beta_s

    def largest_within(self, slo_s: float) -> int:
        """The most units within `slo_s`; 0 where even one takes longer (equation 11)."""
        if self.beta_s >= slo_s:
            return 0
        if self.alpha_s == 0:
            return 1 << 30
        return min(1 << 30, math.floor((slo_s - self.beta_s) / self.alpha_s + 1e-9))


def fit(units: Sequence[float], seconds: Sequence[float]) -> LatencyLine:
    """The line fitted by least squares with alpha, beta >= 0. ValueError: less than two numbers of units."""
    if len(units) != len(seconds) or len(set(units)) < 2:
        raise ValueError("a line needs times of at least two different loads")
    n = len(units)
    mean_x, mean_y = sum(units) / n, sum(seconds) / n
    spread = sum((x - mean_x) ** 2 for x in units)
    alpha = sum((x - mean_x) * (y - mean_y) for x, y in zip(units, seconds, strict=True)) / spread
    beta = mean_y - alpha * mean_x
    if beta < 0:  # the best line through the origin
        squares = sum(x * x for x in units)
        slope = sum(x * y for x, y in zip(units, seconds, strict=True)) / squares
        return LatencyLine(max(0.0, slope), 0.0)
    return LatencyLine(alpha, beta) if alpha >= 0 else LatencyLine(0.0, mean_y)


def line_through(first: tuple[float, float], second: tuple[float, float]) -> LatencyLine:
    """The line through two points (units, seconds), such as depths under two SLOs in a table."""
    return fit([first[0], second[0]], [first[1], second[1]])


def probe_sizes(largest: int) -> list[int]:
    """Five loads to measure, spaced evenly from 1 to `largest`."""
    return sorted({1, *(max(1, round(largest * share)) for share in (0.25, 0.5, 0.75, 1.0))})


@dataclass(frozen=True)
class FoundDepth:
    """A measured depth. `line`: seconds by inputs. `predicted`: the largest load within the SLO by the line.
    `tried`: the largest load within the SLO when tried."""

    line: LatencyLine
    predicted: int
    tried: int


async def predict_and_try(seconds: Measure, slo_s: float) -> FoundDepth:
    """Find a depth by a line through five loads, the largest near the SLO, and by trying loads around it."""
    measured: dict[int, float] = {}

    async def once(n: int) -> float:
        if n not in measured:
            measured[n] = await seconds(n)
        return measured[n]

    sizes = probe_sizes(max(4, await _load_near(once, slo_s)))
    line = fit(sizes, [await once(size) for size in sizes])
    predicted = line.largest_within(slo_s)
    return FoundDepth(line, predicted, await stress(once, slo_s, predicted))


async def _load_near(seconds: Measure, slo_s: float) -> int:
    """A load that takes most of the SLO: a line through much smaller loads would magnify their errors."""
    load = 2
    while (took := await seconds(load)) < 0.7 * slo_s and load < MOST_LOAD:
        load = max(load + 1, min(8 * load, int(load * 0.9 * slo_s / took)))
    return load


async def stress(seconds: Measure, slo_s: float, guess: int) -> int:
    """The largest load within `slo_s`, to a fortieth of the guess; 0: none. Steps from the guess double until
    the depth lies between two loads, whose distance is then halved."""
    if await seconds(1) > slo_s:
        return 0
    exact = max(1, guess // 40)
    low, high, step = 1, max(1, guess), exact
    if await seconds(high) <= slo_s:
        low, high = high, high + step
        while await seconds(high) <= slo_s:
            step *= 2
            low, high = high, high + step
    else:
        while (load := max(1, high - step)) > 1 and await seconds(load) > slo_s:
            high, step = load, 2 * step
        low = load
    while high - low > exact:
        middle = (low + high) // 2
        if await seconds(middle) <= slo_s:
            low = middle
        else:
            high = middle
    return low


def admission_depth(line: LatencyLine, slo_s: float, tokens_each: float, margin: float) -> Depth:
    """The depth at which all inputs, arriving at once, are answered within the SLO. `line`: seconds by
    tokens. `margin`: the share of the SLO kept for errors of the line. An input that arrives while a batch is
    computed has less room (`lane`)."""
    tokens = line.largest_within(slo_s * (1 - margin))
    inputs = math.floor(tokens / tokens_each) if tokens_each > 0 else tokens
    return Depth(max(1, inputs), max(1, tokens))

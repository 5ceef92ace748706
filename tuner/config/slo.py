"""SLOs as text: `ttft=1.5s,tpot=50ms`, one spelling for every command."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phasewise._words import number
from phasewise.tuner.errors import TraceError

LatencyMetric = Literal["ttft", "tpot", "e2e"]

_NAMES: dict[str, LatencyMetric] = {
    "ttft": "ttft",
    "tpot": "tpot",
    "tbt": "tpot",
    "e2e": "e2e",
    "e2el": "e2e",
}
_BOUND = re.compile(
    r"(ttft|tpot|tbt|e2el|e2e)(?:\.p(50|90|99))?\s*[=:]\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s)?"
)


class LatencyBound(NamedTuple):
    """An upper bound of a latency, in milliseconds. `percentile`: None for the caller's default."""

    metric: LatencyMetric
    percentile: int | None
    below_ms: float


@dataclass(frozen=True, slots=True)
class LatencyBounds:
    """Upper bounds of each request's latencies in milliseconds; None: no bound."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2el_ms: float | None = None

    @classmethod
    def of(cls, bounds: Sequence[LatencyBound]) -> LatencyBounds:
        below_ms = {bound.metric: bound.below_ms for bound in bounds}
        return cls(below_ms.get("ttft"), below_ms.get("tpot"), below_ms.get("e2e"))

    def named(self) -> dict[str, float]:
        """The bounds that there are, by metric."""
        each = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "e2el": self.e2el_ms}
        return {name: ms for name, ms in each.items() if ms is not None}

    def describe(self) -> str:
        return ",".join(f"{name}:{number(ms)}" for name, ms in self.named().items())


def parse_bounds(text: str) -> list[LatencyBound]:
    """Read `ttft=200,tpot=50` (milliseconds) or `ttft=1.5s,e2e.p99=20s`; `tbt` means `tpot`, `:` means `=`.
    TraceError, in one line, for any other text, and where one percentile of one metric is bounded twice."""
    bounds: list[LatencyBound] = []
    for part in re.split(r"[,\s]+(?=[a-z])", text.strip()):
        match = _BOUND.fullmatch(part.strip().rstrip(","))
        below_ms = float(match[3]) * (1000 if match[4] == "s" else 1) if match else 0.0
        if match is None or below_ms <= 0:
            raise TraceError(f"an SLO is written like ttft=1.5s,tpot=50ms,e2e=20s, not {text!r:.60}")
        percentile = int(match[2]) if match[2] else None
        bound = LatencyBound(_NAMES[match[1]], percentile, below_ms)
        if any(earlier[:2] == bound[:2] for earlier in bounds):
            raise TraceError(f"an SLO bounds a metric once, not {match[1]} twice: {text!r:.60}")
        bounds.append(bound)
    return bounds

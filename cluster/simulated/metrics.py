"""Metrics of a simulation for its requests and for its machines, and whether it kept its promises."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from phasewise._words import number
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.routing import Role
from phasewise.cluster.simulated.simulate import Simulation
from phasewise.cluster.simulated.simulated_requests import Life
from phasewise.cluster.simulated.steps import StepTimes
from phasewise.tuner.config.slo import LatencyMetric, parse_bounds
from phasewise.tuner.errors import TraceError

Metric = Literal["ttft", "tbt", "e2e"]
METRICS: tuple[Metric, ...] = get_args(Metric)
PERCENTILES = (50, 90, 99)
DEFAULT_PERCENTILE = 90

Seconds = npt.NDArray[np.float64]


class Bound(NamedTuple):
    """Promise that a percentile of a metric stays below a value."""

    metric: Metric
    percentile: int
    below: float


@dataclass(frozen=True)
class Slo:
    """Promises together. Bounds: seconds, or, with `is_slowdown`, multiples of an idle reference's time."""

    name: str
    bounds: tuple[Bound, ...]
    is_slowdown: bool


TABLE_VI = Slo(
    "table6",
    tuple(
        Bound(metric, percentile, below)
        for metric in METRICS
        for percentile, below in zip(
            PERCENTILES, (2, 3, 6) if metric == "ttft" else (1.25, 1.5, 5), strict=True
        )
    ),
    is_slowdown=True,
)
"""The promises of Splitwise's Table VI: slowdowns against a DGX-A100 without contention."""


def parse_slo(text: str) -> Slo:
    """Parse `table6`, or times such as `ttft=1.5s,tbt=100ms,e2e.p99=20s`; the default percentile is P90."""
    if text == TABLE_VI.name:
        return TABLE_VI
    try:
        bounds = parse_bounds(text)
    except TraceError as error:
        raise ClusterError(f"{error}; or table6") from None
    metrics: dict[LatencyMetric, Metric] = {"ttft": "ttft", "tpot": "tbt", "e2e": "e2e"}
    named = tuple(
        Bound(metrics[bound.metric], bound.percentile or DEFAULT_PERCENTILE, bound.below_ms / 1000)
        for bound in bounds
    )
    if len({bound[:2] for bound in named}) < len(named):
        raise ClusterError(f"the SLO {text!r:.60} bounds one percentile of a metric twice")
    return Slo(text, named, is_slowdown=False)


@dataclass(frozen=True)
class RoleUse:
    """The use of the machines of one role in a simulation."""

    role: Role
    machine: str
    count: int
    utilisation: float
    """Share of the time in which a machine of the role computed, as the mean over machines."""
    occupancy: tuple[tuple[int, float], ...]
    """Tokens of a batch, and the share of busy time that batches of at most that size took (Fig. 17)."""


@dataclass(frozen=True)
class Summary:
    """One simulation in figures; times in seconds."""

    n_requests: int
    output_tokens: int
    duration_s: float
    times_s: Mapping[Metric, Mapping[int, float]]
    """Seconds by metric and percentile."""
    slowdowns: Mapping[Metric, Mapping[int, float]] | None
    """Slowdowns against the reference machine, by metric and percentile; None without one."""
    uses: tuple[RoleUse, ...]
    n_transfers: int
    transfer_s: Mapping[int, float]
    """Seconds, by percentile, between the end of a prompt and the arrival of its keys and values."""
    n_preemptions: int


def summarise(simulation: Simulation, reference: StepTimes | None) -> Summary:
    """Summarise a simulation. reference: step times of the machine that slowdowns are relative to."""
    lives = simulation.lives
    times = _times(lives)
    slowdowns: dict[Metric, dict[int, float]] | None = None
    if reference is not None:
        baseline = _baseline(lives, reference)
        slowdowns = {metric: _percentiles(times[metric] / baseline[metric]) for metric in METRICS}
    transfers = np.array([life.transfer_s for life in lives if not math.isnan(life.transfer_s)])
    return Summary(
        n_requests=len(lives),
        output_tokens=sum(life.arrival.output_tokens for life in lives),
        duration_s=simulation.end_s - min(life.arrival.at_s for life in lives),
        times_s={metric: _percentiles(times[metric]) for metric in METRICS},
        slowdowns=slowdowns,
        uses=tuple(_uses(simulation)),
        n_transfers=len(transfers),
        transfer_s=_percentiles(transfers) if len(transfers) else {},
        n_preemptions=simulation.n_preemptions,
    )


def broken(summary: Summary, slo: Slo) -> list[str]:
    """The broken promises in words, for people; empty if all were kept."""
    figures = summary.slowdowns if slo.is_slowdown else summary.times_s
    if figures is None:
        raise ClusterError(f"SLO {slo.name} is in slowdowns: name the machine that they are told against")
    unit = "x" if slo.is_slowdown else " s"
    return [
        f"{metric} P{percentile} {number(figures[metric][percentile], 3)}{unit} (below {number(below)}{unit})"
        for metric, percentile, below in slo.bounds
        if not figures[metric][percentile] < below
    ]


def _times(lives: Sequence[Life]) -> dict[Metric, Seconds]:
    return {metric: np.array([getattr(life, f"{metric}_s") for life in lives]) for metric in METRICS}


def _baseline(lives: Sequence[Life], reference: StepTimes) -> dict[Metric, Seconds]:
    """Times of each request alone on the reference machine, by metric."""
    prompts = [life.arrival.prompt_tokens for life in lives]
    ttft = np.array([reference.prefill_s(tokens) for tokens in prompts])
    tbt = np.array([reference.decode_s(1, tokens) for tokens in prompts])
    gaps = np.array([life.arrival.output_tokens - 1 for life in lives])
    return {"ttft": ttft, "tbt": tbt, "e2e": ttft + tbt * gaps}


def _percentiles(values: Seconds) -> dict[int, float]:
    return dict(zip(PERCENTILES, map(float, np.percentile(values, PERCENTILES)), strict=True))


def _uses(simulation: Simulation) -> Iterable[RoleUse]:
    span_s = max(simulation.end_s - min(life.arrival.at_s for life in simulation.lives), 1e-12)
    kinds: list[tuple[Role, str]] = [(use.role, use.machine) for use in simulation.machines]
    for role, machine in dict.fromkeys(kinds):
        uses = [use for use in simulation.machines if (use.role, use.machine) == (role, machine)]
        occupancy: dict[int, float] = defaultdict(float)
        for use in uses:
            for tokens, seconds in use.occupancy_s.items():
                occupancy[tokens] += seconds
        busy = sum(use.busy_s for use in uses) / len(uses) / span_s
        yield RoleUse(role, machine, len(uses), busy, _cumulative(occupancy))


def _cumulative(occupancy: Mapping[int, float]) -> tuple[tuple[int, float], ...]:
    tokens = sorted(occupancy)
    so_far = np.cumsum([occupancy[count] for count in tokens])
    return tuple(
        (count, float(share / (so_far[-1] or 1.0))) for count, share in zip(tokens, so_far, strict=True)
    )

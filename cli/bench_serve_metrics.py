"""From outcomes to figures, with the meaning and the names of vLLM's `bench serve`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.cli.bench_serve_load import Slo
from phasewise.cli.bench_serve_outcome import Outcome

PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")
GOAL = 0.9
"""Share of the requests that must keep a promise, e.g. P90 of TTFT (Sandwich, section 8)."""

SCALES = tuple(2.0 ** (step / 4) for step in range(-12, 13))
"""Of the promises, for attainment over scale: an eighth to eight times."""


@dataclass(frozen=True)
class Measured:
    """A run's outcomes, and what the client itself cost."""

    outcomes: Sequence[Outcome]
    duration_s: float
    client_cpu_s: float

    @property
    def complete(self) -> list[Outcome]:
        return [one for one in self.outcomes if one.is_complete]

    @property
    def client_cpu_share(self) -> float:
        """Of one core."""
        return self.client_cpu_s / self.duration_s if self.duration_s > 0 else 0.0


def latencies_ms(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Samples of every metric. A TPOT needs two tokens; gaps between tokens are pooled over requests."""
    return {
        "ttft": [1e3 * one.ttft_s for one in outcomes],
        "tpot": [1e3 * one.tpot_s for one in outcomes if one.tpot_s is not None],
        "itl": [1e3 * gap_s for one in outcomes for gap_s in one.itls_s],
        "e2el": [1e3 * one.latency_s for one in outcomes],
    }


def flat_result(measured: Measured, slo: Slo | None) -> dict[str, Any]:
    """vLLM's flat fields; a metric without samples is 0, as there, and so is what only speech has (rtfx)."""
    complete, duration_s = measured.complete, measured.duration_s
    n_input = sum(one.prompt_tokens for one in complete)
    n_output = sum(one.output_tokens for one in complete)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    fields: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(complete),
        "failed": len(measured.outcomes) - len(complete),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "request_throughput": len(complete) * per_s,
        "request_goodput": None if slo is None else sum(keeps(one, slo) for one in complete) * per_s,
        "output_throughput": n_output * per_s,
        "total_token_throughput": (n_input + n_output) * per_s,
        "max_output_tokens_per_s": float(max(_events_a_second(complete), default=0)),
        "max_concurrent_requests": max(_alive_a_second(complete), default=0),
        "rtfx": 0.0,
    }
    for name, samples in latencies_ms(complete).items():
        fields.update(_statistics(name, samples))
    return fields


def _statistics(name: str, samples: Sequence[float]) -> dict[str, float]:
    values = np.asarray(samples or [0.0])
    return {
        f"mean_{name}_ms": float(values.mean()),
        f"median_{name}_ms": float(np.median(values)),
        f"std_{name}_ms": float(values.std()),
        **{f"p{rank}_{name}_ms": float(np.percentile(values, rank)) for rank in PERCENTILES},
    }


def keeps(outcome: Outcome, slo: Slo) -> bool:
    """Whether an answer is whole and every promise was kept; one token alone has no TPOT and keeps any."""
    return outcome.is_complete and all(kept_promises(outcome, slo).values())


def kept_promises(outcome: Outcome, slo: Slo) -> dict[str, bool]:
    """Which promises were kept; none by a request that failed."""
    found_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.latency_s}
    return {
        name: outcome.is_complete and 1e3 * found_s[name] <= most_ms
        for name, most_ms in slo.promises().items()
    }


def attainment(outcomes: Sequence[Outcome], slo: Slo) -> float:
    """Share of all requests, failed ones too, that kept every promise."""
    return sum(keeps(one, slo) for one in outcomes) / len(outcomes) if outcomes else 0.0


def attainment_by_scale(outcomes: Sequence[Outcome], slo: Slo) -> dict[float, float]:
    """Attainment of the promises made so many times as long (the paper's Fig. 9)."""
    return {scale: attainment(outcomes, slo.scaled(scale)) for scale in SCALES}


def is_kept(outcomes: Sequence[Outcome], slo: Slo, goal: float = GOAL) -> bool:
    """Whether each promise by itself was kept by `goal` of all requests: P90 of TTFT, and P90 of TPOT."""
    missed = Counter(name for one in outcomes for name, kept in kept_promises(one, slo).items() if not kept)
    most = most_missed(len(outcomes), goal)
    return bool(outcomes) and all(missed[name] <= most for name in slo.promises())


def most_missed(count: int, goal: float = GOAL) -> int:
    """How many of `count` requests may miss one promise."""
    return math.floor(count * (1 - goal) + 1e-9)


def failures(outcomes: Sequence[Outcome]) -> Mapping[str, int]:
    """How many of each kind, the commonest first."""
    return dict(Counter(one.failure.value for one in outcomes if one.failure is not None).most_common())


def _first_start_s(outcomes: Sequence[Outcome]) -> float:
    return min((one.start_s for one in outcomes), default=0.0)


def _events_a_second(outcomes: Sequence[Outcome]) -> list[int]:
    """Token events in each second since the first request was sent."""
    first_s = _first_start_s(outcomes)
    seconds: Counter[int] = Counter()
    for one in outcomes:
        at_s = one.start_s + one.ttft_s - first_s
        seconds[int(at_s)] += 1
        for gap_s in one.itls_s:
            at_s += gap_s
            seconds[int(at_s)] += 1
    return list(seconds.values())


def _alive_a_second(outcomes: Sequence[Outcome]) -> list[int]:
    """Requests that were under way in some part of each second."""
    first_s = _first_start_s(outcomes)
    seconds: Counter[int] = Counter()
    for one in outcomes:
        begin_s = one.start_s - first_s
        seconds.update(range(int(begin_s), int(begin_s + one.latency_s) + 1))
    return list(seconds.values())

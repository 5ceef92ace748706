"""Figures of a load from its outcomes, with the names and the meaning of vLLM's `bench serve`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from typing import Any

import numpy as np

from phasewise.tuner.config.slo import LatencyBounds


class FailureKind(StrEnum):
    """The reason that a request has no whole answer."""

    refused = "refused"
    """No connection could be made."""
    overloaded = "http_429"
    rejected = "http_4xx"
    broken_server = "http_5xx"
    broken_stream = "broken_stream"
    """The connection closed before the answer was finished."""
    garbage = "garbage"
    """The answer is not a stream of completions."""
    stream_error = "stream_error"
    """The server said in the stream that it failed."""
    timeout = "timeout"
    unfinished = "unfinished"
    """Cut off by this client: Ctrl-C."""


@dataclass(slots=True)
class RequestOutcome:
    """Instants of one request, in seconds; `start_s` on the run's clock, everything else after it.

    Tokens come as events; one event may bring several. `latency_s` ends with the last event of a choice, as
    in vLLM's benchmark.
    """

    start_s: float
    prompt_tokens: int
    output_tokens: int = 0
    ttft_s: float = 0.0
    latency_s: float = 0.0
    itls_s: list[float] = field(default_factory=list)
    failure: FailureKind | None = None
    error: str = ""
    retry_after_s: float | None = None
    cached_tokens: int | None = None
    """Tokens of the prompt that the server did not compute again; None: it does not say."""
    number: int = 0
    """Place of the request in its load."""

    @property
    def is_complete(self) -> bool:
        return self.failure is None

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None where the answer has only one token."""
        if self.output_tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.output_tokens - 1)


PERCENTILES = (50, 90, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")
GOAL = 0.9
"""Share of the requests that must keep a promise, e.g. P90 of TTFT (Sandwich, section 8)."""


@dataclass(frozen=True)
class Measured:
    """The outcomes of a load, and the CPU time of the client itself."""

    outcomes: Sequence[RequestOutcome]
    duration_s: float
    client_cpu_s: float

    @property
    def complete(self) -> list[RequestOutcome]:
        return [outcome for outcome in self.outcomes if outcome.is_complete]

    @property
    def client_cpu_share(self) -> float:
        """The client's CPU time over the duration, as a share of one core."""
        return self.client_cpu_s / self.duration_s if self.duration_s > 0 else 0.0


def latencies_ms(outcomes: Sequence[RequestOutcome]) -> dict[str, list[float]]:
    """Samples of every metric in milliseconds. TPOT needs two tokens; ITL pools the gaps of all requests."""
    return {
        "ttft": [1e3 * outcome.ttft_s for outcome in outcomes],
        "tpot": [1e3 * outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None],
        "itl": [1e3 * gap_s for outcome in outcomes for gap_s in outcome.itls_s],
        "e2el": [1e3 * outcome.latency_s for outcome in outcomes],
    }


def flat_result(measured: Measured, slo: LatencyBounds | None) -> dict[str, Any]:
    """The fields of vLLM's flat JSON. As in vLLM, a metric without samples is 0; so is rtfx (for speech)."""
    complete, duration_s = measured.complete, measured.duration_s
    n_input = sum(outcome.prompt_tokens for outcome in complete)
    n_output = sum(outcome.output_tokens for outcome in complete)
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    most_events, most_alive = _most_in_a_second(complete)
    fields: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(complete),
        "failed": len(measured.outcomes) - len(complete),
        "total_input_tokens": n_input,
        "total_output_tokens": n_output,
        "request_throughput": len(complete) * per_s,
        "request_goodput": None if slo is None else sum(keeps(outcome, slo) for outcome in complete) * per_s,
        "output_throughput": n_output * per_s,
        "total_token_throughput": (n_input + n_output) * per_s,
        "max_output_tokens_per_s": float(most_events),
        "max_concurrent_requests": most_alive,
        "rtfx": 0.0,
    }
    for name, samples in latencies_ms(complete).items():
        values = np.asarray(samples or [0.0])
        fields[f"mean_{name}_ms"] = float(values.mean())
        fields[f"median_{name}_ms"] = float(np.median(values))
        fields[f"std_{name}_ms"] = float(values.std())
        fields |= {f"p{rank}_{name}_ms": float(np.percentile(values, rank)) for rank in PERCENTILES}
    return fields


def keeps(outcome: RequestOutcome, slo: LatencyBounds) -> bool:
    """True if the answer is complete and within every bound. An answer of one token keeps any TPOT."""
    return outcome.is_complete and all(kept_promises(outcome, slo).values())


def kept_promises(outcome: RequestOutcome, slo: LatencyBounds) -> dict[str, bool]:
    """The bounds that a request kept; a failed request keeps none."""
    found_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.latency_s}
    return {name: outcome.is_complete and 1e3 * found_s[name] <= ms for name, ms in slo.named().items()}


def attainment(outcomes: Sequence[RequestOutcome], slo: LatencyBounds) -> float:
    """Share of all requests, failed ones too, that kept every promise."""
    return sum(keeps(outcome, slo) for outcome in outcomes) / len(outcomes) if outcomes else 0.0


def is_kept(outcomes: Sequence[RequestOutcome], slo: LatencyBounds) -> bool:
    """True if each promise by itself was kept by GOAL of all requests: P90 of TTFT, and P90 of TPOT."""
    kept = [kept_promises(outcome, slo) for outcome in outcomes]
    most = math.floor(len(outcomes) * (1 - GOAL) + 1e-9)
    return bool(kept) and all(sum(not each[name] for each in kept) <= most for name in slo.named())


def hit_rate(outcomes: Sequence[RequestOutcome]) -> float | None:
    """Part of the prompts' tokens that the server did not compute again; None where it does not say."""
    told = [outcome for outcome in outcomes if outcome.is_complete and outcome.cached_tokens is not None]
    n_tokens = sum(outcome.prompt_tokens for outcome in told)
    return sum(outcome.cached_tokens or 0 for outcome in told) / n_tokens if n_tokens else None


def failures(outcomes: Sequence[RequestOutcome]) -> Mapping[str, int]:
    """Failures by kind, the most frequent first."""
    kinds = Counter(outcome.failure.value for outcome in outcomes if outcome.failure is not None)
    return dict(kinds.most_common())


def _most_in_a_second(outcomes: Sequence[RequestOutcome]) -> tuple[int, int]:
    """The most token events, and the most requests in flight at some time, of a second since the first
    request was sent."""
    first_s = min((outcome.start_s for outcome in outcomes), default=0.0)
    events, alive = Counter[int](), Counter[int]()
    for outcome in outcomes:
        begin_s = outcome.start_s - first_s
        alive.update(range(int(begin_s), int(begin_s + outcome.latency_s) + 1))
        first_token_s = outcome.start_s + outcome.ttft_s - first_s
        events.update(int(at_s) for at_s in accumulate(outcome.itls_s, initial=first_token_s))
    return max(events.values(), default=0), max(alive.values(), default=0)

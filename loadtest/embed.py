"""A load of embedding requests against any server of /v1/embeddings: texts, figures, and WindVE's metric.

WindVE's metric is the highest concurrency at which every answer comes within the SLO: batches of C queries
at once, the next when all of the last are answered.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from phasewise.loadtest.client import LoadClient, LoadTestError, Target, open_client
from phasewise.loadtest.metrics import PERCENTILES, FailureKind, Measured
from phasewise.loadtest.prompts import words
from phasewise.loadtest.send import RequestLoad, RequestPace, run_load
from phasewise.tuner.config.lengths import RequestLengths

ROUNDS = 3
"""Times that each number of clients has to be answered within the SLO."""
Texts: TypeAlias = Callable[[int], list[str]]
"""Makes this many texts."""
Batches: TypeAlias = Sequence[Sequence[str]]
"""The texts of each request."""


def texts_of_lengths(lengths: Sequence[int], seed: int) -> list[str]:
    """Make one text for each length in words, from words that tokenizers know whole."""
    return [" ".join(words((seed, index), max(1, n))) for index, n in enumerate(lengths)]


def lengths_of(text: str, count: int, seed: int) -> list[int]:
    """Draw lengths in words from `75`, `20:120` (even), `lognormal:75:0.6` (median, sigma); LoadTestError."""
    rng = random.Random(seed)
    parts = text.split(":")
    try:
        if parts[0] == "lognormal" and len(parts) == 3:
            median, sigma = float(parts[1]), float(parts[2])
            return [max(1, round(rng.lognormvariate(math.log(median), sigma))) for _ in range(count)]
        low, high = (int(part) for part in (parts if len(parts) == 2 else [text, text]))
        lengths = [rng.randint(low, high) for _ in range(count)]
    except ValueError as error:
        forms = "75, 20:120 or lognormal:75:0.6"
        raise LoadTestError(f"lengths are written {forms}, not {text!r:.40}") from error
    if low < 1:
        raise LoadTestError(f"lengths below 1 in {text!r:.40}")
    return lengths


async def find_model(base: str, api_key: str | None) -> str:
    """The first model that the server lists. LoadTestError where it does not answer or lists none."""
    async with open_client(Target(base, api_key=api_key)) as client:
        cards = await client.models()
    if not cards:
        raise LoadTestError(f"{base}/v1/models lists no model: name one with --model")
    return str(cards[0]["id"])


async def send_batches(client: LoadClient, batches: Batches, pace: RequestPace, seed: int) -> Measured:
    """Send every batch once, at the pace. A refused client of a closed loop sends its next batch at once."""
    requests = (RequestLengths(1, 1),) * len(batches)
    load = RequestLoad(requests, pace, lambda index, _: batches[index], seed, heeds_refusals=False)
    return await run_load(client, load, asyncio.Event())


async def highest_concurrency(
    client: LoadClient, text: Texts, slo_s: float, report: Callable[[int, float], None]
) -> int:
    """Find the most concurrent queries that are all answered within the SLO in every round; 0: not even one.

    LoadTestError where a query alone fails, and not because the server is busy.
    """

    async def longest_s(concurrency: int) -> float:
        worst = 0.0
        for _ in range(ROUNDS):
            bodies = [client.target.body([query], 0) for query in text(concurrency)]
            outcomes = await asyncio.gather(*(client.send(body, 0) for body in bodies))
            failed = [outcome for outcome in outcomes if not outcome.is_complete]
            if failed and concurrency == 1 and failed[0].failure is not FailureKind.overloaded:
                raise LoadTestError(f"not even one query is answered: {failed[0].error}")
            if failed:
                return math.inf
            worst = max(worst, *(outcome.latency_s for outcome in outcomes))
            if worst > slo_s:
                break
        report(concurrency, worst)
        return worst

    low, high = 0, 1
    while await longest_s(high) <= slo_s:
        low, high = high, 2 * high
    while high - low > max(1, low // 50):  # within 2 % or one query
        middle = (low + high) // 2
        low, high = (middle, high) if await longest_s(middle) <= slo_s else (low, middle)
    return low


def figures(measured: Measured, batches: Batches, slo_s: float | None) -> dict[str, Any]:
    """Figures of an embedding load; latencies, and the share within the SLO, are of requests that were
    answered with vectors. `first_error`: of the first failed request, None where none failed."""
    good, seconds = measured.complete, measured.duration_s
    failed = [outcome for outcome in measured.outcomes if not outcome.is_complete]
    n_busy = sum(outcome.failure is FailureKind.overloaded for outcome in failed)
    latencies = sorted(1e3 * outcome.latency_s for outcome in good)
    per_s = 1 / seconds if seconds > 0 else 0.0
    within = None if slo_s is None or not good else sum(ms <= 1e3 * slo_s for ms in latencies) / len(good)
    errors = (each.error for each in failed if each.failure is not FailureKind.overloaded)
    return {
        "requests": len(measured.outcomes),
        "ok": len(good),
        "busy": n_busy,
        "failed": len(failed) - n_busy,
        "seconds": seconds,
        "texts_per_s": sum(len(batches[outcome.number]) for outcome in good) * per_s,
        "tokens_per_s": sum(outcome.prompt_tokens for outcome in good) * per_s,
        "latency_ms": {f"p{p}": latencies[len(good) * p // 100] if good else 0.0 for p in PERCENTILES},
        "within_slo": within,
        "first_error": next(errors, None),
    }

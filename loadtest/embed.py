"""A load of embedding requests against any server of /v1/embeddings: closed loop, open loop, and the paper's
metric.

WindVE's metric is the highest concurrency at which every answer comes within the SLO: batches of C queries
at once, the next when all of the last are answered.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from phasewise._json import read_json
from phasewise.loadtest.arrivals import RequestPace
from phasewise.loadtest.client import (
    CONNECT_S,
    KEEP_ALIVE_S,
    LoadTestError,
    Target,
    open_client,
    reason_in,
    why,
)

_WORDS = (
    *("time", "people", "way", "water", "day", "man", "world", "life", "hand", "part", "place", "week"),
    *("case", "point", "company", "number", "group", "problem", "fact", "year", "house", "room", "area"),
    *("money", "story", "month", "lot", "right", "study", "book", "eye", "job", "word", "business"),
)
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class EmbedTarget:
    """A server and what its requests have in common."""

    base: str
    model: str
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    encoding: str = "float"
    inputs_each: int = 1


@dataclass(frozen=True)
class EmbedOutcome:
    """One request, as its sender saw it. `status` 0: no answer. `error`: why it failed, else ""."""

    latency_s: float
    status: int
    tokens: int
    inputs: int
    error: str = ""


@dataclass(frozen=True)
class EmbedFigures:
    """The figures of a load. Latencies are those of answers with vectors."""

    requests: int
    ok: int
    busy: int
    failed: int
    seconds: float
    texts_per_s: float
    tokens_per_s: float
    latency_ms: dict[str, float]
    within_slo: float | None = None
    """Share of the answers with vectors that came within the SLO."""
    first_error: str | None = None
    """Why the first of those that failed did; None where none did."""


def texts_of_lengths(lengths: Sequence[int], seed: int) -> list[str]:
    """A text for each length in words, of words that tokenizers know whole."""
    rng = random.Random(seed)
    return [" ".join(rng.choice(_WORDS) for _ in range(max(1, n))) for n in lengths]


def lengths_of(text: str, count: int, seed: int) -> list[int]:
    """Words of each input: `75`, `20:120` (even) or `lognormal:75:0.6` (median, sigma), or LoadTestError."""
    rng = random.Random(seed)
    parts = text.split(":")
    try:
        if parts[0] == "lognormal" and len(parts) == 3:
            import math

            median, sigma = float(parts[1]), float(parts[2])
            lengths = [round(rng.lognormvariate(math.log(median), sigma)) for _ in range(count)]
        elif len(parts) == 2:
            lengths = [rng.randint(int(parts[0]), int(parts[1])) for _ in range(count)]
        else:
            lengths = [int(text)] * count
    except ValueError as error:
        raise LoadTestError(
            f"lengths are written 75, 20:120 or lognormal:75:0.6, not {text!r:.40}"
        ) from error
    if min(lengths) < 1 and parts[0] != "lognormal":
        raise LoadTestError(f"lengths below 1 in {text!r:.40}")
    return [max(1, length) for length in lengths]


class EmbedClient:
    """An open session with one server."""

    def __init__(self, session: aiohttp.ClientSession, target: EmbedTarget) -> None:
        self._session = session
        self.target = target

    async def send(self, texts: Sequence[str]) -> EmbedOutcome:
        """One request. Raises nothing but CancelledError."""
        body = {"model": self.target.model, "input": list(texts), "encoding_format": self.target.encoding}
        began = time.perf_counter()
        try:
            async with self._session.post(
                f"{self.target.base}/v1/embeddings",
                data=json.dumps(body).encode(),
                timeout=aiohttp.ClientTimeout(total=self.target.timeout_s, sock_connect=CONNECT_S),
            ) as response:
                raw = await response.read()
                tokens = _tokens_in(raw) if response.status == 200 else 0
                error = "" if response.status in (200, 429) else f"status {response.status}: {reason_in(raw)}"
                return EmbedOutcome(time.perf_counter() - began, response.status, tokens, len(texts), error)
        except (TimeoutError, OSError, aiohttp.ClientError) as error:
            return EmbedOutcome(time.perf_counter() - began, 0, 0, len(texts), why(error))


def _tokens_in(raw: bytes) -> int:
    """Count the prompt tokens by the answer's usage, at its beginning or end; no vector is parsed."""
    start = raw.rfind(b'"usage"')
    try:
        usage = read_json(raw[start + 8 : raw.index(b"}", start) + 1].decode()) if start >= 0 else {}
        return int(usage.get("prompt_tokens", 0))
    except (ValueError, AttributeError):
        return 0


async def with_client(target: EmbedTarget, use: Callable[[EmbedClient], Awaitable[Any]]) -> Any:
    """The result of `use` with an open client that has no limit on connections."""
    headers = {"Content-Type": "application/json"}
    if target.api_key:
        headers["Authorization"] = f"Bearer {target.api_key}"
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    async with aiohttp.ClientSession(connector=connector, headers=headers) as session:
        return await use(EmbedClient(session, target))


async def find_model(base: str, api_key: str | None) -> str:
    """The first model that the server lists. LoadTestError where it does not answer or lists none."""
    async with open_client(Target(base, api_key=api_key)) as client:
        cards = await client.models()
    if not cards or not isinstance(cards[0], dict) or "id" not in cards[0]:
        raise LoadTestError(f"{base}/v1/models lists no model: name one with --model")
    return str(cards[0]["id"])


async def closed_loop(
    client: EmbedClient, texts: Sequence[str], concurrency: int
) -> tuple[list[EmbedOutcome], float]:
    """Clients that each wait for their answer before they send again; seconds from first to last."""
    batches = _batches(texts, client.target.inputs_each)
    waiting = iter(batches)
    outcomes: list[EmbedOutcome] = []

    async def send_in_turn() -> None:
        for batch in waiting:
            outcomes.append(await client.send(batch))  # noqa: PERF401 (shared by all clients)

    began = time.perf_counter()
    await asyncio.gather(*(send_in_turn() for _ in range(concurrency)))
    return outcomes, time.perf_counter() - began


async def open_loop(
    client: EmbedClient, texts: Sequence[str], pace: RequestPace, seed: int
) -> tuple[list[EmbedOutcome], float]:
    """Requests at their instants, whatever the server does."""
    batches = _batches(texts, client.target.inputs_each)
    began = time.perf_counter()

    async def send_at(at_s: float, batch: Sequence[str]) -> EmbedOutcome:
        await asyncio.sleep(max(0.0, began + at_s - time.perf_counter()))
        return await client.send(batch)

    instants = pace.arrivals_s(len(batches), seed)
    outcomes = await asyncio.gather(
        *(send_at(instant_s, batch) for instant_s, batch in zip(instants, batches, strict=True))
    )
    return list(outcomes), time.perf_counter() - began


async def highest_concurrency(
    client: EmbedClient,
    text: Callable[[int], Sequence[str]],
    slo_s: float,
    rounds: int = 3,
    report: Callable[[int, float], None] = lambda _c, _s: None,
) -> int:
    """The most queries at once of which all are answered within the SLO in every round; 0: not even one.

    LoadTestError where a query alone fails, and not because the server is busy.
    """

    async def longest_s(concurrency: int) -> float:
        worst = 0.0
        for _ in range(rounds):
            outcomes = await asyncio.gather(*(client.send([query]) for query in text(concurrency)))
            error = next((outcome.error for outcome in outcomes if outcome.error), "")
            if error and concurrency == 1:
                raise LoadTestError(f"not even one query is answered: {error}")
            if any(outcome.status != 200 for outcome in outcomes):
                return float("inf")
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
        if await longest_s(middle) <= slo_s:
            low = middle
        else:
            high = middle
    return low


def figures(outcomes: Sequence[EmbedOutcome], seconds: float, slo_s: float | None = None) -> EmbedFigures:
    """Figures of a load that took `seconds`."""
    good = [outcome for outcome in outcomes if outcome.status == 200]
    latencies = sorted(1e3 * outcome.latency_s for outcome in good)
    return EmbedFigures(
        requests=len(outcomes),
        ok=len(good),
        busy=sum(outcome.status == 429 for outcome in outcomes),
        failed=sum(outcome.status not in (200, 429) for outcome in outcomes),
        seconds=seconds,
        texts_per_s=sum(outcome.inputs for outcome in good) / seconds if seconds > 0 else 0.0,
        tokens_per_s=sum(outcome.tokens for outcome in good) / seconds if seconds > 0 else 0.0,
        latency_ms={f"p{p}": _percentile(latencies, p) for p in PERCENTILES},
        within_slo=_share_within(good, slo_s),
        first_error=next((outcome.error for outcome in outcomes if outcome.error), None),
    )


def _share_within(good: Sequence[EmbedOutcome], slo_s: float | None) -> float | None:
    if slo_s is None or not good:
        return None
    return sum(outcome.latency_s <= slo_s for outcome in good) / len(good)


def _percentile(ordered: Sequence[float], percent: int) -> float:
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def _batches(texts: Sequence[str], each: int) -> list[Sequence[str]]:
    return [texts[start : start + each] for start in range(0, len(texts), each)]

"""How long /health takes while the server is as busy as clients can make it.

    python benchmarks/health.py http://127.0.0.1:8000 [--clients 32] [--seconds 20] [--hostile] [--key KEY]

`--clients` streams are kept going (short prompts, 256 tokens each), the next one as soon as one ends. With
--hostile others beside them send what costs the server most: bodies as large as it takes, and answers with
all the log-probabilities there are. Meanwhile a process of its own asks for /health every 10 ms on one
connection, and every 100 ms on a new one. Printed: median, p99 and the longest, in milliseconds.
Exit code 1 where the longest is over 50.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass

import aiohttp

LIMIT_MS = 50.0
TOKENS = 256


@dataclass(frozen=True)
class Target:
    """The server, and how it is asked."""

    url: str
    headers: dict[str, str]
    model: str = ""


async def load(target: Target, n_clients: int, until_s: float, hostile: bool) -> int:
    """Keep the server busy; how many answers were given to their end."""
    counts: Counter[int] = Counter()
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        target.url, headers=target.headers, timeout=timeout, connector=connector
    ) as session:
        bodies = [_story(target.model, index) for index in range(n_clients)]
        bodies += _hostile_bodies(target.model) if hostile else []
        clients = [asyncio.ensure_future(_post(session, body, counts)) for body in bodies]
        await asyncio.sleep(until_s - time.monotonic())
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        return counts[200]


def _story(model: str, index: int) -> bytes:
    prompt = f"Story number {index}: once upon a time"
    body = {"model": model, "prompt": prompt, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}
    return json.dumps(body).encode()


async def _post(session: aiohttp.ClientSession, body: bytes, counts: Counter[int]) -> None:
    while True:
        async with session.post("/v1/completions", data=body) as answer:
            async for _ in answer.content.iter_any():
                pass
            counts[answer.status] += 1


def _hostile_bodies(model: str) -> list[bytes]:
    fields: list[dict[str, object]] = [
        {"prompt": [1] * 1_990_000, "max_tokens": 1},
        {"prompt": "word " * 800_000, "max_tokens": 1},
        {"prompt": "a", "max_tokens": 512, "logprobs": 20, "n": 8, "ignore_eos": True},
    ]
    return [json.dumps({"model": model, **one}, separators=(",", ":")).encode() for one in fields]


def ask(target: Target, until_s: float, pipe: object) -> None:
    """In a process of its own: the load must not be what is measured."""
    pipe.send(asyncio.run(_ask(target, until_s)))  # type: ignore[attr-defined]


async def _ask(target: Target, until_s: float) -> dict[str, list[float]]:
    times_ms: dict[str, list[float]] = {"kept": [], "new": []}
    async with aiohttp.ClientSession(target.url, headers=target.headers) as kept:
        for turn in range(1 << 30):
            if time.monotonic() >= until_s:
                return times_ms
            times_ms["kept"].append(await _health_ms(kept))
            if turn % 10 == 0:
                async with aiohttp.ClientSession(target.url, headers=target.headers) as new:
                    times_ms["new"].append(await _health_ms(new))
            await asyncio.sleep(0.01)
    raise AssertionError


async def _health_ms(session: aiohttp.ClientSession) -> float:
    began_ns = time.perf_counter_ns()
    async with session.get("/health") as answer:
        await answer.read()
        answer.raise_for_status()
    return (time.perf_counter_ns() - began_ns) / 1e6


async def _served_model(target: Target) -> str:
    session = aiohttp.ClientSession(target.url, headers=target.headers)
    async with session, session.get("/v1/models") as answer:
        answer.raise_for_status()
        return str((await answer.json())["data"][0]["id"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--hostile", action="store_true")
    parser.add_argument("--key")
    options = parser.parse_args()
    headers = {"Authorization": f"Bearer {options.key}"} if options.key else {}
    target = Target(options.url, headers)
    target = Target(options.url, headers, asyncio.run(_served_model(target)))
    until_s = time.monotonic() + options.seconds
    receiving, sending = multiprocessing.Pipe(duplex=False)
    asking = multiprocessing.Process(target=ask, args=(target, until_s, sending))
    asking.start()
    n_whole = asyncio.run(load(target, options.clients, until_s, options.hostile))
    times_ms = receiving.recv()
    asking.join()
    print(f"{options.clients} streams, {n_whole} answers in {options.seconds:g} s")
    for name, values in times_ms.items():
        p99 = statistics.quantiles(values, n=100)[98]
        said = f"p50 {statistics.median(values):6.1f} ms  p99 {p99:6.1f} ms  longest {max(values):6.1f} ms"
        print(f"{name:5} n {len(values):5}  {said}")
    return int(max(max(values) for values in times_ms.values()) > LIMIT_MS)


if __name__ == "__main__":
    sys.exit(main())

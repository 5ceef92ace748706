"""Delay of the first token after idle time: while `serve --tune-idle` tuned in it, and without.

    python benchmarks/tune_idle.py
    python benchmarks/tune_idle.py MODEL.gguf --requests 40 --blocks 6

Blocks of requests alternate between a server of each kind, which is started anew, with a database of its
own that stays. Requests come after idle times of 2.2 to 2.8 s, longer than what tuning waits for, so that
each meets a process that has to be stopped first. As they stand, 42 requests of each kind in 5 minutes.

Intervals are of a bootstrap over requests, 95 %: of a P90, and of the ratio of both.
"""

from __future__ import annotations

import json
import random
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import MODEL, Model, Yielded, commands
from benchmarks.peers.servers import phasewise, running
from phasewise.kerneldb.store import open_store

IDLE_S = (2.2, 2.8)
CONTEXT = 512
THREADS = 2
PROMPT = "The quick brown fox jumps over the lazy dog. " * 6
ANSWER_TOKENS = 4
WARM_UPS = 2
RESAMPLES = 2000


def tune_idle(
    model: Model = MODEL,
    requests: Annotated[int, Option(help="of each block")] = 21,
    blocks: Annotated[int, Option(help="of each kind")] = 2,
) -> Yielded:
    kinds = {"--tune-idle": ("--tune-idle",), "without": ()}
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    dice = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        databases = {name: Path(folder) / f"{number}.db" for number, name in enumerate(kinds)}
        for block in range(blocks):
            for name in list(kinds) if block % 2 == 0 else [*kinds][::-1]:
                options = (*kinds[name], "--db", str(databases[name]))
                server = phasewise(model, "native", *options)
                with running(server, 1, CONTEXT, THREADS) as url:
                    own = _block(url, requests + WARM_UPS, dice)
                taken[name] += own[WARM_UPS:]
        with open_store(databases["--tune-idle"]) as store:
            n_timed = sum(count.verified for count in store.key_counts())
    drawn = {
        name: [_p90(dice.choices(times, k=len(times))) for _ in range(RESAMPLES)]
        for name, times in taken.items()
    }
    for name, times in taken.items():
        yield {
            "server": name,
            "requests": len(times),
            "first token, ms: median": statistics.median(times),
            "P90": _p90(times),
            "interval": "{:.0f} to {:.0f}".format(*_middle(drawn[name])),
            "most": max(times),
        }
    over, without = kinds
    low, high = _middle([a / b for a, b in zip(drawn[over], drawn[without], strict=True)])
    ratio = _p90(taken[over]) / _p90(taken[without])
    yield (
        f"P90 with over without: {ratio:.2f} ({low:.2f} to {high:.2f}); {n_timed} timings were taken in "
        "idle time"
    )


def _p90(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=10)[-1]


def _middle(drawn: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(drawn)
    return ordered[len(ordered) // 40], ordered[-len(ordered) // 40]


def _block(url: str, n_requests: int, dice: random.Random) -> list[float]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        name = json.load(answer)["data"][0]["id"]
    return [_first_token_ms(url, name, dice) for _ in range(n_requests)]


def _first_token_ms(url: str, model: str, dice: random.Random) -> float:
    """Of a prompt that no other one begins like."""
    time.sleep(dice.uniform(*IDLE_S))
    fields = {
        "model": model,
        "prompt": f"{dice.random()} {PROMPT}",
        "max_tokens": ANSWER_TOKENS,
        "stream": True,
    }
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(asked) as answer:
        answer.readline()
        first_s = time.monotonic() - began
        answer.read()
    return first_s * 1e3


app = commands(__doc__, tune_idle)

if __name__ == "__main__":
    app()

"""Two API keys on one server: what a small client waits for its first token beside a greedy one.

Each row draws a load for one key (long answers, long prompts, many small requests, streams that nobody reads,
all of them), keeps it up from a process of its own, and asks for short answers with the other key. The worst
first token beside the load must come within 2 s, or within 4 times the median alone, whichever is more.
A line for each row: `ok` or `FAIL`, and the times. Exit code 1 if anything failed.

    python -m tests.soak.fairness                                  # the default model
    python -m tests.soak.fairness --model tiny --quick             # the short form
    python -m tests.soak.fairness --only long_prompts
"""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator

from tests.soak import raw_http
from tests.soak.hostile_rows.siege import Asked, Siege, attacking
from tests.soak.row_runner import Missed, run_rows

LEAST_S = 2.0
RATIO = 4.0
KEYS = ("greedy", "small")
_SETTLE_S = 6.0
_RECEIVE_BYTES = 4096

Load = Iterator[tuple[int, int, bool]]
"""Words of the prompt, tokens of the answer, and whether it is read."""


def long_answers(draw: random.Random) -> Load:
    while True:
        yield draw.randint(5, 40), draw.randint(600, 1500), True


def long_prompts(draw: random.Random) -> Load:
    while True:
        yield draw.randint(1200, 2400), draw.randint(1, 32), True


def many_small(draw: random.Random) -> Load:
    while True:
        yield draw.randint(1, 20), draw.randint(1, 8), True


def never_read(draw: random.Random) -> Load:
    while True:
        yield draw.randint(5, 40), draw.randint(1000, 1500), False


def everything(draw: random.Random) -> Load:
    kinds = [kind(draw) for kind in (long_answers, long_prompts, many_small, never_read)]
    while True:
        yield next(draw.choice(kinds))


def attack(asked: Asked, kind: Callable[[random.Random], Load], n_streams: int) -> None:
    """Keep `n_streams` requests of the load in progress, for ever."""
    draw = random.Random(kind.__name__)
    load = kind(draw)

    async def stream() -> None:
        while True:
            n_words, n_tokens, is_read = next(load)
            words = " ".join(str(draw.randint(0, 9999)) for _ in range(n_words // 2))
            try:
                await _stream(asked, words, n_tokens, is_read=is_read)
            except (ConnectionError, OSError):
                await asyncio.sleep(0.1)

    async def all_of_them() -> None:
        await asyncio.gather(*(stream() for _ in range(n_streams)))

    asyncio.run(all_of_them())


async def _stream(asked: Asked, prompt: str, max_tokens: int, *, is_read: bool) -> None:
    connection = await raw_http.Connection.open(asked.port, None if is_read else _RECEIVE_BYTES)
    try:
        await connection.send("POST", "/v1/completions", _body(asked, prompt, max_tokens), asked.key)
        if not is_read:
            await asyncio.sleep(60)
            return
        status, headers = await connection.head()
        async for _ in connection.pieces(headers):
            pass
        if status != 200:
            await asyncio.sleep(0.1)
    finally:
        connection.abort()


def _body(asked: Asked, prompt: str, max_tokens: int) -> dict[str, object]:
    return {
        "model": asked.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }


def first_token_s(asked: Asked, prompt: str) -> float:
    """Seconds from sending a request to the first piece of its answer."""
    link = http.client.HTTPConnection("127.0.0.1", asked.port, timeout=120.0)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {asked.key}"}
    began = time.monotonic()
    try:
        link.request("POST", "/v1/completions", json.dumps(_body(asked, prompt, 8)), headers)
        answer = link.getresponse()
        if answer.status != 200:
            raise Missed(f"the small client got {answer.status}: {answer.read()[:200]!r}")
        while not answer.readline().startswith(b"data: "):
            pass
        took_s = time.monotonic() - began
        answer.read()
    finally:
        link.close()
    return took_s


def _count(asked: Asked, name: str) -> int:
    """One figure of /metrics."""
    _, text = asked.get("/metrics")
    return next(int(float(line.split()[1])) for line in text.splitlines() if line.startswith(name))


def row(kind: Callable[[random.Random], Load]) -> Callable[[Siege], str]:
    def tried(siege: Siege) -> str:
        with siege.server("--api-key", KEYS[0], "--api-key", KEYS[1]) as server:
            greedy, small = (siege.asked(server, key) for key in KEYS)
            n_asked = 10 if siege.quick else 30
            prompts = [f"{index} is a number, and the next one is" for index in range(n_asked)]
            first_token_s(small, "first")
            alone = [first_token_s(small, prompt) for prompt in prompts[:10]]
            with attacking(attack, greedy, kind, 48):
                time.sleep(_SETTLE_S)
                beside = []
                for prompt in prompts:
                    beside.append(first_token_s(small, prompt))
                    time.sleep(0.2)
            preempted = _count(small, "phasewise_preemptions_total")
        bound_s = max(LEAST_S, RATIO * statistics.median(alone))
        seen = (
            f"first token alone {statistics.median(alone):.3f} s; beside median "
            f"{statistics.median(beside):.3f} s, worst {max(beside):.3f} s of at most {bound_s:.2f} s; "
            f"answers gave way {preempted} times"
        )
        if max(beside) > bound_s:
            raise Missed(seen)
        return seen

    return tried


ROWS = {kind.__name__: row(kind) for kind in (long_answers, long_prompts, many_small, never_read, everything)}


def main() -> int:
    return run_rows(__doc__ or "", ROWS, Siege)


if __name__ == "__main__":
    sys.exit(main())

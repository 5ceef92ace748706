"""The time that /health takes while the server is as busy as clients can make it.

    python -m tests.soak.health http://127.0.0.1:8000 [--clients 32] [--seconds 20] [--hostile] [--key KEY]

`--clients` streams are kept going (short prompts, 256 tokens each), the next one as soon as one ends. With
--hostile others beside them send what costs the server most: bodies as large as it takes, and answers with
all the log-probabilities there are. Meanwhile a process of its own asks for /health every 10 ms on one
connection, and every 50 ms on a new one. It runs ahead of the load where it may (nice -20, which takes a
privilege), as a balancer on another machine would. Printed: median, p99 and the longest, in milliseconds,
from the request (of a new connection: from before it is opened) to the answer's last byte as the probe *saw*
it, and as *sent*: when the kernel had that byte, before the probe waited for a core of this machine.
Exit code 1 where the longest that the probe saw is over 50.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import multiprocessing
import os
import re
import socket
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp

LIMIT_MS = 50.0
TOKENS = 256
_AHEAD = -20
_PAUSE_S = 0.01
_TURNS_PER_NEW = 5
_MOST_BYTES = 1 << 16
_SO_TIMESTAMPNS = 35  # asm-generic/socket.h: recvmsg tells when the kernel had what it returns


@dataclass(frozen=True)
class Target:
    """The server, and how it is asked."""

    url: str
    headers: dict[str, str]
    model: str = ""


class Answered(NamedTuple):
    """One answer, in milliseconds from its request: as the probe saw it, and as the kernel had it."""

    seen_ms: float
    sent_ms: float


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
        {"prompt": [1] * 150_000, "max_tokens": 1},
        {"prompt": "word " * 800_000, "max_tokens": 1},
        {"prompt": "a", "max_tokens": 512, "logprobs": 20, "n": 8, "ignore_eos": True},
    ]
    return [json.dumps({"model": model, **field}, separators=(",", ":")).encode() for field in fields]


class Probe:
    """Asks for /health with blocking calls: little of this program is within what it measures."""

    def __init__(self, target: Target) -> None:
        url = urlsplit(target.url)
        self._address = (url.hostname or "127.0.0.1", url.port or 80)
        lines = ["GET /health HTTP/1.1", f"Host: {url.netloc}"]
        lines += [f"{name}: {value}" for name, value in target.headers.items()]
        self._request = "\r\n".join([*lines, "", ""]).encode()

    def connect(self) -> socket.socket:
        link = socket.create_connection(self._address)
        link.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        return link

    def kept(self, link: socket.socket) -> Answered:
        return self._asked(link, time.time_ns())

    def new(self) -> Answered:
        began_ns = time.time_ns()
        with self.connect() as link:
            return self._asked(link, began_ns)

    def _asked(self, link: socket.socket, began_ns: int) -> Answered:
        link.sendall(self._request)
        said, sent_ns = b"", began_ns
        while not _is_whole(said):
            part, control, _flags, _address = link.recvmsg(_MOST_BYTES, socket.CMSG_SPACE(16))
            if not part:
                raise ConnectionError("the server closed the connection before its answer was whole")
            said += part
            for level, kind, stamp in control:
                if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
                    seconds, nanoseconds = struct.unpack("qq", stamp)
                    sent_ns = seconds * 1_000_000_000 + nanoseconds
        if b" 200 " not in said.partition(b"\r\n")[0]:
            raise ConnectionError(f"/health answered {said[:80]!r}")
        return Answered((time.time_ns() - began_ns) / 1e6, (sent_ns - began_ns) / 1e6)


def _is_whole(said: bytes) -> bool:
    head, end, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    return bool(end and length) and len(body) >= int(length[1])


def ask(target: Target, until_s: float, pipe: Connection) -> None:
    """In a process of its own, ahead of the load: neither may be what is measured."""
    with contextlib.suppress(OSError):  # may it not, its own waiting for a core is within `seen`
        os.setpriority(os.PRIO_PROCESS, 0, _AHEAD)
    probe = Probe(target)
    answers: dict[str, list[Answered]] = {"kept": [], "new": []}
    with probe.connect() as link:
        for turn in itertools.count():
            if time.monotonic() >= until_s:
                break
            answers["kept"].append(probe.kept(link))
            if turn % _TURNS_PER_NEW == 0:
                answers["new"].append(probe.new())
            time.sleep(_PAUSE_S)
    pipe.send(answers)


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
    answers = receiving.recv()
    asking.join()
    print(f"{options.clients} streams, {n_whole} answers in {options.seconds:g} s")
    for name, asked in answers.items():
        print(f"{name:5} n {len(asked):5}  seen {_told([answer.seen_ms for answer in asked])}")
        print(f"{'':13}  sent {_told([answer.sent_ms for answer in asked])}")
    return int(max(answer.seen_ms for asked in answers.values() for answer in asked) > LIMIT_MS)


def _told(values: Sequence[float]) -> str:
    p99 = statistics.quantiles(values, n=100)[98]
    return f"p50 {statistics.median(values):6.1f} ms  p99 {p99:6.1f} ms  longest {max(values):6.1f} ms"


if __name__ == "__main__":
    sys.exit(main())

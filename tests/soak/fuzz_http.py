"""Raw bytes that are almost requests, against the fake engine behind the real server in its own process.

    python -m tests.soak.fuzz_http [--inputs 100000] [--seed 0]

Each input is a valid request, or several, changed in some places: bytes, lines, sizes of chunks, headers,
parts of other requests. It is sent in one to three pieces on a connection of its own, which the client then
half closes or resets, or on which it waits for the end. Exit code 0: no 5xx but 503, every connection ended,
the server answers as before, and neither its memory nor its descriptors grow beyond what a tenth of the run
took.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import multiprocessing
import os
import random
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support.servers.rude_clients import until

AT_ONCE = 64
END_S = 30.0
"""A connection that has not ended by then hangs; the server's own clocks are set to a second."""
GROWTH_MIB = 24.0
_STATUS = re.compile(rb"HTTP/1\.[01] ([0-9]{3}) ")

_BODY = b'{"model":"fake","prompt":"a","max_tokens":2,"temperature":0}'
_CHAT = b'{"model":"fake","messages":[{"role":"user","content":"hi"}],"max_tokens":2,"stream":true}'
_JSON = b"Host: localhost\r\nContent-Type: application/json\r\n"
_SIZED = b"POST /v1/completions HTTP/1.1\r\n" + _JSON + b"Content-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
_CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\n" + _JSON + b"Transfer-Encoding: chunked\r\n\r\n"
    b"20\r\n" + _CHAT[:32] + b"\r\n%x;x=y\r\n%b\r\n0\r\nX-Sum: 1\r\n\r\n" % (len(_CHAT) - 32, _CHAT[32:])
)
SEEDS = (
    b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\n" + _JSON + b"Content-Length: 2\r\n\r\n{}",
    b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost:80\r\n\r\n",
    _SIZED,
    _CHUNKED,
    _SIZED + b"GET /ready HTTP/1.1\r\nHost: localhost\r\n\r\n" + _CHUNKED,
)
PIECES = (
    *(b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b"\0", b":", b";", b"%00", b"\xff", b"\x16\x03\x01"),
    *(b"0\r\n\r\n", b"-1", b"+5", b"0x10", b"99999999999999999999", b"ffffffffffffffff\r\n", b"1\r\n,\r\n"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: gzip\r\n"),
    *(b"Host: evil\r\n", b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"HTTP/2.0", b"HTTP/1.0"),
    *(
        b"\r\n folded",
        b"a" * 9000,
        b"X: y\r\n" * 120,
        b"[" * 500,
        b"HEAD ",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ),
)


def mutated(rng: random.Random) -> bytes:
    """A valid request with up to six changes."""
    text = bytearray(rng.choice(SEEDS))
    for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 6))):
        start = rng.randrange(len(text) + 1)
        match rng.randrange(7):
            case 0:
                text[start:start] = rng.choice(PIECES)
            case 1:
                text[start : start + rng.randrange(1, 30)] = b""
            case 2:
                text[start : start + 1] = bytes([rng.randrange(256)])
            case 3:
                text[start : start + rng.randrange(8)] = rng.choice(PIECES)
            case 4:
                lines = bytes(text).split(b"\r\n")
                rng.shuffle(lines)
                text[:] = b"\r\n".join(lines)
            case 5:
                other = rng.choice(SEEDS)
                text[start:start] = other[rng.randrange(len(other)) :][: rng.randrange(1, 200)]
            case _:
                text[start:start] = text[start : start + rng.randrange(1, 100)] * rng.randrange(1, 20)
    return bytes(text)


@dataclass
class Outcome:
    """Counts of one run."""

    statuses: Counter[int] = field(default_factory=Counter)
    slowest_s: float = 0.0
    faults: list[str] = field(default_factory=list)


async def _send(port: int, text: bytes, rng: random.Random, outcome: Outcome) -> None:
    """One input on a connection of its own, to its end."""
    cuts = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(3)))
    end = rng.choice(("wait", "wait", "half", "reset"))
    began, said = time.monotonic(), b""
    try:
        async with asyncio.timeout(END_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.suppress(OSError):  # reset, or not connected any more
                for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
                    writer.write(text[start:stop])
                    await writer.drain()
                    if stop < len(text):
                        await asyncio.sleep(0)
                if end == "half":
                    writer.write_eof()
                if end != "reset":
                    said = await reader.read()
            writer.transport.abort()
    except TimeoutError:
        outcome.faults.append(f"no end within {END_S:g} s: {text!r}")
    statuses = [int(status) for status in _STATUS.findall(said)]
    outcome.statuses.update(statuses)
    if any(status >= 500 and status != 503 for status in statuses):
        outcome.faults.append(f"{statuses}: {text!r}")
    outcome.slowest_s = max(outcome.slowest_s, time.monotonic() - began)


async def _run(port: int, inputs: int, rng: random.Random, outcome: Outcome) -> None:
    left = iter(range(inputs))

    async def work() -> None:
        for _ in left:
            await _send(port, mutated(rng), rng, outcome)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


class _Surprises(logging.Handler):
    """Passes on the errors that the application logs: faults of ours, even if no client got to see a 500."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__(logging.ERROR)
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        raised = record.exc_info[1] if record.exc_info else None
        self._pipe.send(f"{record.getMessage().strip()}: {raised!r}")


def _serve(pipe: Connection) -> None:
    from phasewise.serving.http.http_settings import HttpLimits
    from tests.support.servers.fake_server import fake_server

    # Clocks as short as a test needs; a throttled connection must not be cut by them.
    limits = HttpLimits(header_s=1.0, body_s=1.0, keep_alive_s=0.2, max_body_bytes=1 << 20)
    logging.getLogger("phasewise.http").addHandler(_Surprises(pipe))
    with fake_server(limits) as server:
        pipe.send(server.url)
        pipe.recv()
        server.wait_until_idle()
    pipe.send(None)


def _held(pid: int) -> tuple[float, int]:
    """Resident MiB, descriptors."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd"))


def _answer(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=END_S) as link:
        link.sendall(request)
        said = b""
        while part := link.recv(65536):
            said += part
    return said


def _wait_for_ends(port: int) -> None:
    """Until the server holds no connection but this one; those that linger take their seconds."""
    until(lambda: b"\nphasewise_connections 1.0\n" in _answer(port, SEEDS[2]), "connections do not end")


def _is_well(port: int) -> bool:
    said = _answer(port, _SIZED.replace(b"Host", b"Connection: close\r\nHost", 1))
    return said.startswith(b"HTTP/1.1 200") and b'"text":"bc"' in said


def fuzz(inputs: int, seed: int) -> tuple[Outcome, str]:
    """The outcome of a run, with faults where something must not be; and a line of what was held."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    port = int(ours.recv().rsplit(":", 1)[1])
    assert server.pid is not None
    outcome, rng = Outcome(), random.Random(seed)
    try:
        asyncio.run(_run(port, inputs // 10, rng, outcome))  # memory is first used
        _wait_for_ends(port)
        before_mib, before_fds = _held(server.pid)
        asyncio.run(_run(port, inputs - inputs // 10, rng, outcome))
        _wait_for_ends(port)
        mib, fds = _held(server.pid)
        if not _is_well(port):
            outcome.faults.append("a valid request is not answered as before")
        if mib > before_mib + GROWTH_MIB:
            outcome.faults.append(f"memory grew from {before_mib:.0f} to {mib:.0f} MiB")
        if fds > before_fds:
            outcome.faults.append(f"{fds} descriptors are open, {before_fds} were")
        ours.send(None)
        while ours.poll(30):
            surprise = ours.recv()
            if surprise is None:
                break
            outcome.faults.append(surprise)
        else:
            outcome.faults.append("the engine is not idle afterwards")
    finally:
        server.kill()
        server.join()
    return outcome, f"memory {before_mib:.0f} -> {mib:.0f} MiB, descriptors {before_fds} -> {fds}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args(arguments)
    began = time.monotonic()
    outcome, held = fuzz(asked.inputs, asked.seed)
    counts = ", ".join(f"{status}: {n}" for status, n in sorted(outcome.statuses.items()))
    print(f"{asked.inputs} inputs in {time.monotonic() - began:.0f} s, seed {asked.seed}: {counts}")
    print(f"slowest connection {outcome.slowest_s:.1f} s; {held}")
    for fault in outcome.faults[:20]:
        print(f"FAULT {fault[:600]}")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())

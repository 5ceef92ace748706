"""Rows 3, 4, 9 and 10: what a connection may take before anybody knows who sends, and what is no request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Awaitable, Callable

import aiohttp
import httpx

from tests.soak.hostile_rows.siege import Siege
from tests.soak.row_runner import Missed

KEY = "the-key"
MIB = 1 << 20
_CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
_TINY_CHUNKS = b"1\r\n,\r\n" * 512
_FLOOD_BYTES_S = 300_000


def tiny_chunks(siege: Siege) -> str:
    """16 connections send bodies in chunks of one byte, 300 KB/s together: without a key, then where none is
    asked for."""
    seen = []
    for arguments, key in ((("--api-key", KEY), KEY), ((), None)):
        with siege.server(*arguments) as server:
            client = siege.asked(server, key)
            whole = client.complete(max_tokens=60)  # as in the report
            if whole[0] != 200:
                raise Missed(f"{whole}")
            line = siege.under_attack(
                server, _send, server.port, _CHUNKED, _TINY_CHUNKS, 16, well_behaved=client.complete
            )
            seen.append(f"{'keys' if key else 'no keys'}: {line}")
    return "; ".join(seen)


def pipelined_requests(siege: Siege) -> str:
    """Pipelined small requests at the same bytes a second, refused or answered, delay no other client. The
    answer of /metrics takes the server many times as long as that of /health."""
    seen = []
    for path, key in ((b"/v1/models", KEY), (b"/health", KEY), (b"/metrics", None)):
        request = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path
        with siege.server(*(("--api-key", KEY) if key else ())) as server:
            client = siege.asked(server, key)
            line = siege.under_attack(
                server, _send, server.port, b"", request * 64, 16, well_behaved=client.complete
            )
            seen.append(f"{path.decode()}: {line}")
    return "; ".join(seen)


def unfinished_bodies(siege: Siege) -> str:
    """200 bodies of 4 MiB that never end: memory stays within --max-unfinished, and comes back."""
    n_senders = 60 if siege.quick else 200
    with siege.server("--max-unfinished", "64M") as server:
        client = siege.asked(server)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (4 * MIB)
        for _ in range(5):  # an engine that has answered holds more of its model in memory
            client.complete()
        before_mib = server.rss_mib()
        most_mib = [0.0]
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.05):
                most_mib[0] = max(most_mib[0], server.rss_mib())

        looking = threading.Thread(target=look)
        looking.start()
        try:
            line = siege.under_attack(
                server,
                _hold,
                server.port,
                head + b"," * (4 * MIB - 1),
                n_senders,
                well_behaved=client.complete,
            )
        finally:
            over.set()
            looking.join()
        grown_mib = most_mib[0] - before_mib
        if grown_mib > 64 + 100:
            raise Missed(f"{n_senders} unfinished bodies took {grown_mib:.0f} MiB at most: {line}")
        return f"at most {grown_mib:+.0f} MiB meanwhile; {line}"


def other_origins(siege: Siege) -> str:
    """What a page in a browser can send to a server on loopback: another Host, or text/plain."""
    with siege.server() as server:
        client = siege.asked(server)
        body = b'{"model":"%s","prompt":"a","max_tokens":1}' % client.model.encode()
        tried = {
            b"Host: evil.example\r\nContent-Type: application/json": 421,
            b"Host: localhost.evil.example\r\nContent-Type: application/json": 421,
            b"Host: localhost\r\nOrigin: http://evil.example\r\nContent-Type: text/plain": 415,
            b"Host: localhost\r\nOrigin: http://evil.example": 415,
            b"Host: localhost\r\nContent-Type: application/x-www-form-urlencoded": 415,
            b"Host: localhost\r\nContent-Type: application/json": 200,
        }
        for headers, wanted in tried.items():
            head = b"POST /v1/completions HTTP/1.1\r\nConnection: close\r\n%b\r\nContent-Length: %d\r\n\r\n"
            got = _status(server.port, head % (headers, len(body)) + body)
            if got != wanted:
                raise Missed(f"{headers!r} got {got}, not {wanted}")
        return f"{len(tried)} requests answered as they should be"


def ambiguous_requests(siege: Siege) -> str:
    """What two readers of HTTP could read differently is refused, and its connection ends."""
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    tried = {
        post + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n": 400,
        b"GET /health HTTP/1.1\nHost: localhost\n\n": 400,
        b"GET /health HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n": 400,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n": 400,
        b"GET /" + b"a" * 60_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n": 414,
        b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 3000 + b"\r\n": 431,
    }
    with siege.server() as server:
        for sent, wanted in tried.items():
            # Whatever follows on the connection must not be taken for a request of its own.
            got = _status(server.port, sent + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if got != wanted:
                raise Missed(f"{sent[:80]!r} got {got}, not {wanted}")
        return f"{len(tried)} requests refused, connections closed"


def connections_too_many(siege: Siege) -> str:
    """A server that is full: each client reads the 503 that is documented, 20 of 20, small body or large."""
    found = {}
    with siege.server("--max-connections", "8") as server:
        url = f"http://127.0.0.1:{server.port}/v1/completions"
        for name, ask in {"httpx": _by_httpx, "aiohttp": _by_aiohttp, "Node": _by_node}.items():
            if name == "Node" and shutil.which("node") is None:
                continue
            for size, body in (("no", b""), ("small", b"{}"), ("large", b"x" * (3 * MIB))):
                with contextlib.ExitStack() as stack:  # none of them stays for long without a request
                    for _ in range(8):
                        stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
                    server.wait_until(lambda: httpx.get(url).status_code == 503, 10.0, "it is not full")
                    found[f"{name}, {size} body"] = ask(url, body)
    missed = {name: seen for name, seen in found.items() if seen != [503] * 20}
    if missed:
        raise Missed(f"{missed}")
    return f"503, 20 of 20: {'; '.join(found)}"


def _by_httpx(url: str, body: bytes) -> list[object]:
    return [httpx.post(url, content=body).status_code for _ in range(20)]


def _by_aiohttp(url: str, body: bytes) -> list[object]:
    async def one(session: aiohttp.ClientSession) -> int:
        async with session.post(url, data=body) as said:
            await said.read()
            return said.status

    async def all_at_once() -> list[object]:
        async with aiohttp.ClientSession() as session:
            return list(await asyncio.gather(*(one(session) for _ in range(20))))

    return asyncio.run(all_at_once())


def _by_node(url: str, body: bytes) -> list[object]:
    script = (
        "const body = Buffer.alloc(Number(process.argv[2]), 'x'); (async () => { const found = [];"
        "for (let i = 0; i < 20; i++) found.push(await fetch(process.argv[1], {method: 'POST', body}).then("
        "async (said) => { await said.text(); return said.status; }, (error) => String(error.cause)));"
        "console.log(JSON.stringify(found)); })();"
    )
    done = subprocess.run(
        ["node", "-e", script, url, str(len(body))], capture_output=True, text=True, timeout=120, check=True
    )
    found: list[object] = json.loads(done.stdout)
    return found


def broken_chunks(siege: Siege) -> str:
    """A chunk that is none is answered 400, and counted and logged as 400."""
    log = siege.folder / "access.log"
    with siege.server("--access-log", str(log)) as server:
        for broken in (b"zz\r\n", b"3\r\nhello\r\n", b"5\nhello\n"):
            if (got := _status(server.port, _CHUNKED + broken)) != 400:
                raise Missed(f"{broken!r} got {got}")
        counted = {name: n for name, n in server.metrics().items() if "http_responses_total" in name and n}
        server.wait_until(lambda: log.read_text().count(" 400 ") == 3, 10.0, f"the log: {log.read_text()}")
    if any('status="500"' in name for name in counted) or not any('status="400"' in name for name in counted):
        raise Missed(f"counted as {counted}")
    return "three of them: 400 to the client, in the metrics and in the log"


def _status(port: int, sent: bytes) -> int:
    """Status of the one answer on a connection, which must end after it."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as link:
        with contextlib.suppress(ConnectionError):
            link.sendall(sent)
        said = b""
        with contextlib.suppress(ConnectionResetError):
            while part := link.recv(65536):
                said += part
    n_answers = len(re.findall(rb"HTTP/1.1 [0-9]", said))
    if n_answers != 1:
        raise Missed(f"{n_answers} answers to one request: {said[:200]!r}")
    return int(said.split()[1])


# ---- attacks; each runs in a process of its own until it is killed ----------------------------------------
#
# One thread for all connections: with a thread for each, hundreds of them would wait for a core of this
# machine beside the server's few, which no sender on another machine can do.


def _send(port: int, opening: bytes, repeated: bytes, n_connections: int) -> None:
    """`repeated` again and again on each connection, 300 KB/s together; a closed one is opened anew."""
    pause_s = len(repeated) * n_connections / _FLOOD_BYTES_S

    async def send(link: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        await loop.sock_sendall(link, opening)
        while True:
            with contextlib.suppress(BlockingIOError):
                link.send(repeated)
            with contextlib.suppress(BlockingIOError):
                while said := link.recv(65536):
                    pass
                if not said:
                    return
            await asyncio.sleep(pause_s)

    asyncio.run(_connections(port, send, n_connections, pause_s))


def _hold(port: int, sent: bytes, n_connections: int) -> None:
    """Each sends its body but the end, and waits; a closed one is opened anew after a second."""

    async def hold(link: socket.socket, loop: asyncio.AbstractEventLoop) -> None:
        await loop.sock_sendall(link, sent)
        await loop.sock_recv(link, 1)

    asyncio.run(_connections(port, hold, n_connections, 1.0))


async def _connections(
    port: int,
    use: Callable[[socket.socket, asyncio.AbstractEventLoop], Awaitable[None]],
    n_connections: int,
    pause_s: float,
) -> None:
    """Use `n_connections` at a time; one that ends is opened anew after `pause_s` seconds."""
    loop = asyncio.get_running_loop()

    async def one() -> None:
        while True:
            with contextlib.suppress(OSError), socket.socket() as link:
                link.setblocking(False)
                await loop.sock_connect(link, ("127.0.0.1", port))
                await use(link, loop)
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(one() for _ in range(n_connections)))

"""Rows 3 and 4: what a connection may take before anybody knows who sends."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable

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
    """200 bodies of 4 MiB that never end: memory stays within max_unfinished, and comes back."""
    n_senders = 60 if siege.quick else 200
    with siege.server(environment={"PHASEWISE_MAX_UNFINISHED": "64M"}) as server:
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

    async def client() -> None:
        while True:
            with contextlib.suppress(OSError), socket.socket() as link:
                link.setblocking(False)
                await loop.sock_connect(link, ("127.0.0.1", port))
                await use(link, loop)
            await asyncio.sleep(pause_s)

    await asyncio.gather(*(client() for _ in range(n_connections)))

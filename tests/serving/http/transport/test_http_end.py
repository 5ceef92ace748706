"""A server's end, whatever state its connections are in: nothing raises, and what is owed is sent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport.listening import tls_context
from tests.support.servers.bare_server import bare_server
from tests.support.servers.rude_clients import ENOUGH_S, connect, read_to_end, until
from tests.support.tiers import examples

TLS = Path(__file__).parents[3] / "data" / "tls"
LARGE_BYTES = 3 << 20
"""More than the kernel's buffers of both ends hold."""
SMALL_BYTES = 5


class Application(Starlette):
    """GET /N/M answers N bytes in M pieces; GET /last answers once the server ends."""

    def __init__(self) -> None:
        super().__init__()
        self.n_begun = 0
        self.loop: asyncio.AbstractEventLoop | None = None
        self._ends: asyncio.Event | None = None

    n_live = n_answers = 0

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._ends = loop, asyncio.Event()

    def end_everything(self) -> None:
        assert self._ends is not None
        self._ends.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.n_begun += 1
        if scope["method"] == "POST":
            while (await receive())["type"] != "http.disconnect":
                pass
            return
        n_bytes, n_pieces = SMALL_BYTES, 1
        if scope["path"] == "/last":
            assert self._ends is not None
            await self._ends.wait()
        else:
            n_bytes, n_pieces = map(int, scope["path"].split("/")[1:])
        headers = [(b"content-length", b"%d" % n_bytes)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in range(n_pieces):
            part = b"x" * (n_bytes * (piece + 1) // n_pieces - n_bytes * piece // n_pieces)
            await send({"type": "http.response.body", "body": part, "more_body": piece + 1 < n_pieces})


def get(path: str, *headers: str) -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", "Host: a", *headers, "", ""]).encode()


CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303")


class State(NamedTuple):
    """The conduct of a client before the server ends. `n_asked`: its requests that the application sees."""

    name: str
    sent: bytes = b""
    then: Callable[[socket.socket], object] = lambda _link: None
    n_asked: int = 0
    n_owed: int | None = None
    """Bytes of the body that it has yet to read; None: nothing is owed."""
    shakes_hands: bool = True
    """False: it goes no further than TCP."""


def read_answer(link: socket.socket) -> None:
    said = b""
    while not said.endswith(b"\r\n\r\n" + b"x" * SMALL_BYTES):
        said += link.recv(4096)


def leave(link: socket.socket) -> None:
    """Close one half of TCP, below TLS."""
    read_answer(link)
    socket.socket.shutdown(link, socket.SHUT_WR)


def reset(link: socket.socket) -> None:
    read_answer(link)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    link.close()


SMALL, LARGE = get(f"/{SMALL_BYTES}/1"), get(f"/{LARGE_BYTES}/1")
PIECES = get(f"/{LARGE_BYTES}/64")
HALF_BODY = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n1234"
STATES = (
    State("no handshake", shakes_hands=False),
    State("half a handshake", CLIENT_HELLO, shakes_hands=False),
    State("no TLS", b"GET / HTTP/1.1\r\n", shakes_hands=False),
    State("silent"),
    State("half a head", SMALL[:10]),
    State("half a body", HALF_BODY, n_asked=1),
    State("idle", SMALL, read_answer, n_asked=1),
    State("left", SMALL, leave, n_asked=1),
    State("left in mid-answer", LARGE, lambda link: link.close(), n_asked=1),
    State("aborted", SMALL, reset, n_asked=1),
    State(
        "closing, answer unread", get(f"/{SMALL_BYTES}/1", "Connection: close"), n_asked=1, n_owed=SMALL_BYTES
    ),
    State(
        "closing, large answer unread",
        get(f"/{LARGE_BYTES}/1", "Connection: close"),
        n_asked=1,
        n_owed=LARGE_BYTES,
    ),
    State("answer unread", SMALL, n_asked=1, n_owed=SMALL_BYTES),
    State("large answer unread", LARGE, n_asked=1, n_owed=LARGE_BYTES),
    State("large answer in pieces unread", PIECES, n_asked=1, n_owed=LARGE_BYTES),
    State("another request unread", get("/last") + SMALL, n_asked=1, n_owed=SMALL_BYTES),
    State("in progress", get("/last"), n_asked=1, n_owed=SMALL_BYTES),
)


class Ending(contextlib.ExitStack):
    """A server whose end may wait for ever, and its clients. It must not fail (see `bare_server`)."""

    def __init__(self, is_tls: bool, **limits: Any) -> None:
        super().__init__()
        self.app = Application()
        self._is_tls = is_tls
        self._trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
        context = tls_context(TLS / "cert.pem", TLS / "key.pem") if is_tls else None
        patient = HttpLimits(drain_s=ENOUGH_S, stalled_write_s=ENOUGH_S, header_s=ENOUGH_S, **limits)
        self.server = self.enter_context(bare_server(self.app, patient, tls=context, client=self.app))

    def connect(self, *, shakes_hands: bool = True) -> socket.socket:
        raw = self.enter_context(connect(self.server.url, receive_bytes=16 << 10))
        if not (self._is_tls and shakes_hands):
            return raw
        return self.enter_context(self._trusting.wrap_socket(raw, server_hostname="localhost"))

    def begin_tls(self, raw: socket.socket) -> ssl.SSLSocket:
        """Its handshake is the caller's."""
        link = self._trusting.wrap_socket(raw, server_hostname="localhost", do_handshake_on_connect=False)
        return self.enter_context(link)


def assert_owed(said: bytes, n_bytes: int, why: object) -> None:
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), why
    assert len(body) == n_bytes, why


TLS_OR_NOT = pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])


@TLS_OR_NOT
@given(states=st.lists(st.sampled_from(STATES), min_size=1, max_size=6))
@examples(100)
def test_nothing_raises_and_what_is_owed_is_sent(is_tls: bool, states: list[State]) -> None:
    with Ending(is_tls) as ending:
        links = [ending.connect(shakes_hands=state.shakes_hands) for state in states]
        for state, link in zip(states, links, strict=True):
            link.sendall(state.sent)
            state.then(link)
        n_asked = sum(state.n_asked for state in states)
        until(lambda: ending.app.n_begun >= n_asked, "the requests have not come")

        ending.server.end()

        for state, link in zip(states, links, strict=True):
            if state.n_owed is not None:
                assert_owed(read_to_end(link), state.n_owed, state)
        ending.server.join()


@TLS_OR_NOT
@given(n_kib=st.integers(300, 1000))
@examples(50)
def test_an_answer_that_the_kernel_holds_in_part_is_sent_whole(is_tls: bool, n_kib: int) -> None:
    """The rest lies in a buffer of the process, however little it is."""
    with Ending(is_tls) as ending:
        links = [ending.connect() for _ in range(4)]
        for link in links:
            link.sendall(get(f"/{n_kib << 10}/1"))
        until(lambda: ending.app.n_begun == len(links), "the requests have not come")

        ending.server.end()

        for link in links:
            assert_owed(read_to_end(link), n_kib << 10, n_kib)


@TLS_OR_NOT
@pytest.mark.parametrize("sent", [b"", SMALL[:10]], ids=["silent", "half a head"])
def test_a_connection_too_many_reads_its_refusal(is_tls: bool, sent: bytes) -> None:
    with Ending(is_tls, max_connections=1) as ending:
        held, too_many = ending.connect(), ending.connect()
        held.sendall(SMALL)
        read_answer(held)
        too_many.sendall(sent)
        until(lambda: len(ending.server.connections.turned_away) == 1, "it was not turned away")

        ending.server.end()

        assert read_to_end(too_many).startswith(b"HTTP/1.1 503")


N_TURNS = 16
"""Turns of the event loop: more than a connection takes from its accept to the end of its handshake."""


class Latecomer:
    """A client that connects on the server's own loop, and goes on once in each turn of it. The server is
    ended in the turn `ends_in`."""

    def __init__(self, ending: Ending, ends_in: int, *, shakes_hands: bool) -> None:
        self._ending, self._ends_in, self._shakes_hands = ending, ends_in, shakes_hands
        assert ending.app.loop is not None
        self._loop = ending.app.loop
        self._loop.call_soon_threadsafe(self._connect)

    def _connect(self) -> None:
        self.link = self._ending.connect(shakes_hands=False)
        self.link.setblocking(False)
        if self._shakes_hands:
            self.link = self._ending.begin_tls(self.link)
        self._go_on(0)

    def _go_on(self, turn: int) -> None:
        if isinstance(self.link, ssl.SSLSocket):
            with contextlib.suppress(OSError):  # it has to wait, or has been closed
                self.link.do_handshake()
        if turn == self._ends_in:
            self._ending.server.server.end()
        if turn < N_TURNS:
            self._loop.call_soon(self._go_on, turn + 1)

    def read_to_end(self) -> None:
        """Return once the server's end of TCP is closed."""
        with socket.socket(fileno=self.link.detach()) as raw:
            raw.settimeout(ENOUGH_S)
            read_to_end(raw)


@pytest.mark.parametrize(
    ("is_tls", "shakes_hands"),
    [(False, False), (True, False), (True, True)],
    ids=["plain", "tls, silent", "tls, handshake"],
)
@pytest.mark.parametrize("ends_in", range(N_TURNS))
def test_a_connection_that_comes_as_the_server_ends_is_not_held(
    is_tls: bool, shakes_hands: bool, ends_in: int
) -> None:
    """Whatever the turn of the event loop is in which asyncio accepts it and tells of it."""
    with Ending(is_tls) as ending:
        late = Latecomer(ending, ends_in, shakes_hands=shakes_hands)
        ending.server.join()
        late.read_to_end()

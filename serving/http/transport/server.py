"""Runs the application: the listening socket, signals, and an orderly end that clients are told of."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Literal, Protocol

from starlette.types import ASGIApp

from phasewise._words import number
from phasewise.serving.engine.engine_host import EngineState
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport.connection import Connection, Connections
from phasewise.serving.http.transport.listening import BACKLOG, Address

ServiceState = Literal["starting", "running", "replacing", "lost", "draining"]

_SAYS = {"starting": "the server is starting", "lost": "the engine has stopped; restart the server"}


class Computes(Protocol):
    """The part of a server that computes answers: the engine's thread, or the embedding workers."""

    @property
    def state(self) -> EngineState: ...
    @property
    def is_alive(self) -> bool: ...


class Lifecycle:
    """The state of one server from start to drain. `engine` must have been started."""

    def __init__(self, engine: Computes) -> None:
        self._engine = engine
        self._ends_at_s: float | None = None

    @property
    def state(self) -> ServiceState:
        return self._engine_state if self._ends_at_s is None else "draining"

    @property
    def is_draining(self) -> bool:
        return self._ends_at_s is not None

    @property
    def is_ready(self) -> bool:
        """True if new requests should be sent to this server."""
        return self.state == "running"

    @property
    def is_healthy(self) -> bool:
        """False once the engine has stopped for good, so that only a restart helps."""
        return self._engine_state != "lost"

    @property
    def _engine_state(self) -> EngineState:
        return self._engine.state if self._engine.is_alive else "lost"

    def drain(self, within_s: float) -> None:
        """Refuse new requests from now on; answers in progress have `within_s` seconds."""
        self._ends_at_s = time.monotonic() + within_s

    def refuse_unless_open(self) -> None:
        """Raise ApiError while requests are refused; while ranks are replaced, requests wait instead."""
        if self._ends_at_s is not None:
            left_s = math.ceil(max(1.0, self._ends_at_s - time.monotonic()))
            raise ApiError(
                503,
                "the server is stopping and takes no new requests",
                code="server_stopping",
                retry_after_s=left_s,
                closes=True,
            )
        state = self._engine_state
        if (says := _SAYS.get(state)) is not None:
            code = "server_starting" if state == "starting" else "engine_stopped"
            raise ApiError(503, says, code=code)


_LAST_WORDS_S = 0.5
_LOOK_EVERY_S = 0.02
_CANCEL_AFTER_S = 0.1
"""Seconds for which the application's tasks may run on after all connections were aborted."""
_ACCEPTED_AT_ONCE = 32
"""Most connections accepted before the loop does anything else: each takes some 0.1 ms."""


class Clients(Protocol):
    """The requests in progress, as the server's start and end see them."""

    @property
    def n_live(self) -> int: ...
    @property
    def n_answers(self) -> int: ...
    def attach(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def end_everything(self) -> None: ...


@dataclass(frozen=True)
class Service:
    """The parts of one server. `on_hangup`: handles SIGHUP; None: SIGHUP ends the server, unless ignored."""

    app: ASGIApp
    clients: Sequence[Clients]
    """The clients of all that computes: generation, embeddings."""
    life: Lifecycle
    connections: Connections
    report: Callable[[str], None]
    on_hangup: Callable[[], None] | None = None
    on_start: Callable[[], None] = lambda: None
    """Called on the loop once clients may connect."""

    @property
    def limits(self) -> HttpLimits:
        return self.connections.limits


class HttpServer:
    """Serves until SIGINT, SIGTERM or `end`. Then readiness is false at once and new requests get 503, while
    answers in progress have `drain_s`, or until a second signal. `report`: takes a line at start and end."""

    def __init__(self, service: Service, address: Address, tls: ssl.SSLContext | None = None) -> None:
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # warns of every client that left in mid-stream
        self.started = False
        """True once clients may connect."""
        self.has_ended = False
        """True once all connections are closed."""
        self._service = service
        self._address = address
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._ends_at_start = False
        self._until_s = 0.0
        """Time at which waiting for answers ends, on `time.monotonic`."""

    def end(self, *, at_once: bool = False) -> None:
        """End the server as a signal does; may be called from any thread. `at_once`: as two signals do."""
        if self._loop is None:
            self._ends_at_start = True
            return
        with suppress(RuntimeError):  # the loop has closed: it has ended
            self._loop.call_soon_threadsafe(self._end, at_once)

    def run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        with self._answering_signals(self._loop):
            for client in self._service.clients:
                client.attach(self._loop)
            listening = await self._listen(self._loop)
            self.started = True
            self._service.report(f"listening on {self._address.url}")
            self._service.on_start()
            if self._ends_at_start:
                self._end(at_once=True)
            await self._stopping.wait()
            await self._end_in_peace(listening)

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> asyncio.Server:
        service, listener = self._service, self._address.listen()
        listening = await loop.create_server(
            lambda: Connection(service.app, service.connections),
            sock=listener,
            ssl=self._tls,
            backlog=_ACCEPTED_AT_ONCE,
            ssl_handshake_timeout=service.limits.header_s if self._tls else None,
        )
        listener.listen(BACKLOG)  # asyncio has made it as short as what it accepts at once
        return listening

    @contextmanager
    def _answering_signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers: dict[signal.Signals, Callable[[], None]] = {SIGINT: self._end, SIGTERM: self._end}
        if self._service.on_hangup is not None:
            handlers[SIGHUP] = self._service.on_hangup
        elif signal.getsignal(SIGHUP) is not signal.SIG_IGN:  # under nohup it is, and stays so
            handlers[SIGHUP] = self._hang_up
        for signal_number, handler in handlers.items():
            loop.add_signal_handler(signal_number, handler)
        try:
            yield
        finally:
            for signal_number in handlers:
                loop.remove_signal_handler(signal_number)
                signal.signal(
                    signal_number, signal.SIG_IGN
                )  # one more must not break what is being cleaned up

    def _hang_up(self) -> None:
        """End after SIGHUP; both the shell and the kernel may send it, and the second has no effect."""
        if not self._stopping.is_set():
            self._end()

    def _end(self, at_once: bool = False) -> None:
        limit_s = self._service.limits.drain_s
        if at_once or self._stopping.is_set():
            self._end_everything()
            self._until_s = time.monotonic() + _LAST_WORDS_S
        else:
            self._until_s = time.monotonic() + limit_s
        if self._stopping.is_set():
            return
        self._service.life.drain(limit_s)
        n_live = sum(client.n_live for client in self._service.clients)
        waiting = (
            f": {n_live} in progress have {number(limit_s)} s; signal again to end them now" if n_live else ""
        )
        self._stopping.set()
        self._service.report(f"stopping{waiting}")  # last: stderr may be gone, and the end goes on

    async def _end_in_peace(self, listening: asyncio.Server) -> None:
        """Wait for answers in progress, end those left when the time is over, and send what was written."""
        connections = self._service.connections
        await self._wait_while(lambda: self._n_answers() > 0)
        await _stop_accepting(listening)
        self._end_everything()
        connections.is_over = True
        for connection in connections.all():
            connection.end_after_answer()
        self._until_s = max(self._until_s, time.monotonic() + _LAST_WORDS_S)
        await self._wait_while(self._has_something_to_send)
        for connection in connections.all():
            connection.abort()
        if connections.tasks:
            await asyncio.wait(connections.tasks, timeout=_CANCEL_AFTER_S)
        self.has_ended = True

    async def _wait_while(self, unfinished: Callable[[], bool]) -> None:
        while unfinished() and time.monotonic() < self._until_s:
            await asyncio.sleep(_LOOK_EVERY_S)

    def _has_something_to_send(self) -> bool:
        answering = (connection.is_answering for connection in self._service.connections.all())
        return self._n_answers() > 0 or any(answering)

    def _n_answers(self) -> int:
        return sum(client.n_answers for client in self._service.clients)

    def _end_everything(self) -> None:
        for client in self._service.clients:
            client.end_everything()


async def _stop_accepting(listening: asyncio.Server) -> None:
    """Stop accepting, after each accepted socket has become a connection: asyncio would keep such a socket
    open unnoticed if the server closed in between."""
    for listener in listening.sockets:
        asyncio.get_running_loop().remove_reader(listener)
    await asyncio.sleep(0)
    listening.close()

"""Running the application: the socket, the signals, and an end that is told to those who wait."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from signal import SIGHUP, SIGINT, SIGTERM
from typing import Protocol

import uvicorn
from fastapi import FastAPI
from starlette.requests import ClientDisconnect

from phasewise.serving.http.connection import Connection
from phasewise.serving.http.connections import Connections
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.lifecycle import Lifecycle
from phasewise.serving.http.listening import BACKLOG, Address

_LAST_WORDS_S = 0.5
_LOOK_EVERY_S = 0.02
_ACCEPTED_AT_ONCE = 32
"""Connections, before the loop does anything else: each takes some 0.1 ms."""


class Clients(Protocol):
    """Requests in progress, as the server's start and end see them."""

    @property
    def n_live(self) -> int: ...
    @property
    def n_answers(self) -> int: ...
    def attach(self, loop: asyncio.AbstractEventLoop) -> None: ...
    def end_everything(self) -> None: ...


@dataclass(frozen=True)
class Service:
    """The parts of one server, and its listeners. `on_hangup`: what SIGHUP does; None: it ends the server,
    unless it is ignored.
    """

    app: FastAPI
    client: Clients
    life: Lifecycle
    connections: Connections
    report: Callable[[str], None]
    on_hangup: Callable[[], None] | None = None

    @property
    def limits(self) -> HttpLimits:
        return self.connections.limits


class HttpServer(uvicorn.Server):
    """Serves until SIGINT, SIGTERM or `end`. Then readiness is false at once and new requests get 503, while
    answers in progress have `drain_s`, or until a second signal. `report` gets a line at both ends.
    """

    def __init__(self, service: Service, address: Address, tls: ssl.SSLContext | None = None) -> None:
        super().__init__(_config(service))
        # What clients do wrong is answered and counted, and what they send is in no log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        logging.getLogger("uvicorn.error").addFilter(_is_a_mistake_of_ours)
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # warns of every client that left in mid-stream
        self._service = service
        self._address = address
        self._tls = tls
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None
        self._ends_at_start = False
        self._until_s = 0.0
        """When waiting ends, on `time.monotonic`."""

    def end(self, *, at_once: bool = False) -> None:
        """As a signal does; from any thread. at_once: as two of them."""
        if self._loop is None:
            self._ends_at_start = True
            return
        with suppress(RuntimeError):  # the loop has closed: it has ended
            self._loop.call_soon_threadsafe(self._end, at_once)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """In place of uvicorn's: handshakes have a time limit too."""
        self._loop = asyncio.get_running_loop()
        self._service.client.attach(self._loop)
        listener = self._address.listen()
        self.servers = [
            await self._loop.create_server(
                self._connection,
                sock=listener,
                ssl=self._tls,
                backlog=_ACCEPTED_AT_ONCE,
                ssl_handshake_timeout=self._service.limits.header_s if self._tls else None,
            )
        ]
        listener.listen(BACKLOG)  # asyncio has made it as short as what it accepts at once
        self.started = True
        self._service.report(f"listening on {self._address.url}")
        if self._ends_at_start:
            self._end(at_once=True)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again after the end; ours are answered on the loop."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        handlers: dict[signal.Signals, Callable[[], None]] = {SIGINT: self._end, SIGTERM: self._end}
        if self._service.on_hangup is not None:
            handlers[SIGHUP] = self._service.on_hangup
        elif signal.getsignal(SIGHUP) is not signal.SIG_IGN:  # under nohup it is, and stays so
            handlers[SIGHUP] = self._hang_up
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_IGN)  # one more must not break what is being cleaned up

    def _connection(self) -> asyncio.Protocol:
        return Connection(self._service.connections, self.config, self.server_state)

    def _hang_up(self) -> None:
        """The terminal has gone. Both the shell and the kernel may say so: twice is no more than once."""
        if self._drain is None:
            self._end()

    def _end(self, at_once: bool = False) -> None:
        client, limit_s = self._service.client, self._service.limits.drain_s
        if at_once or self._drain is not None:
            client.end_everything()
            self._until_s = time.monotonic() + _LAST_WORDS_S
        else:
            self._until_s = time.monotonic() + limit_s
        if self._drain is not None:
            return
        self._service.life.drain(limit_s)
        n_live = client.n_live
        waiting = f": {n_live} in progress have {limit_s:g} s; signal again to end them now" if n_live else ""
        self._drain = asyncio.ensure_future(self._end_in_peace())
        self._service.report(f"stopping{waiting}")  # last: stderr may be gone, and the end goes on

    async def _end_in_peace(self) -> None:
        """Answers in progress end by themselves, or are told; what they say is sent to those who read."""
        client = self._service.client
        await self._wait_while(lambda: client.n_answers > 0)
        client.end_everything()
        self.should_exit = True
        self._until_s = max(self._until_s, time.monotonic() + _LAST_WORDS_S)
        await self._wait_while(self._has_something_to_send)
        for connection in list(self._service.connections.open):
            connection.transport.abort()
        self.force_exit = True

    async def _wait_while(self, unfinished: Callable[[], bool]) -> None:
        while unfinished() and time.monotonic() < self._until_s:
            await asyncio.sleep(_LOOK_EVERY_S)

    def _has_something_to_send(self) -> bool:
        answering = (connection.is_answering for connection in self._service.connections.open)
        return self._service.client.n_answers > 0 or any(answering)


def _is_a_mistake_of_ours(record: logging.LogRecord) -> bool:
    """Not a request cut off at the end of the server, nor a client that left within its own."""
    raised = record.exc_info[1] if record.exc_info else None
    return not isinstance(raised, (asyncio.CancelledError, ClientDisconnect))


def _config(service: Service) -> uvicorn.Config:
    limits = service.limits
    return uvicorn.Config(
        service.app,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=None,
        timeout_keep_alive=limits.keep_alive_s,  # type: ignore[arg-type]
        h11_max_incomplete_event_size=limits.max_header_bytes,
    )

"""Running the application: the socket, readiness, and an end that is told to those who wait."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from signal import SIGINT, SIGTERM

import uvicorn
from fastapi import FastAPI

from phasewise.serving.errors import ServingError
from phasewise.serving.http.client import EngineClient

_BACKLOG = 2048
DRAIN_S = 5.0
_LAST_WORDS_S = 0.5


class CannotListen(ServingError):
    """The address cannot be served on."""


def bind(host: str, port: int) -> socket.socket:
    """A socket with its address (port 0: any free one), or CannotListen saying why not. `listen` follows."""
    try:
        family, kind, protocol, _name, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise CannotListen(f"host {host!r} is no address of this machine: {error}") from error
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise CannotListen(_why(error, host, port)) from error
    return listener


def listen(listener: socket.socket) -> None:
    """Let connections come. CannotListen where another process was faster."""
    try:
        listener.listen(_BACKLOG)
    except OSError as error:
        host, port = listener.getsockname()[:2]
        raise CannotListen(_why(error, host, port)) from error


def url_of(listener: socket.socket) -> str:
    """`http://host:port` of a bound socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def run(app: FastAPI, listener: socket.socket, client: EngineClient, report: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. Answers in progress then have DRAIN_S seconds, or until a second signal.

    `report` gets one line when the server is ready and one when it stops.
    """
    listen(listener)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=None,
        timeout_keep_alive=75,
    )
    server = _Server(config, client, report, url_of(listener))
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    def __init__(
        self, config: uvicorn.Config, client: EngineClient, report: Callable[[str], None], url: str
    ) -> None:
        super().__init__(config)
        self._client = client
        self._report = report
        self._url = url
        self._drain: asyncio.Task[None] | None = None

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn would raise the signal again after the end; ours are answered on the loop."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for one in (SIGINT, SIGTERM):
            loop.add_signal_handler(one, self._on_signal)
        try:
            yield
        finally:
            for one in (SIGINT, SIGTERM):
                loop.remove_signal_handler(one)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._report(f"listening on {self._url}")

    def _on_signal(self) -> None:
        if self.should_exit:
            self._drain = asyncio.ensure_future(self._end_late_answers(after_s=0))
            return
        self.should_exit = True
        n_live = self._client.n_live
        waiting = f": {n_live} in progress have {DRAIN_S:g} s; signal again to end them now" if n_live else ""
        self._report(f"stopping{waiting}")
        self._drain = asyncio.ensure_future(self._end_late_answers(after_s=DRAIN_S))

    async def _end_late_answers(self, after_s: float) -> None:
        """Tell whoever still waits, then close on those who do not read."""
        await asyncio.sleep(after_s)
        self._client.end_everything()
        await asyncio.sleep(_LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        self.force_exit = True


def _why(error: OSError, host: str, port: int) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"port {port} on {host} is in use; choose another with --port, or end what uses it"
        case errno.EACCES:
            return f"port {port} needs privileges; choose one above 1023 with --port"
        case errno.EADDRNOTAVAIL:
            return f"host {host!r} is no address of this machine; choose another with --host"
        case _:
            return f"cannot listen on {host} port {port}: {error.strerror}"

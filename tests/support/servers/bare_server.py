"""A real HTTP server over a bare ASGI application, without an engine."""

from __future__ import annotations

import contextlib
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport.connection import Connections
from phasewise.serving.http.transport.listening import TcpAddress
from phasewise.serving.http.transport.server import HttpServer, Service
from tests.support.servers.rude_clients import ENOUGH_S


class Nothing:
    """Clients, a lifecycle and an observer of a server that counts nothing."""

    n_live = n_answers = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_arguments: None


@dataclass
class BareServer:
    """A server and its thread, from `listens` to `ends` to `failure` or none."""

    url: str
    connections: Connections
    server: HttpServer = field(init=False)
    failure: BaseException | None = None
    _listens: threading.Event = field(default_factory=threading.Event)
    _ends: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread = field(init=False)

    def start(self, server: HttpServer) -> None:
        """Return once clients may connect."""
        self.server = server
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._listens.wait(ENOUGH_S)

    def end(self) -> None:
        """Return once its end has begun."""
        self.server.end()
        assert self._ends.wait(ENOUGH_S)

    def join(self) -> None:
        """Return once its end is over."""
        self._thread.join(ENOUGH_S)
        assert not self._thread.is_alive()

    def report(self, line: str) -> None:
        """Hear what the server says of itself."""
        (self._listens if line.startswith("listening") else self._ends).set()

    def _run(self) -> None:
        try:
            self.server.run()
        except BaseException as error:
            self.failure = error
        finally:
            self._listens.set()
            self._ends.set()


@contextlib.contextmanager
def loop_held(server: HttpServer) -> Iterator[None]:
    """Its event loop stands still meanwhile: what clients send lies in their sockets, all of it."""
    stands, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        stands.set()
        go_on.wait(ENOUGH_S)

    assert server._loop is not None
    server._loop.call_soon_threadsafe(hold)
    assert stands.wait(ENOUGH_S)
    try:
        yield
    finally:
        go_on.set()


@contextlib.contextmanager
def bare_server(
    app: Starlette, limits: HttpLimits, *, tls: ssl.SSLContext | None = None, client: Any = None
) -> Iterator[BareServer]:
    """One that holds no connection and no request at its end, and has not failed. `client`: its Clients."""
    nothing: Any = Nothing()
    with TcpAddress("127.0.0.1", 0, secure=tls is not None) as place:
        running = BareServer(place.url, Connections(limits, nothing))
        service = Service(app, [client or nothing], nothing, running.connections, running.report)
        running.start(HttpServer(service, place, tls))
        try:
            yield running
        finally:
            running.server.end(at_once=True)
            running.join()
        assert running.failure is None
        assert running.connections.all() == []
        assert not running.connections.tasks

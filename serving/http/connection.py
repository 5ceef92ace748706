"""One HTTP connection, with an end to its patience: heads, bodies and readers that take too long are cut.

uvicorn's protocol knows one timeout, for idle connections that were answered before. All others are here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import HttpLimits

EXTENSION = "phasewise.connection"
"""In a request's `scope["extensions"]`: the connection that it came on."""

_SEND_BUFFER_BYTES = 256 * 1024
"""The kernel's, for each connection; left alone it lets a slow reader have megabytes."""
_RECEIVE_BYTES = 64 * 1024
"""The most that is taken from a socket at once."""
_RETRY_FULL_S = 5
_FULL = ApiError(
    503,
    "this server has as many connections as it can hold; try again later",
    code="too_many_connections",
    retry_after_s=_RETRY_FULL_S,
)
_LATE = ApiError(408, "the head of the request took too long", code="request_timeout")
_NO_HTTP = ApiError(400, "this is no HTTP/1.1 request", code="invalid_http")


class ConnectionObserver(Protocol):
    """Sees what becomes of connections, for metrics."""

    def refused(self, error: ApiError) -> None: ...

    def slow_reader_cut(self) -> None: ...


@dataclass
class Connections:
    """All of one server's, and what they may do."""

    limits: HttpLimits
    observer: ConnectionObserver
    open: set[Connection] = field(default_factory=set)
    received: memoryview = field(default_factory=lambda: memoryview(bytearray(_RECEIVE_BYTES)))
    """What a read puts its bytes into, whoever sent them: they are copied before the loop does anything else.

    asyncio's own way, fresh memory for every read, would be 256 KiB. No hole in the heap is so large: each
    comes from above all that is in use, and memory grows with every request.
    """

    def new(self, config: Config, state: ServerState) -> Connection:
        return Connection(self, config, state)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """One of `others`. At most one clock runs: for a head, for a body, or (uvicorn's) between two requests;
    beside it one for a reader that takes nothing."""

    def __init__(self, others: Connections, config: Config, state: ServerState) -> None:
        super().__init__(config, state, {})
        self._others = others
        self._limits = others.limits
        self._routes = self.app
        self.app = self._with_connection
        self._late: asyncio.TimerHandle | None = None
        self._awaited: tuple[float, Callable[[], None]] | None = None
        self._stalled: asyncio.TimerHandle | None = None

    @property
    def is_answering(self) -> bool:
        """Whether the client has yet to get the rest of an answer."""
        begun = self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete
        return begun or self.transport.get_write_buffer_size() > 0

    def cut(self) -> None:
        """The reader is too slow: what it has not read is dropped."""
        self._others.observer.slow_reader_cut()
        self.transport.abort()

    @property
    def sends_chunks(self) -> bool:
        """Whether the answer in progress is a body in chunks, with its head sent: HTTP/1.0 knows none."""
        return self.conn.our_state is h11.SEND_BODY and self.conn.their_http_version == b"1.1"

    def write_chunk(self, body: bytes) -> bool:
        """What `send` would write, in a tenth of the time: h11 is in the same state before and after a chunk.

        False, and nothing is written: the reader is behind, and whoever sends has to wait.
        """
        if self.flow.write_paused:
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        return True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        if len(self._others.open) >= self._limits.max_connections:
            self._refuse(_FULL)
            return
        self._others.open.add(self)
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        self._watch_the_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.open.discard(self)
        self._stop(self._late)
        self._stop(self._stalled)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def eof_received(self) -> None:
        """Half closed is gone: nobody waits for the rest of an answer, read or not."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Where the loop puts what it reads next."""
        return self._others.received

    def buffer_updated(self, nbytes: int) -> None:
        """So much of the buffer is this connection's, until this returns."""
        self.data_received(bytes(self._others.received[:nbytes]))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch_the_clock()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch_the_clock()
        if self.transport.is_closing():  # it waits for its reader, and nobody waits for it
            self._watch_the_reader()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_the_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._stop(self._stalled)
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        """A close waits until all is written."""
        super().timeout_keep_alive_handler()
        self._watch_the_reader()

    def send_400_response(self, msg: str) -> None:
        """What h11 cannot read, or what it has read too much of."""
        most = self._limits.max_header_bytes
        if len(self.conn.trailing_data[0]) <= most:
            self._refuse(_NO_HTTP)
            return
        self._refuse(self._head_too_large())

    def _head_too_large(self) -> ApiError:
        message = f"the head of the request is larger than {self._limits.max_header_bytes} bytes"
        return ApiError(431, message, code="header_too_large")

    async def _with_connection(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A head that came in one piece is not h11's to refuse, however large."""
        scope["extensions"] = {EXTENSION: self}
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._limits.max_header_bytes:
            error = self._head_too_large()
            self._others.observer.refused(error)
            await error.response()(scope, receive, send)
            return
        await self._routes(scope, receive, send)

    def _watch_the_clock(self) -> None:
        """Start the clock of what is awaited from the client now, unless it runs already."""
        awaited = self._what_is_awaited()
        if awaited == self._awaited:
            return
        self._awaited = awaited
        self._stop(self._late)
        if awaited is not None:
            patience_s, end = awaited
            self._late = self.loop.call_later(patience_s, end)

    def _watch_the_reader(self) -> None:
        self._stop(self._stalled)
        left = self.transport.get_write_buffer_size()
        self._stalled = self.loop.call_later(self._limits.stalled_write_s, self._cut_unless_taking, left)

    def _cut_unless_taking(self, bytes_before: int) -> None:
        """Slow is no fault, as long as there is less to take than before."""
        bytes_left = self.transport.get_write_buffer_size()
        if bytes_left and bytes_left >= bytes_before:
            self.cut()
        elif bytes_left:
            self._watch_the_reader()

    def _what_is_awaited(self) -> tuple[float, Callable[[], None]] | None:
        if self.transport.is_closing():
            return None
        if self.conn.their_state is h11.SEND_BODY:
            return self._limits.body_s, self._end_late_body
        answered_before = self.timeout_keep_alive_task is not None
        if self.conn.their_state is h11.IDLE and not answered_before:
            return self._limits.header_s, self._end_late_head
        return None

    def _end_late_head(self) -> None:
        if self.conn.trailing_data[0]:
            self._refuse(_LATE)
        else:  # it never said anything
            self.transport.abort()

    def _end_late_body(self) -> None:
        self._others.observer.refused(_LATE)
        self.transport.abort()

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, and close."""
        self._others.observer.refused(error)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = error.response()
            lines = [f"HTTP/1.1 {error.status} ".encode(), b"connection: close"]
            lines += [name + b": " + value for name, value in answer.raw_headers]
            self.transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + bytes(answer.body))
        self.transport.close()

    @staticmethod
    def _stop(clock: asyncio.TimerHandle | None) -> None:
        if clock is not None:
            clock.cancel()

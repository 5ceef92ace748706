"""One HTTP/1 connection and its limits. A connection reads for a bounded time in each turn of the event loop
(`TurnQueue`) and for a bounded share of the loop's time (`LoopShare`). `framing` finds where requests end,
h11 parses them and writes answers, and `exchange` is one request as the application sees it."""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Scope

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.monitoring.metrics import Metrics
from phasewise.serving.http.transport.connections import (
    BYTE_S,
    MOST_TURNED_AWAY,
    REQUEST_S,
    Awaited,
    ConnectionClocks,
    LoopShare,
    TurnQueue,
    address_of,
)
from phasewise.serving.http.transport.exchange import Exchange, timed_steps
from phasewise.serving.http.transport.framing import Framing

EXTENSION = "phasewise.connection"
"""Key in a request's `scope["extensions"]` of its connection, for `connection_of`."""

_REFUSED = "phasewise.refused"
"""Key in an ASGI scope of the error status that the connection sent because the body was invalid."""
_SEND_BUFFER_BYTES = 256 * 1024
"""Size of the kernel's send buffer of each connection; by default a slow reader may have megabytes in it."""
_RECEIVE_BUFFER_BYTES = 256 * 1024
"""Size of the kernel's receive buffer; by default it holds megabytes while a connection is not read."""
_TURN_S = 0.0005
"""Longest time for which a connection reads before the loop goes on to the next."""
_SMALL_BYTES = 16 * 1024
"""Most unread bytes parsed at once; with more the connection waits for its turn."""
_MAX_PAUSE_S = 5.0
"""Longest pause in reading a connection that has used up its share of the loop."""
_HEAD_END = b"\r\n\r\n"
_DISCARD_BYTES = 64 * 1024
"""Most bytes of an unwanted body that are read to keep the connection; after more it is closed."""
_LINGER_S = 2.0
_LINGER_BYTES = 16 * 1024 * 1024
"""Most bytes dropped from a client that still sends, so that it can read a refusal before a reset."""
_ASGI_SPEC_VERSION = "2.3"
_HALF_CLOSED = ApiError(
    400,
    "the client closed its side of the connection before the answer came, and counts as gone: keep that side "
    "open until the answer is there",
    code="half_closed",
    closes=True,
)
_LATE = ApiError(408, "the head of the request took too long", code="request_timeout")


_RECEIVE_BYTES = 64 * 1024
"""Most bytes taken from a socket at once."""
_RETRY_FULL_S = 5
_FULL = ApiError(
    503,
    "this server has as many connections as it can hold; try again later",
    code="too_many_connections",
    retry_after_s=_RETRY_FULL_S,
)
_FULL_FOR_YOU = ApiError(
    503,
    "this server holds as many connections of one address as it allows; close some, or try again later",
    code="too_many_connections",
    retry_after_s=_RETRY_FULL_S,
)


class Connection(asyncio.BufferedProtocol):
    """The asyncio protocol of one HTTP/1 connection. `others`: all connections of the server. Beside
    `ConnectionClocks` at most one timer runs, `_paused` or `_linger`."""

    transport: asyncio.Transport

    def __init__(self, app: ASGIApp, others: Connections) -> None:
        self.loop = asyncio.get_running_loop()
        self.conn = h11.Connection(h11.SERVER, others.limits.max_header_bytes)
        self.writable = asyncio.Event()
        self.writable.set()
        self.resumed: Callable[[], None] | None = None
        """Called once the reader is no longer behind."""
        self._app = app
        self._others = others
        self._limits = others.limits
        self._framing = Framing(self._limits.max_header_bytes)
        self._allowance = others.loop_share.allowance(time.perf_counter())
        self._exchange: Exchange | None = None
        """The exchange of the newest request."""
        self._answered_exchange: Exchange | None = None
        """The exchange of the last request that the engine has answered."""
        self._has_answered = False
        self._ends_after_answer = False
        self._paused: asyncio.TimerHandle | None = None
        """Timer that runs while this connection's share of the loop is used up."""
        self._linger: asyncio.TimerHandle | None = None
        """Timer that runs after the last answer; data that still comes is dropped."""
        self._n_discarded = 0
        """Bytes dropped so far, of an unwanted body or after the last answer."""
        self._refusal: ApiError | None = None
        """The refusal of a connection beyond the limit, sent once its request has come."""
        self._clocks = ConnectionClocks(self.loop)

    @property
    def is_answering(self) -> bool:
        """True if part of an answer is still to be sent."""
        exchange = self._exchange if self._is_in_exchange else None
        owed = exchange is not None and (exchange.has_started or exchange.is_owed)
        return owed or self._n_unsent_bytes() > 0

    @property
    def _is_in_exchange(self) -> bool:
        return self._exchange is not None and not self._exchange.is_complete

    @property
    def is_behind(self) -> bool:
        """True if the client has yet to read what was written."""
        return not self.writable.is_set()

    def cut(self) -> None:
        """Abort the connection of a slow reader; unsent bytes are dropped."""
        self._others.metrics.slow_reader_cut()
        self.transport.abort()

    @property
    def takes_body(self) -> bool:
        """True if the head of the answer in progress is sent, and its reader not behind."""
        return self.conn.our_state is h11.SEND_BODY and self.writable.is_set() and self._linger is None

    def write_body(self, body: bytes) -> None:
        """Write a part of the answer, not empty, without h11, in a tenth of the time: in a chunk, or to
        HTTP/1.0 as it is. h11's state is the same before and after."""
        is_chunked = self.conn.their_http_version == b"1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body) if is_chunked else body)

    def at_end(self, call: Callable[[], None]) -> None:
        """Have `call` called once the newest request has been answered."""
        if self._exchange is not None:
            self._exchange.at_end = call

    def wake_reader(self) -> None:
        """Wake the application's `receive`, though nothing more of the body has come."""
        if self._exchange is not None:
            self._exchange.wake()

    def mark_answered(self) -> None:
        """Note that the engine has answered a request: the connection may use more of the loop's time."""
        self._allowance.mark_answered()
        self._answered_exchange = self._exchange

    def close(self) -> None:
        """Close once all is written. No effect while closing: a second close of asyncio's TLS leaves a
        transport whose every call fails, and that cannot be aborted."""
        if not self.transport.is_closing():
            self.transport.close()

    def abort(self) -> None:
        """Close now; unsent bytes are dropped."""
        self.transport.abort()

    def end_after_answer(self) -> None:
        """Close once the answer in progress is written, or the refusal of a connection beyond the limit."""
        self._ends_after_answer = True
        if self._refusal is not None:
            self.turn_away()
        elif not self._is_in_exchange:
            self.close()

    # ---- asyncio -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._client = _host_and_port(transport, "peername")
        self._refusal = self._others.add(self, self._client)
        if self._refusal is not None:
            self._clocks.wait_for((_LINGER_S, self.turn_away))
            return
        link = transport.get_extra_info("socket")
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
        self._watch_the_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._others.remove(self, self._client)
        self._allowance.end()
        self._others.turns.leave(self.turn)
        self._clocks.stop()
        for clock in (self._paused, self._linger):
            if clock is not None:
                clock.cancel()
        if self._exchange is not None:
            self._exchange.leave()
        self.writable.set()

    def eof_received(self) -> None:
        """End the connection when the client closes its side: it counts as gone. An unanswered request gets
        `_HALF_CLOSED`, over TLS only after a close_notify; without one it is a truncation."""
        if not self._is_in_exchange:
            return
        if self.conn.our_state is h11.SEND_RESPONSE:
            assert self._exchange is not None
            self.transport.write(_HALF_CLOSED.raw_response())
            self._exchange.leave()
            self._end_idle()
        else:
            self.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """The shared buffer into which the loop reads next."""
        return self._others.received

    def buffer_updated(self, nbytes: int) -> None:
        """Copy `nbytes` out of the shared buffer."""
        self.data_received(bytes(self._others.received[:nbytes]))

    def data_received(self, data: bytes) -> None:
        if self._linger is not None:
            self._discard(len(data), _LINGER_BYTES, self.transport.abort)
            return
        if self._is_idle:
            self._clocks.wait_for(None)
        self._framing.add(data)
        if self._refusal is None:
            self._read_on()
        elif _HEAD_END in self._framing.unread or len(self._framing.unread) > self._limits.max_header_bytes:
            self.turn_away()

    def pause_writing(self) -> None:
        self.writable.clear()
        self._watch_the_reader()

    def resume_writing(self) -> None:
        if not self.transport.is_closing():
            self._clocks.forget_reader()
        self.writable.set()
        if self.resumed is not None:
            self.resumed()

    # ---- what an exchange asks for -----------------------------------------------------------------------

    def write(self, event: h11.Event) -> None:
        """Send an h11 event, unless the last answer has been sent."""
        if self._linger is None and (data := self.conn.send(event)):
            self.transport.write(data)

    def body_taken(self) -> None:
        """Read more of a body, after the application has taken what was there."""
        if self._framing.unread and self._takes_more and not self._waits_for_turn:
            self._others.turns.join(self.turn)
        self._read_or_pause()

    def answered(self) -> None:
        """Go on to the next request after an answer, or close."""
        self._has_answered = True
        if self.conn.our_state is h11.MUST_CLOSE or self._ends_after_answer:
            self.finish()
        if self._linger is None and not self.transport.is_closing():
            self.body_taken()
            if self.conn.our_state is h11.DONE and self.conn.their_state is h11.DONE:
                self.conn.start_next_cycle()
                self._read_on()
            self._watch_the_clock()
        if self.transport.is_closing():  # it waits for its reader, and has no other clock
            self._watch_the_reader()

    # ---- reading -----------------------------------------------------------------------------------------

    def _read_on(self) -> None:
        """Parse unread bytes: few at once, more in turns."""
        if self._waits_for_turn:
            return
        if len(self._framing.unread) <= _SMALL_BYTES:
            self.turn()
        else:
            self._others.turns.join(self.turn)
            self._read_or_pause()

    @property
    def _is_full(self) -> bool:
        return self._exchange is not None and self._exchange.is_full

    @property
    def _takes_more(self) -> bool:
        """True if h11 waits for bytes, and the application has taken enough of the body."""
        if self._linger is not None or self.transport.is_closing() or self._is_full:
            return False
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def _is_idle(self) -> bool:
        """True between two requests."""
        return self._has_answered and self.conn.their_state is h11.IDLE and not self._framing.unread

    @property
    def _waits_for_turn(self) -> bool:
        return self._paused is not None or self.turn in self._others.turns

    def turn(self) -> None:
        """Parse unread bytes until none are left or the time of one turn is over, and charge the cost."""
        began_s = now_s = time.perf_counter()
        n_requests, n_bytes, goes_on = 0, 0, False
        try:
            while self._takes_more:
                if goes_on := now_s - began_s > _TURN_S:
                    break
                piece = self._framing.next_piece()
                if piece is None:
                    break
                n_bytes += len(piece)
                self.conn.receive_data(piece)
                n_requests += self._take_events()
                now_s = time.perf_counter()
        except ApiError as error:
            self._refuse(error)
        except h11.RemoteProtocolError:
            self._refuse(ApiError(400, "this is no HTTP/1.1 request", code="invalid_http", closes=True))
        now_s = time.perf_counter()
        cost_s = now_s - began_s + n_requests * REQUEST_S + n_bytes * BYTE_S
        pause_s = self._allowance.charge(cost_s, now_s)
        if self._linger is None and not self.transport.is_closing():
            if pause_s:
                self._paused = self.loop.call_later(min(pause_s, _MAX_PAUSE_S), self._end_pause)
            elif goes_on:
                self._others.turns.join(self.turn)
        self._read_or_pause()
        self._watch_the_clock()

    def _end_pause(self) -> None:
        self._paused = None
        self._others.turns.join(self.turn)

    def _take_events(self) -> int:
        """Handle h11's events; return the number of requests that have begun."""
        n_requests = 0
        while (event := self.conn.next_event()) is not h11.NEED_DATA and event is not h11.PAUSED:
            if isinstance(event, h11.Request):
                self._begin(event)
                n_requests += 1
            elif isinstance(event, h11.Data):
                if self.conn.our_state is h11.DONE:
                    self._discard(len(event.data), _DISCARD_BYTES, self.finish)
                    continue
                assert self._exchange is not None
                self._exchange.add(event.data)
            elif isinstance(event, h11.EndOfMessage):
                self._n_discarded = 0
                if self.conn.our_state is h11.DONE:
                    self.conn.start_next_cycle()
                    continue
                assert self._exchange is not None
                self._exchange.end_body()
        return n_requests

    def _begin(self, request: h11.Request) -> None:
        """Start the application on a request."""
        raw_path, _, query = request.target.partition(b"?")
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": _ASGI_SPEC_VERSION},
            "http_version": request.http_version.decode("ascii"),
            "method": request.method.decode("ascii"),
            "scheme": "http" if self.transport.get_extra_info("sslcontext") is None else "https",
            "server": _host_and_port(self.transport, "sockname"),
            "client": self._client,
            "root_path": "",
            "path": unquote(raw_path.decode("ascii")),
            "raw_path": raw_path,
            "query_string": query,
            "headers": list(request.headers),
            "state": {},
            "extensions": {EXTENSION: self},
        }
        self._exchange = exchange = Exchange(self, scope)
        work = timed_steps(exchange.run(self._app), partial(self._has_spent, exchange))
        task = self.loop.create_task(work)
        task.add_done_callback(self._others.tasks.discard)
        self._others.tasks.add(task)

    def _has_spent(self, exchange: Exchange, seconds: float) -> None:
        """Charge a request's `seconds` of loop time, unless the engine has answered the request, and let go
        of it: an idle connection holds no prompt and no grammar."""
        exchange.at_end()
        if exchange is self._answered_exchange:
            self._answered_exchange = None
        else:
            self._allowance.spend(max(0.0, seconds - REQUEST_S))
        if exchange is self._exchange:
            self._exchange = None

    def _read_or_pause(self) -> None:
        """Pause the transport's reading while earlier bytes wait to be parsed."""
        if self._linger is not None:
            return
        waits_for_answer = bool(self._framing.unread) and not self._takes_more
        if self._is_full or self._waits_for_turn or waits_for_answer:
            self.transport.pause_reading()
        else:
            self.transport.resume_reading()

    def _discard(self, n_bytes: int, most_bytes: int, otherwise: Callable[[], None]) -> None:
        self._n_discarded += n_bytes
        if self._n_discarded > most_bytes:
            otherwise()

    # ---- clocks ------------------------------------------------------------------------------------------

    def _watch_the_clock(self) -> None:
        self._clocks.wait_for(self._what_is_awaited())

    def _watch_the_reader(self) -> None:
        self._clocks.watch_reader(self._limits.stalled_write_s, self._n_unsent_bytes, self.cut)

    def _n_unsent_bytes(self) -> int:
        """Bytes that the socket has yet to take, those below asyncio's TLS (which omits them) included."""
        below = getattr(getattr(self.transport, "_ssl_protocol", None), "_transport", None)
        n_below: int = below.get_write_buffer_size() if below is not None else 0
        return self.transport.get_write_buffer_size() + n_below

    def _what_is_awaited(self) -> Awaited | None:
        if self.transport.is_closing() or self._linger is not None:
            return None
        if self.conn.their_state is h11.SEND_BODY:
            return self._limits.body_s, self._end_late_body
        if self._is_idle:
            return self._limits.keep_alive_s, self._end_idle
        if self.conn.their_state is h11.IDLE:
            return self._limits.header_s, self._end_late_head
        return None

    def _end_idle(self) -> None:
        """Close, and watch that the reader takes what is unsent."""
        self.close()
        self._watch_the_reader()

    def _end_late_head(self) -> None:
        if self._framing.unread:
            self._refuse(_LATE)
        else:  # it never said anything
            self.transport.abort()

    def _end_late_body(self) -> None:
        self._others.metrics.refused(_LATE)
        self.transport.abort()

    # ---- ends --------------------------------------------------------------------------------------------

    def turn_away(self) -> None:
        """Refuse and close a connection beyond the limit. Called after its request has come: clients see an
        earlier answer, or a close with the request unread, as a lost connection."""
        if self._refusal is not None and self._linger is None and not self.transport.is_closing():
            self._refuse(self._refusal)

    def _refuse(self, error: ApiError) -> None:
        """Answer an invalid request with an error, and close."""
        self._write_refusal(error)
        self.finish()

    def _write_refusal(self, error: ApiError) -> None:
        self._others.metrics.refused(error)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.conn.our_state is h11.SEND_RESPONSE:  # the application has the request, and counts it
                assert self._exchange is not None
                self._exchange.scope[_REFUSED] = error.status
            else:
                self._others.metrics.answered_by_connection(error.status)
            self.transport.write(error.raw_response())

    def finish(self) -> None:
        """Close once all is written. If the client may still be sending, first drop what it sends for a
        while: a reset would lose the answer."""
        if self._linger is not None or self.transport.is_closing():
            return
        is_over = self.conn.their_state in (h11.DONE, h11.MUST_CLOSE, h11.CLOSED) and not self._framing.unread
        if is_over:
            self.close()
            return
        self._framing.unread.clear()
        self._n_discarded = 0
        self._linger = self.loop.call_later(_LINGER_S, self.transport.abort)
        self._clocks.wait_for(None)
        if self._paused is not None:
            self._paused.cancel()
        self._others.turns.leave(self.turn)
        if self._exchange is not None:
            self._exchange.leave()
        try:
            if self.transport.can_write_eof():  # TLS has no half that could be closed alone
                self.transport.write_eof()
            self.transport.resume_reading()
        except OSError:  # the client is quicker, and gone
            self.transport.abort()


@dataclass
class Connections:
    """The open connections of one server, their limits and shared resources."""

    limits: HttpLimits
    metrics: Metrics
    open: set[Connection] = field(default_factory=set)
    turned_away: dict[Connection, None] = field(default_factory=dict)
    """Connections beyond the limit that are being refused, oldest first; not among `open`."""
    is_over: bool = False
    """True once no more connections are taken; asyncio may still make one that was accepted before."""
    n_by_address: Counter[str] = field(default_factory=Counter)
    """Open connections by address; a Unix socket has none."""
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    """Tasks of the application, one for each request."""
    loop_share: LoopShare = field(default_factory=LoopShare)
    turns: TurnQueue = field(default_factory=TurnQueue)
    received: memoryview = field(default_factory=lambda: memoryview(bytearray(_RECEIVE_BYTES)))
    """The read buffer of all connections; its bytes are copied before the loop goes on. asyncio would
    allocate 256 KiB for every read, for which the heap has no hole, so memory would grow with every
    request."""

    def all(self) -> Sequence[Connection]:
        """Open connections, and those being refused."""
        return [*self.open, *self.turned_away]

    def add(self, connection: Connection, client: tuple[str, int | None] | None) -> ApiError | None:
        """Add a new connection; return its refusal, or None. A refused connection is held until it has read
        the refusal, unless many others follow. After the server's end it is aborted."""
        if self.is_over:
            connection.abort()
            return None
        refusal = self._refusal(connection, client)
        if refusal is not None:
            self.turned_away[connection] = None
            if len(self.turned_away) > MOST_TURNED_AWAY:
                oldest = next(iter(self.turned_away))
                del self.turned_away[oldest]
                oldest.turn_away()
                oldest.close()
        return refusal

    def _refusal(self, connection: Connection, client: tuple[str, int | None] | None) -> ApiError | None:
        if len(self.open) >= self.limits.max_connections:
            return _FULL
        address = address_of(client)
        if address is not None:
            if self.n_by_address[address] >= self.limits.max_connections_per_address:
                return _FULL_FOR_YOU
            self.n_by_address[address] += 1
        self.open.add(connection)
        return None

    def remove(self, connection: Connection, client: tuple[str, int | None] | None) -> None:
        """Remove a connection that has ended, whether it was refused or not."""
        self.turned_away.pop(connection, None)
        if connection not in self.open:
            return
        self.open.remove(connection)
        address = address_of(client)
        if address is not None:
            self.n_by_address[address] -= 1
            if not self.n_by_address[address]:
                del self.n_by_address[address]


def refused_status(scope: Scope) -> int | None:
    """The status that the connection has answered in the application's place; None if it has not."""
    status: int | None = scope.get(_REFUSED)
    return status


def connection_of(scope: Scope) -> Connection | None:
    """The connection of a request; None if the application is not run by this server."""
    connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
    return connection


def _host_and_port(transport: asyncio.Transport, end: str) -> tuple[str, int | None] | None:
    """The address at an `end` of a connection, "peername" or "sockname". A Unix socket has a path or None."""
    name = transport.get_extra_info(end)
    if isinstance(name, tuple):
        return name[0], name[1]
    return (name, None) if name else None

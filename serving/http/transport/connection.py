"""One HTTP/1 connection and its limits: what comes too slowly, is too much or costs too much is cut.

A connection reads for a bounded time in each turn of the event loop (`TurnQueue`), and for a bounded share
of the loop's time altogether (`LoopShare`). `framing` finds where requests end, h11 reads them and writes
answers, `exchange` is one request as the application sees it.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import unquote

import h11
from starlette.types import ASGIApp, Scope

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.transport.connections import (
    BYTE_S,
    REQUEST_S,
    Awaited,
    ConnectionClocks,
    Connections,
)
from phasewise.serving.http.transport.exchange import Exchange, timed_steps
from phasewise.serving.http.transport.framing import Framing

EXTENSION = "phasewise.connection"
"""In a request's `scope["extensions"]`: the connection that it came on, for `connection_of`."""

_REFUSED = "phasewise.refused"
"""The place in an ASGI scope that says so where the rest of a request was no HTTP."""
_SEND_BUFFER_BYTES = 256 * 1024
"""The kernel's, for each connection; its own default lets a slow reader have megabytes."""
_RECEIVE_BUFFER_BYTES = 256 * 1024
"""The kernel's too; its own default holds megabytes of what a connection that has to wait has sent."""
_TURN_S = 0.0005
"""The time for which a connection reads before the loop goes on to the next."""
_SMALL_BYTES = 16 * 1024
"""The bytes that are read at once; what has come beyond them waits for its turn among all connections."""
_MAX_PAUSE_S = 5.0
"""The longest that a connection which has used up its share of the loop is not read."""
_HEAD_END = b"\r\n\r\n"
_DISCARD_BYTES = 64 * 1024
"""The most of an unwanted body that is read, to keep the connection; with more to come it is closed."""
_LINGER_S = 2.0
_LINGER_BYTES = 16 * 1024 * 1024
"""A client that still sends gets to read its refusal within these, and is not reset."""
_TCP_INFO_BYTES = 64
_LAST_DATA_RECEIVED = 52
"""The place of the age of what came last in Linux's tcp_info: milliseconds, a whole number of four bytes."""
_ASGI_SPEC_VERSION = "2.3"
_HALF_CLOSED = ApiError(
    400,
    "the client closed its side of the connection before the answer came, and counts as gone: keep that side "
    "open until the answer is there",
    code="half_closed",
    closes=True,
)
_LATE = ApiError(408, "the head of the request took too long", code="request_timeout")


class Connection(asyncio.BufferedProtocol):
    """One of `others`. Beside `ConnectionClocks`, at most one clock runs: that for the next turn of a sender
    that has to wait."""

    transport: asyncio.Transport

    def __init__(self, app: ASGIApp, others: Connections) -> None:
        self.loop = asyncio.get_running_loop()
        self.conn = h11.Connection(h11.SERVER, others.limits.max_header_bytes)
        self.writable = asyncio.Event()
        self.writable.set()
        self._app = app
        self._others = others
        self._limits = others.limits
        self._framing = Framing(self._limits.max_header_bytes)
        self._allowance = others.loop_share.allowance(time.perf_counter())
        self._exchange: Exchange | None = None
        """The newest request."""
        self._answered_exchange: Exchange | None = None
        """The last request that the engine has answered."""
        self._has_answered = False
        self._ends_after_answer = False
        self._paused: asyncio.TimerHandle | None = None
        """Runs while this connection's share of the loop is used up."""
        self._linger: asyncio.TimerHandle | None = None
        """Runs once all has been said: what still comes is dropped."""
        self._n_discarded = 0
        """Bytes of a body that is not wanted."""
        self._refusal: ApiError | None = None
        """The answer to a connection too many, once its request has come."""
        self._clocks = ConnectionClocks(self.loop)

    @property
    def is_answering(self) -> bool:
        """True if the client has yet to get the rest of an answer."""
        exchange = self._exchange if self._is_in_exchange else None
        owed = exchange is not None and (exchange.has_started or exchange.is_owed)
        return owed or self._n_unsent_bytes() > 0

    @property
    def _is_in_exchange(self) -> bool:
        return self._exchange is not None and not self._exchange.is_complete

    @property
    def is_behind(self) -> bool:
        """True if the client has yet to take what was written."""
        return not self.writable.is_set()

    def cut(self) -> None:
        """The reader is too slow: what it has not read is dropped."""
        self._others.observer.slow_reader_cut()
        self.transport.abort()

    @property
    def takes_chunk(self) -> bool:
        """True if the answer in progress is in chunks (HTTP/1.0 knows none), its head is sent
        and its reader not behind."""
        is_chunked = self.conn.our_state is h11.SEND_BODY and self.conn.their_http_version == b"1.1"
        return is_chunked and self.writable.is_set() and self._linger is None

    def write_chunk(self, body: bytes) -> None:
        """Write what `send` would write, in a tenth of the time: h11 is in the same state before and after a
        chunk."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))

    def came_s(self) -> float:
        """The time at which the client's last bytes came to this machine, by the loop's clock. They may have
        waited long to be read. Now where the kernel does not say."""
        link = self.transport.get_extra_info("socket")
        try:
            info = link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        except (OSError, AttributeError):  # a Unix socket, or a system without it
            return self.loop.time()
        age_ms = int.from_bytes(info[_LAST_DATA_RECEIVED : _LAST_DATA_RECEIVED + 4], sys.byteorder)
        return self.loop.time() - 1e-3 * age_ms

    def at_end(self, call: Callable[[], None]) -> None:
        """Call it once the newest request has been answered."""
        if self._exchange is not None:
            self._exchange.at_end = call

    def wake_reader(self) -> None:
        """Let the application look at the body in progress, though nothing more of it has come."""
        if self._exchange is not None:
            self._exchange.wake()

    def mark_answered(self) -> None:
        """The engine has answered a request of this connection: it may use more of the loop's time."""
        self._allowance.mark_answered()
        self._answered_exchange = self._exchange

    def close(self) -> None:
        """Close once all is written. Where it closes already, nothing happens: a second close of asyncio's
        TLS leaves a transport that fails in every call, and cannot be aborted."""
        if not self.transport.is_closing():
            self.transport.close()

    def abort(self) -> None:
        """Close now: what is not written yet is dropped."""
        self.transport.abort()

    def end_after_answer(self) -> None:
        """Close, once the answer in progress is written, or the refusal of a connection too many."""
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
        self._others.turns.leave(self)
        self._clocks.stop()
        for clock in (self._paused, self._linger):
            if clock is not None:
                clock.cancel()
        if self._exchange is not None:
            self._exchange.leave()
        self.writable.set()

    def eof_received(self) -> None:
        """A client that has closed its side counts as gone, and its answer is not sent on. It may have closed
        only that side, and is told; over TLS where it said so, since what ends without is a truncation."""
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
        """The buffer into which the loop puts what it reads next."""
        return self._others.received

    def buffer_updated(self, nbytes: int) -> None:
        """`nbytes` of the buffer are this connection's, until this returns."""
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

    # ---- what an exchange asks for -----------------------------------------------------------------------

    def write(self, event: h11.Event) -> None:
        """Send this, unless all has been said."""
        if self._linger is None and (data := self.conn.send(event)):
            self.transport.write(data)

    def body_taken(self) -> None:
        """A body in progress may be read on."""
        if self._framing.unread and self._takes_more and not self._waits_for_turn:
            self._others.turns.join(self)
        self._read_or_pause()

    def answered(self) -> None:
        """Go on to the next request, or end."""
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
        """Read what has come, for a bounded time, and the rest in turns to come."""
        if self._waits_for_turn:
            return
        if len(self._framing.unread) <= _SMALL_BYTES:
            self.turn()
        else:
            self._others.turns.join(self)
            self._read_or_pause()

    @property
    def _is_full(self) -> bool:
        return self._exchange is not None and self._exchange.is_full

    @property
    def _takes_more(self) -> bool:
        """True if h11 waits for bytes, and the body so far has been taken."""
        if self._linger is not None or self.transport.is_closing() or self._is_full:
            return False
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    @property
    def _is_idle(self) -> bool:
        """True between two requests."""
        return self._has_answered and self.conn.their_state is h11.IDLE and not self._framing.unread

    @property
    def _waits_for_turn(self) -> bool:
        return self._paused is not None or self in self._others.turns

    def turn(self) -> None:
        """Read what has come, until all is read or the time of one turn is over."""
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
                self._others.turns.join(self)
        self._read_or_pause()
        self._watch_the_clock()

    def _end_pause(self) -> None:
        self._paused = None
        self._others.turns.join(self)

    def _take_events(self) -> int:
        """Parse a piece with h11; return the number of requests that have begun."""
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
        """Start what answers it."""
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
        """A request has ended, after `seconds` of the loop's time."""
        exchange.at_end()
        if exchange is not self._answered_exchange:
            self._allowance.spend(max(0.0, seconds - REQUEST_S))

    def _read_or_pause(self) -> None:
        """Nothing is taken from the socket while what has come before has to wait."""
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
        """Bytes written that the socket has yet to take. asyncio's TLS counts those that it holds itself,
        and not those of the transport below it."""
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
        """A close waits until all is written."""
        self.close()
        self._watch_the_reader()

    def _end_late_head(self) -> None:
        if self._framing.unread:
            self._refuse(_LATE)
        else:  # it never said anything
            self.transport.abort()

    def _end_late_body(self) -> None:
        self._others.observer.refused(_LATE)
        self.transport.abort()

    # ---- ends --------------------------------------------------------------------------------------------

    def turn_away(self) -> None:
        """End a connection too many. Clients expect an answer behind their request: before it, or with the
        request unread, they would see a connection that was lost."""
        if self._refusal is not None and self._linger is None and not self.transport.is_closing():
            self._refuse(self._refusal)

    def _refuse(self, error: ApiError) -> None:
        """Answer what is no request, and close."""
        self._write_refusal(error)
        self.finish()

    def _write_refusal(self, error: ApiError) -> None:
        self._others.observer.refused(error)
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            if self.conn.our_state is h11.SEND_RESPONSE:  # the application has the request, and counts it
                assert self._exchange is not None
                self._exchange.scope[_REFUSED] = error.status
            else:
                self._others.observer.answered_by_connection(error.status)
            self.transport.write(error.raw_response())

    def finish(self) -> None:
        """Close when all is written. A client that may still be sending would be reset, and lose its answer
        unread: what it sends is dropped for a while first."""
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
        self._others.turns.leave(self)
        if self._exchange is not None:
            self._exchange.leave()
        try:
            if self.transport.can_write_eof():  # TLS has no half that could be closed alone
                self.transport.write_eof()
            self.transport.resume_reading()
        except OSError:  # the client is quicker, and gone
            self.transport.abort()


def refused_status(scope: Scope) -> int | None:
    """The status that the connection has answered in the application's place; None where it has not."""
    status: int | None = scope.get(_REFUSED)
    return status


def connection_of(scope: Scope) -> Connection | None:
    """The one that a request came on; None where the application is called in another way."""
    connection: Connection | None = scope.get("extensions", {}).get(EXTENSION)
    return connection


def _host_and_port(transport: asyncio.Transport, end: str) -> tuple[str, int | None] | None:
    """An `end` of a connection, "peername" or "sockname". A Unix socket has no address, or a path."""
    name = transport.get_extra_info(end)
    if isinstance(name, tuple):
        return name[0], name[1]
    return (name, None) if name else None

"""One request and its answer on an HTTP/1 connection: `receive` and `send` of the ASGI interface."""

from __future__ import annotations

import asyncio
import logging
import time
import types
from collections.abc import Callable, Coroutine, Generator
from email.utils import formatdate
from functools import lru_cache, partial
from http import HTTPStatus
from typing import Any, Protocol

import h11
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Scope

_BODY_AHEAD_BYTES = 64 * 1024
"""Most bytes of a body that are read before the application asks for them."""
_REASONS = {status.value: status.phrase.encode() for status in HTTPStatus}

log = logging.getLogger("phasewise.http")
"""Logs exceptions of the application, which are the server's faults, never errors of a client."""


class Outlet(Protocol):
    """The connection's interface for an exchange."""

    conn: h11.Connection
    writable: asyncio.Event
    """Cleared while the reader is behind."""

    def write(self, event: h11.Event) -> None: ...

    def body_taken(self) -> None:
        """Read more of the body: the application has taken what was there."""
        ...

    def answered(self) -> None:
        """Go on after the last byte of an answer."""
        ...

    def finish(self) -> None:
        """Close once all is written."""
        ...


class Exchange:
    """One request: the connection adds the body, the application receives it and sends the answer."""

    def __init__(self, outlet: Outlet, scope: Scope) -> None:
        self.scope = scope
        self.has_started = False
        """True once the head of the answer is written."""
        self.is_complete = False
        """True once the answer is written, or has no reader any more."""
        self.at_end: Callable[[], None] = lambda: None
        """Called once the application has ended."""
        self._outlet = outlet
        self._body = bytearray()
        self._more_body = True
        self._news = asyncio.Event()
        """Set while `receive` has something to return."""

    @property
    def is_owed(self) -> bool:
        """True from when the whole request has come until the whole answer is written."""
        return not (self._more_body or self.is_complete)

    @property
    def is_full(self) -> bool:
        """True while the body is not read on, because the application has yet to take some of it."""
        return len(self._body) > _BODY_AHEAD_BYTES and not self.is_complete

    def add(self, data: bytes | bytearray) -> None:
        """Append to the body."""
        self._body += data
        self._news.set()

    def end_body(self) -> None:
        self._more_body = False
        self._news.set()

    def wake(self) -> None:
        """Wake `receive`, though nothing more of the body has come."""
        self._news.set()

    def leave(self) -> None:
        """Mark the client as gone: what the application sends is dropped."""
        self.is_complete = True
        self._news.set()

    async def run(self, app: ASGIApp) -> None:
        """Run `app` on the request. If it fails, the client gets 500, or the answer breaks off."""
        try:
            await app(self.scope, self.receive, self.send)
            if not self.is_complete:
                log.error("the application has returned without a whole answer")
        except ClientDisconnect:
            pass
        except Exception:
            log.exception("the application has failed")
        if self.is_complete:
            return
        if self.has_started:
            self._outlet.finish()
            return
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close")]
        await self.send({"type": "http.response.start", "status": 500, "headers": headers})
        await self.send({"type": "http.response.body", "body": b"Internal Server Error"})

    async def receive(self) -> Message:
        if self._outlet.conn.they_are_waiting_for_100_continue and not self.is_complete:
            self._outlet.write(h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue"))
        if not self.is_complete:
            await self._news.wait()
            self._news.clear()
        if self.is_complete:
            return {"type": "http.disconnect"}
        body, self._body = bytes(self._body), bytearray()
        self._outlet.body_taken()
        return {"type": "http.request", "body": body, "more_body": self._more_body}

    async def send(self, message: Message) -> None:
        if not self._outlet.writable.is_set():
            await self._outlet.writable.wait()
        if self.is_complete:
            return
        if message["type"] != ("http.response.body" if self.has_started else "http.response.start"):
            raise RuntimeError(f"the application sends {message['type']!r} out of turn")
        if not self.has_started:
            self.has_started = True
            status = message["status"]
            headers = [_date(int(time.time())), *message.get("headers", [])]
            self._outlet.write(
                h11.Response(status_code=status, headers=headers, reason=_REASONS.get(status, b""))
            )
            return
        data = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        if message.get("more_body", False):
            self._outlet.write(h11.Data(data=data))
            return
        self.is_complete = True
        self._news.set()
        self._outlet.write(h11.Data(data=data))
        self._outlet.write(h11.EndOfMessage())
        self._outlet.answered()


@lru_cache(maxsize=1)
def _date(unix_s: int) -> tuple[bytes, bytes]:
    return b"date", formatdate(unix_s, usegmt=True).encode()


async def timed_steps(work: Coroutine[Any, Any, None], spent: Callable[[float], None]) -> None:
    """Run `work`, then call `spent` with the seconds of loop time that its steps took together."""
    await _steps(work, spent)


@types.coroutine
def _steps(work: Coroutine[Any, Any, None], spent: Callable[[float], None]) -> Generator[Any, Any, None]:
    step: Callable[[], Any] = partial(work.send, None)
    seconds = 0.0
    try:
        while True:
            began_s = time.perf_counter()
            try:
                awaited = step()
            except StopIteration:
                return
            finally:
                seconds += time.perf_counter() - began_s
            try:
                sent = yield awaited
            except BaseException as error:
                step = partial(work.throw, error)
            else:
                step = partial(work.send, sent)
    finally:
        spent(seconds)

"""Signs of life of an answer that says nothing for long, so that clients and proxies do not give up.

Streams have theirs in the form of their API: a comment, a `ping`, or a space before the next line of JSON,
which every reader of lines skips. An answer that is sent whole has none unless its request asks for spaces
before the JSON: its status is then sent before it is known, and a failure has the status 200.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from phasewise.serving.errors import ServingError
from phasewise.serving.http.errors import ClientLeft, from_engine

COMMENTS_HEADER = "X-Stream-Comments"
"""`off`: a request's stream has no signs of life, and its head waits for the first token."""
WHITESPACE_HEADER = "X-Json-Whitespace"
"""`on`: an answer that is sent whole begins with spaces while it is made."""
COMMENT = b": keep-alive\n\n"
SPACE = b" "


def minds_signs(request: Request) -> bool:
    """True if the stream shall have none."""
    return request.headers.get(COMMENTS_HEADER) == "off"


def bears_whitespace(request: Request) -> bool:
    """True if the answer may begin with spaces."""
    return request.headers.get(WHITESPACE_HEADER) == "on"


class Chunks(Protocol):
    """The connection of an answer in chunks."""

    @property
    def sends_chunks(self) -> bool: ...

    def write_chunk(self, body: bytes) -> bool: ...


class SignsOfLife:
    """`sign` in a stream that says nothing else, before twice `every_s` are over. On the event loop."""

    def __init__(self, connection: Chunks, sign: bytes, every_s: float, *, has_spoken: bool) -> None:
        self.has_spoken = has_spoken
        """True if the stream has said something since this looked last."""
        self._connection = connection
        self._sign = sign
        self._every_s = every_s
        self._loop = asyncio.get_running_loop()
        self._look()

    def end(self) -> None:
        """No more of them: the stream has ended."""
        self._timer.cancel()

    def _look(self) -> None:
        if not self.has_spoken and self._connection.sends_chunks:
            self._connection.write_chunk(self._sign)
        self.has_spoken = False
        self._timer = self._loop.call_later(self._every_s, self._look)


class SpacedJson(Response):
    """A body that is still being made, behind a space for every `every_s` that this takes."""

    def __init__(self, making: asyncio.Task[bytes], every_s: float, path: str) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = "application/json"
        self.init_headers({"Cache-Control": "no-cache"})
        self._making = making
        self._every_s = every_s
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not self._making.done():
                await send({"type": "http.response.body", "body": SPACE, "more_body": True})
                await asyncio.wait((self._making,), timeout=self._every_s)
            await send({"type": "http.response.body", "body": self._body(), "more_body": False})
        finally:
            self._making.cancel()

    def _body(self) -> bytes:
        try:
            return self._making.result()
        except ClientLeft:
            return b""
        except ServingError as error:
            return bytes(from_engine(error).response(self._path).body)

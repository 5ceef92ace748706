"""Requests that hold models: what they hold is released when they end, and streams are told that they wait.

A stream whose model is being loaded begins with status 200 and signs of life. What its route answers then
goes on from there: the head is left out, and a refusal is told as its API tells failures within a stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phasewise.serving.http.answers.message_events import MessageEvents
from phasewise.serving.http.answers.ollama_lines import MEDIA_TYPE
from phasewise.serving.http.answers.openai_objects import EVENT_STREAM
from phasewise.serving.http.answers.signs_of_life import COMMENT, SPACE
from phasewise.serving.http.requests.request_threads import while_there

_PLACE = "phasewise.while_loading"
"""The place in an ASGI scope of its `WhileLoading`."""

Made = TypeVar("Made")


class WhileLoading:
    """One request, between its model and its answer."""

    def __init__(self, path: str, send: Send) -> None:
        self.keep_s: float | None = None
        """The time that its model shall stay unused; None: the server's."""
        self._send = send
        self._is_messages = path.startswith("/v1/messages")
        self._is_lines = path.startswith("/api/")
        self._has_begun = False
        self._failure = bytearray()
        self._has_failed = False
        self._releases: list[Callable[[float | None], None]] = []

    def holds(self, release: Callable[[float | None], None]) -> None:
        """`release` is called at the end, with `keep_s`."""
        self._releases.append(release)

    def end(self) -> None:
        for release in self._releases:
            release(self.keep_s)
        self._releases.clear()

    async def wait(self, request: Request, work: Awaitable[Made], every_s: float | None) -> Made:
        """The result of `work`, a sign of life for every `every_s` before it; None: no signs. ClientLeft."""
        making = asyncio.ensure_future(while_there(request, work))
        try:
            while not making.done():
                await asyncio.wait((making,), timeout=every_s)
                if not making.done():
                    await self._sign()
            return await making
        finally:
            making.cancel()

    async def send(self, message: Message) -> None:
        """A message of the route."""
        if not self._has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._has_failed = message["status"] != 200
        elif not self._has_failed:
            await self._send(message)
        else:
            self._failure += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send({"type": "http.response.body", "body": self._told(), "more_body": False})

    async def _sign(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            media_type = MEDIA_TYPE if self._is_lines else f"{EVENT_STREAM}; charset=utf-8"
            headers = [(b"content-type", media_type.encode()), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        sign = SPACE if self._is_lines else MessageEvents.sign_of_life if self._is_messages else COMMENT
        await self._send({"type": "http.response.body", "body": sign, "more_body": True})

    def _told(self) -> bytes:
        """The refusal, as a stream of this API has it."""
        failure = json.dumps(json.loads(self._failure), ensure_ascii=False)
        if self._is_lines:
            return f"{failure}\n".encode()
        event = "event: error\n" if self._is_messages else ""
        return f"{event}data: {failure}\n\n".encode()


def while_loading(request: Request) -> WhileLoading:
    """That of this request."""
    own: WhileLoading = request.scope[_PLACE]
    return own


def keep_for(request: Request, keep_s: float | None) -> None:
    """Its model shall stay unused for this time; None: for the server's. Models that are kept just stay."""
    own: WhileLoading | None = request.scope.get(_PLACE)
    if own is not None:
        own.keep_s = keep_s


class HoldModels:
    """Middleware: each request may hold models until its answer is sent."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = WhileLoading(scope["path"], send)
        try:
            await self._app({**scope, _PLACE: own}, receive, own.send)
        finally:
            own.end()

"""What stands before every route: the key, and the count of answers. Plain ASGI callables."""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.metrics import Metrics

_OPEN_PATHS = frozenset({"/health"})


class RequireKey:
    """401 unless the request carries one of `keys` as a bearer token. Health stays open."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._allows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "an API key is needed: send the header Authorization: Bearer KEY"
        await ApiError(401, message, code="invalid_api_key").response()(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token.strip().encode("latin-1", "replace")
        matches = [
            secrets.compare_digest(given, key) for key in self._keys
        ]  # all, so that time tells nothing
        return scheme.lower() == "bearer" and any(matches)


class CountAnswers:
    """Counts answers by path and status; paths that do not exist count as one."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: frozenset[str]) -> None:
        self._app = app
        self._metrics = metrics
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.http.labels(path, message["status"]).inc()
            await send(message)

        await self._app(scope, receive, counted)

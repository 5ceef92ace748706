"""What stands before every route: the key, and the count of answers. Plain ASGI callables."""

from __future__ import annotations

import hashlib
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.metrics import Metrics

_OPEN_PATHS = frozenset({"/health", "/ready"})


class RequireKey:
    """401 unless the request carries one of `keys` as a bearer token. Health and readiness stay open."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...], metrics: Metrics) -> None:
        self._app = app
        self._keys = tuple(_digest(key.encode()) for key in keys)
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _OPEN_PATHS or self._allows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = "an API key is needed: send the header Authorization: Bearer KEY"
        error = ApiError(401, message, code="invalid_api_key")
        self._metrics.refused(error)
        await error.response()(scope, receive, send)

    def _allows(self, headers: Headers) -> bool:
        """Compares digests, all of them, so that time tells nothing of a key, nor its length."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = _digest(token.strip().encode("latin-1", "replace"))
        matches = [secrets.compare_digest(given, key) for key in self._keys]
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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()

"""Replacements of uvicorn's classes: the flow of a body, the transport of an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol
from urllib.parse import unquote

import h11
from uvicorn.protocols.http.flow_control import FlowControl

ASGI_SPEC_VERSION = "2.3"


class Flow(FlowControl):
    """Tells its connection when the body in progress may be read on: bytes may have come before."""

    def __init__(self, transport: asyncio.Transport, changed: Callable[[], None]) -> None:
        super().__init__(transport)
        self._changed = changed

    def pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self._changed()

    def resume_reading(self) -> None:
        if self.read_paused:
            self.read_paused = False
            self._changed()


class Endable(Protocol):
    """A connection, as its `Outlet` knows it."""

    transport: asyncio.Transport

    @property
    def is_ending(self) -> bool: ...

    def finish(self) -> None: ...


class Outlet:
    """The transport, as an answer in progress sees it.

    Its close waits for a client that still sends, and what is written after the end is dropped.
    """

    def __init__(self, connection: Endable) -> None:
        self._connection = connection

    def write(self, data: bytes) -> None:
        if not self._connection.is_ending:
            self._connection.transport.write(data)

    def is_closing(self) -> bool:
        return self._connection.is_ending or self._connection.transport.is_closing()

    def close(self) -> None:
        self._connection.finish()


def scope_of(request: h11.Request, headers: list[tuple[bytes, bytes]]) -> dict[str, Any]:
    """The facts of a request itself in an ASGI scope."""
    raw_path, _, query = request.target.partition(b"?")
    return {
        "type": "http",
        "http_version": request.http_version.decode("ascii"),
        "method": request.method.decode("ascii"),
        "root_path": "",
        "path": unquote(raw_path.decode("ascii")),
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
        "state": {},
    }

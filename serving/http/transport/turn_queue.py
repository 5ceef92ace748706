"""Connections that have more to read than a little, one turn for each in every round of the event loop."""

from __future__ import annotations

import asyncio
from typing import Protocol


class TurnTaker(Protocol):
    """A client of a turn queue."""

    loop: asyncio.AbstractEventLoop

    def turn(self) -> None:
        """Read for a bounded time."""
        ...


class TurnQueue:
    """However many connections wait, a short request that comes beside them waits for one turn."""

    def __init__(self) -> None:
        self._waiting: dict[TurnTaker, None] = {}
        self._runs = False

    def join(self, reader: TurnTaker) -> None:
        """Wait behind all others; a connection that waits already keeps its place."""
        self._waiting.setdefault(reader)
        if not self._runs:
            self._runs = True
            reader.loop.call_soon(self._next)

    def leave(self, reader: TurnTaker) -> None:
        self._waiting.pop(reader, None)

    def __contains__(self, reader: TurnTaker) -> bool:
        return reader in self._waiting

    def _next(self) -> None:
        self._runs = False
        if not self._waiting:
            return
        first = next(iter(self._waiting))
        del self._waiting[first]
        try:
            first.turn()
        finally:
            if self._waiting and not self._runs:
                self._runs = True
                first.loop.call_soon(self._next)

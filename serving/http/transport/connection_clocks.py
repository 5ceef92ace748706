"""Time limits of a connection's waits for its client: for a head, for a body, for a reader of what was
written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Awaited = tuple[float, Callable[[], None]]
"""Seconds, and what is called when they are over."""


class ConnectionClocks:
    """The clocks of one connection. At most one of each kind runs."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._awaited: Awaited | None = None
        self._late: asyncio.TimerHandle | None = None
        self._stalled: asyncio.TimerHandle | None = None

    def wait_for(self, awaited: Awaited | None) -> None:
        """Start the clock of what is awaited from the client now; one that runs for the same goes on."""
        if awaited == self._awaited:
            return
        self._awaited = awaited
        _stop(self._late)
        if awaited is not None:
            self._late = self._loop.call_later(*awaited)

    def watch_reader(self, seconds: float, n_left: Callable[[], int], cut: Callable[[], None]) -> None:
        """Call `cut` once nothing of the `n_left` bytes was taken for `seconds`. A slow reader may go on."""
        self.forget_reader()
        n_before = n_left()

        def look() -> None:
            n_now = n_left()
            if n_now and n_now >= n_before:
                cut()
            elif n_now:
                self.watch_reader(seconds, n_left, cut)

        self._stalled = self._loop.call_later(seconds, look)

    def forget_reader(self) -> None:
        _stop(self._stalled)

    def stop(self) -> None:
        """Stop all clocks."""
        _stop(self._late)
        _stop(self._stalled)


def _stop(clock: asyncio.TimerHandle | None) -> None:
    if clock is not None:
        clock.cancel()

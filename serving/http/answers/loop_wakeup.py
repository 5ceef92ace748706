"""Waking an event loop from another thread without a switch of threads."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_add_to_eventfd = ctypes.PyDLL(None).eventfd_write
"""eventfd(2) through ctypes. A `PyDLL` call keeps the GIL."""
_add_to_eventfd.argtypes = (ctypes.c_int, ctypes.c_uint64)


class LoopWakeup:
    """`wake` makes `loop` call `on_wake`; several calls of `wake` before that make one call.

    `call_soon_threadsafe` releases the GIL to write to a socket. The loop's thread then takes the GIL, and
    the calling thread goes on only when the loop is idle, or after half a millisecond. Writing to an
    eventfd without releasing the GIL avoids that.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_wake: Callable[[], None]) -> None:
        self._on_wake = on_wake
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._eventfd, self._woken)

    def wake(self) -> None:
        """May be called from any thread before `close`; has no effect once the loop has ended."""
        _add_to_eventfd(self._eventfd, 1)

    def close(self) -> None:
        os.close(self._eventfd)

    def _woken(self) -> None:
        os.eventfd_read(self._eventfd)
        self._on_wake()

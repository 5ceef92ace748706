"""Waking an event loop from a thread that has better things to do than to wait for it."""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable

_add_to_eventfd = ctypes.PyDLL(None).eventfd_write
"""eventfd(2), by way of ctypes: through `PyDLL` a thread keeps Python's lock while it calls."""
_add_to_eventfd.argtypes = (ctypes.c_int, ctypes.c_uint64)


class Bell:
    """After `ring`, `on_ring` is called on `loop`; once for several rings that come before it.

    `call_soon_threadsafe` lets go of Python's lock to write to a socket. The loop, awake by then, takes it,
    and whoever rang goes on when the loop has nothing left to do, or half a millisecond later.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_ring: Callable[[], None]) -> None:
        self._on_ring = on_ring
        self._eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._eventfd, self._heard)

    def ring(self) -> None:
        """From any thread, before `close`; nobody hears it once the loop has ended."""
        _add_to_eventfd(self._eventfd, 1)

    def close(self) -> None:
        os.close(self._eventfd)

    def _heard(self) -> None:
        os.eventfd_read(self._eventfd)
        self._on_ring()

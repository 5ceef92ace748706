"""Bodies of requests that have not come whole: how much memory all of them may hold together.

A sender decides when its body ends. Were each body limited alone, a few hundred senders that never end theirs
would hold gigabytes. So there is a total, and where one more piece does not fit, the body that began first
makes room: a client that sends without pause is done long before its body is the oldest.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from dataclasses import dataclass, field

_MAP_FROM_BYTES = 64 * 1024
"""Smaller bodies lie in malloc's heap. Larger ones have pages of their own, which go back to the system."""


@dataclass(slots=True)
class UnfinishedBodies:
    """Those of one server, at most `max_bytes` together."""

    max_bytes: int
    n_bytes: int = 0
    _bodies: dict[UnfinishedBody, None] = field(default_factory=dict)
    """In the order in which they began."""

    def begin(self, most_bytes: int, wake: Callable[[], None]) -> UnfinishedBody:
        """A body of at most `most_bytes`. `wake` is called when it has had to make room."""
        body = UnfinishedBody(self, most_bytes, wake)
        self._bodies[body] = None
        return body

    def _make_room(self, n_bytes: int, newcomer: UnfinishedBody) -> bool:
        """True if `newcomer` may have `n_bytes` more; False: it was the oldest, and has ended."""
        while self.n_bytes + n_bytes > self.max_bytes:
            oldest = next((body for body in self._bodies if body.n_bytes), newcomer)
            oldest.end()
            if oldest is newcomer:
                return False
            oldest.wake()
        return True

    def _forget(self, body: UnfinishedBody) -> None:
        self._bodies.pop(body, None)
        self.n_bytes -= body.n_bytes


class UnfinishedBody:
    """One of `all_`. `end` gives its memory back, and must be called."""

    __slots__ = ("_all", "_heap", "_mapped", "_most_bytes", "ended", "n_bytes", "wake")

    def __init__(self, all_: UnfinishedBodies, most_bytes: int, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.n_bytes = 0
        self.ended = False
        """Its bytes are gone; others needed the room, where its owner did not say so."""
        self._all = all_
        self._most_bytes = most_bytes
        self._heap = bytearray()
        self._mapped: mmap.mmap | None = None

    def add(self, part: bytes) -> None:
        """One more piece; nothing happens once the body has `ended`."""
        if self.ended:
            return
        assert self.n_bytes + len(part) <= self._most_bytes
        if not self._all._make_room(len(part), self):
            return
        if self._mapped is None and self.n_bytes + len(part) > _MAP_FROM_BYTES:
            # No page of it exists before it is written.
            self._mapped = mmap.mmap(-1, self._most_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            self._mapped.write(self._heap)
            self._heap = bytearray()
        if self._mapped is None:
            self._heap += part
        else:
            self._mapped.write(part)
        self.n_bytes += len(part)
        self._all.n_bytes += len(part)

    def whole(self) -> bytes:
        """All that was added."""
        return bytes(self._heap) if self._mapped is None else self._mapped[: self.n_bytes]

    def end(self) -> None:
        """Give the memory back; a second time is no more than once."""
        if self.ended:
            return
        self._all._forget(self)
        self.ended = True
        self.n_bytes = 0
        self._heap = bytearray()
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None

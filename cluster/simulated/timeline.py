"""Simulated time: actions at instants, run in order. Equal instants run in the order they were scheduled."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Timeline:
    """A clock that only events move. Seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, Action]] = []

    def at(self, at_s: float, action: Action) -> None:
        """Run `action` at `at_s`, which must not lie in the past."""
        if at_s < self.now_s:
            raise ValueError(f"an event at {at_s} s would lie before now, {self.now_s} s")
        self._serial += 1
        heappush(self._heap, (at_s, self._serial, action))

    def run(self) -> None:
        """Run every event, and those that they schedule, to the last."""
        heap = self._heap
        while heap:
            self.now_s, _, action = heappop(heap)
            action()

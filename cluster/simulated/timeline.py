"""Simulated time: actions at instants, run in order. Equal instants run in the order they were scheduled."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

Action = Callable[[], None]


class Event:
    """A scheduled action. `action` is None once the event is cancelled."""

    __slots__ = ("action", "at_s")

    def __init__(self, at_s: float, action: Action) -> None:
        self.at_s = at_s
        self.action: Action | None = action

    def cancel(self) -> None:
        self.action = None


class Timeline:
    """A clock that only events move. Seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, Event]] = []

    def at(self, at_s: float, action: Action) -> Event:
        """Run `action` at `at_s`, which must not lie in the past."""
        if at_s < self.now_s:
            raise ValueError(f"an event at {at_s} s would lie before now, {self.now_s} s")
        event = Event(at_s, action)
        self._serial += 1
        heappush(self._heap, (at_s, self._serial, event))
        return event

    def run(self) -> None:
        """Run every event, and those that they schedule, to the last."""
        heap = self._heap
        while heap:
            at_s, _, event = heappop(heap)
            action = event.action
            if action is not None:
                self.now_s = at_s
                action()

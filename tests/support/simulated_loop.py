"""An event loop on simulated time: waiting takes no time, and what is written for asyncio runs unchanged."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Made = TypeVar("Made")


class SimulatedLoop(asyncio.SelectorEventLoop):
    """`time` begins at 0 and goes to the next timer as soon as nothing else can run."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_Skipping(self))

    def time(self) -> float:
        return self._now_s

    def skip(self, seconds: float) -> None:
        """Let time pass while nothing runs: by itself, or as a loop that is kept from running."""
        self._now_s += seconds


class _Skipping(selectors.SelectSelector):
    def __init__(self, loop: SimulatedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everything waits, and nothing will come"
            self._loop.skip(max(0.0, timeout))
        return ready


def run_simulated(work: Coroutine[Any, Any, Made]) -> Made:
    """As `asyncio.run`, on simulated time."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        return runner.run(work)

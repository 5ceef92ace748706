"""A thread for work that holds Python's lock for milliseconds, which rests between one work and the next."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar

Made = TypeVar("Made")

REST = 3.0
"""Rest over work. The event loop has Python's lock to itself for at least three quarters of the time, so that
a short request beside large ones seldom waits for the lock."""


class RestedThread:
    """Runs one work at a time, in the order of arrival, used on one event loop.

    Work that comes while the thread rests waits; the first after a rest does not. The rest is REST times the
    processor time that the work took, whether or not its client still waits for it.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        """executor: where it runs; None: on a thread of the event loop's."""
        self._free = asyncio.Semaphore(1)
        self._executor = executor

    async def run(self, work: Callable[[], Made], before: Callable[[], None] | None = None) -> Made:
        """Return the result of `work`. `before` runs on the loop at its turn; if it raises, the turn passes
        on.
        """
        spent_s = 0.0

        def timed() -> Made:
            nonlocal spent_s
            began_s = time.thread_time()
            try:
                return work()
            finally:
                spent_s = time.thread_time() - began_s

        def rest(ended: asyncio.Future[Made]) -> None:
            if not ended.cancelled():
                ended.exception()  # its client may have left
            loop.call_later(REST * spent_s, self._free.release)

        await self._free.acquire()
        try:
            if before is not None:
                before()
            loop = asyncio.get_running_loop()
            done = loop.run_in_executor(self._executor, timed)
        except BaseException:
            self._free.release()
            raise
        done.add_done_callback(rest)
        return await asyncio.shield(done)

"""A few threads for the work of many clients, which take turns."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from phasewise.serving.errors import QueueFull
from phasewise.serving.scheduling.waiting_line import ClientTurns

Made = TypeVar("Made")


class FairLane:
    """`n_threads` jobs run at a time, and at most `most_waiting` wait. Used on one event loop. Where too many
    wait, the last job of the client with most jobs is refused, so no client can keep another one out."""

    def __init__(self, name: str, n_threads: int, most_waiting: int) -> None:
        self._name = name
        self._n_threads = n_threads
        self._most_waiting = most_waiting
        self._executor = ThreadPoolExecutor(n_threads, thread_name_prefix=f"phasewise-{name}")
        self._n_running = 0
        self._waiting: ClientTurns[asyncio.Future[None]] = ClientTurns()

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    async def run(self, client: str, work: Callable[[], Made]) -> Made:
        """Return the result of `work`, run on a thread once it is this client's turn. QueueFull: too many
        wait. A cancelled wait leaves the queue; work that has begun goes on, and holds its thread until it
        ends."""
        loop = asyncio.get_running_loop()
        if self._n_running < self._n_threads:
            self._n_running += 1
        else:
            await self._turn(client, loop)
        done = loop.run_in_executor(self._executor, work)
        done.add_done_callback(self._next)
        return await asyncio.shield(done)

    def close(self) -> None:
        """Work that waits for a thread is dropped."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, client: str, loop: asyncio.AbstractEventLoop) -> None:
        if self.n_waiting >= self._most_waiting:
            self._refuse_one_for(client)
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.join(client, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._pass_on()  # the turn came after its client had left
            else:
                with suppress(ValueError):  # it was refused
                    self._waiting.remove(client, turn)
            raise

    def _refuse_one_for(self, client: str) -> None:
        """Make room for one more job of `client`; QueueFull where its own queue is the longest."""
        longest = self._waiting.longest
        if longest is None or self._waiting.count(longest) <= self._waiting.count(client) + 1:
            raise self._full()
        last = self._waiting.take_last(longest)
        if not last.done():
            last.set_exception(self._full())

    def _full(self) -> QueueFull:
        return QueueFull(f"too many requests wait for their {self._name}; try again later", 1)

    def _next(self, done: asyncio.Future[Made]) -> None:
        if not done.cancelled():
            done.exception()  # the client that asked for it may have left
        self._pass_on()

    def _pass_on(self) -> None:
        """The thread that has become free goes to the client that has waited longest for a turn."""
        while self._waiting:
            turn = self._waiting.take()
            if not turn.done():
                turn.set_result(None)
                return
        self._n_running -= 1


REST = 3.0
"""Rest over work. The event loop has Python's lock to itself for at least three quarters of the time, so that
a short request beside large ones seldom waits for the lock."""


class RestedThread:
    """Runs one work at a time, in the order of arrival, used on one event loop. Work that comes while the
    thread rests waits; the first after a rest does not. The rest is REST times the processor time that the
    work took, whether or not its client still waits for it."""

    def __init__(self, executor: Executor | None = None) -> None:
        """executor: where it runs; None: on a thread of the event loop's."""
        self._free = asyncio.Semaphore(1)
        self._executor = executor

    async def run(self, work: Callable[[], Made], before: Callable[[], None] | None = None) -> Made:
        """Return the result of `work`. `before` runs on the loop at its turn; if it raises, the turn passes
        on."""
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

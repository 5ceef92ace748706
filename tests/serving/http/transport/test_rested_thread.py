"""The thread of large bodies: one work at a time, a rest after each, nothing lost where a client leaves."""

from __future__ import annotations

import asyncio
import threading
import time
from itertools import pairwise

import pytest

from phasewise.serving.http.transport.rested_thread import REST, RestedThread

WORK_S = 0.02
CLOCK_S = 0.002
"""The event loop's clock may ring this much early."""


def busy() -> tuple[float, float, float]:
    """When it began and ended, and the processor time that it took."""
    began_s, from_s = time.monotonic(), time.thread_time()
    while time.thread_time() - from_s < WORK_S:
        pass
    return began_s, time.monotonic(), time.thread_time() - from_s


def test_works_do_not_overlap_and_each_is_followed_by_its_rest() -> None:
    async def three() -> list[tuple[float, float, float]]:
        thread = RestedThread()
        return await asyncio.gather(*(thread.run(busy) for _ in range(3)))

    worked = asyncio.run(three())

    for (_, ended_s, spent_s), (began_s, _, _) in pairwise(worked):
        assert began_s >= ended_s + REST * spent_s - CLOCK_S


def test_what_work_raises_reaches_its_caller_and_the_next_has_its_turn() -> None:
    async def two() -> str:
        thread = RestedThread()
        with pytest.raises(ZeroDivisionError):
            await thread.run(lambda: 1 // 0)
        return await thread.run(lambda: "next")

    assert asyncio.run(two()) == "next"


def test_a_turn_that_is_given_up_goes_to_the_next() -> None:
    def refuse() -> None:
        raise ValueError("no longer wanted")

    async def two() -> str:
        thread = RestedThread()
        with pytest.raises(ValueError, match="no longer wanted"):
            await thread.run(lambda: "never", before=refuse)
        return await thread.run(lambda: "next")

    assert asyncio.run(two()) == "next"


def test_a_client_that_leaves_does_not_let_the_next_work_run_beside_its_own() -> None:
    running = threading.Semaphore(1)

    def alone() -> bool:
        is_alone = running.acquire(blocking=False)
        time.sleep(WORK_S)
        running.release()
        return is_alone

    async def scene() -> bool:
        thread = RestedThread()
        left = asyncio.ensure_future(thread.run(alone))
        await asyncio.sleep(WORK_S / 4)
        left.cancel()
        return await thread.run(alone)

    assert asyncio.run(scene())

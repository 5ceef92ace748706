"""Threads that clients share by turns: none is kept out by another's jobs."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.errors import QueueFull
from phasewise.serving.http.requests.fair_lane import FairLane
from tests.support.tiers import examples


@contextmanager
def lane(n_threads: int = 1, most_waiting: int = 100) -> Iterator[FairLane]:
    fair_lane = FairLane("work", n_threads, most_waiting)
    try:
        yield fair_lane
    finally:
        fair_lane.close()


async def _queued(fair_lane: FairLane, clients: str, blocked: threading.Event) -> list[str]:
    """The order in which jobs are done that were asked for in the order of `clients`, all behind another."""
    done: list[str] = []
    first = asyncio.ensure_future(fair_lane.run("first", blocked.wait))
    await asyncio.sleep(0)
    rest = [
        asyncio.ensure_future(fair_lane.run(client, lambda c=client: done.append(c)))  # type: ignore[misc]
        for client in clients
    ]
    await asyncio.sleep(0)
    blocked.set()
    await asyncio.gather(first, *rest)
    return done


@examples(30)
@given(clients=st.text("abcd", min_size=1, max_size=30))
def test_clients_take_turns(clients: str) -> None:
    """After k rounds each client has had k jobs done, or all it had."""
    with lane() as fair_lane:
        done = asyncio.run(_queued(fair_lane, clients, threading.Event()))

    had = Counter(clients)
    assert Counter(done) == had
    for n_done in range(len(done)):
        so_far = Counter(done[:n_done])
        unfinished = [so_far[client] for client in had if so_far[client] < had[client]]
        assert not unfinished or max(so_far.values(), default=0) - min(unfinished) <= 1


def test_no_more_jobs_run_than_there_are_threads() -> None:
    running, most, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        threading.Event().wait(0.005)
        with lock:
            running -= 1

    async def all_of_them() -> None:
        await asyncio.gather(*(fair_lane.run(str(index % 3), work) for index in range(30)))

    with lane(n_threads=2) as fair_lane:
        asyncio.run(all_of_them())

    assert most == 2


def test_where_too_many_wait_the_longest_queue_gives_way() -> None:
    async def scene() -> tuple[list[bool], bool]:
        blocked = threading.Event()
        first = asyncio.ensure_future(fair_lane.run("first", blocked.wait))
        await asyncio.sleep(0)
        greedy = [asyncio.ensure_future(fair_lane.run("greedy", bool)) for _ in range(6)]
        await asyncio.sleep(0)
        modest = asyncio.ensure_future(fair_lane.run("modest", bool))
        await asyncio.sleep(0)
        blocked.set()
        ended = await asyncio.gather(*greedy, return_exceptions=True)
        await first
        return [isinstance(outcome, QueueFull) for outcome in ended], await modest

    with lane(most_waiting=4) as fair_lane:
        refused, modest = asyncio.run(scene())

    assert refused == [False, False, False, True, True, True]
    assert modest is False


def test_a_wait_that_is_given_up_leaves_the_queue() -> None:
    async def scene() -> int:
        blocked = threading.Event()
        first = asyncio.ensure_future(fair_lane.run("first", blocked.wait))
        await asyncio.sleep(0)
        waiting = asyncio.ensure_future(fair_lane.run("a", pytest.fail))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        left = fair_lane.n_waiting
        blocked.set()
        await first
        assert await fair_lane.run("b", lambda: 7) == 7
        return left

    with lane() as fair_lane:
        assert asyncio.run(scene()) == 0


def test_work_that_fails_frees_its_thread() -> None:
    def fail() -> None:
        raise ValueError("mine")

    async def scene() -> int:
        for _ in range(3):
            with pytest.raises(ValueError, match="mine"):
                await fair_lane.run("a", fail)
        return await fair_lane.run("a", lambda: 7)

    with lane() as fair_lane:
        assert asyncio.run(scene()) == 7

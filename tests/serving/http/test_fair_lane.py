"""Threads and the event loop that clients share by turns: none is kept out by another's work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from phasewise.serving.errors import QueueFull
from phasewise.serving.http.errors import ClientLeft
from phasewise.serving.http.requests.body import REST, RestedThread
from phasewise.serving.http.requests.request_threads import FairLane, while_there
from phasewise.serving.http.transport.connections import UNKNOWN, VOUCHED, Allowance, LoopShare, Standing
from phasewise.serving.sandbox.confined import CancelToken
from tests.support.servers.rude_clients import ENOUGH_S
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


COST_S = 0.001


def used_s(n_connections: int, seconds: float, standing: Standing) -> float:
    """Loop time that connections get which always want more."""
    share = LoopShare()
    free_at: dict[Allowance, float] = {}
    for _ in range(n_connections):
        new_allowance = share.allowance(0.0)
        if standing is VOUCHED:
            new_allowance.mark_answered()
        free_at[new_allowance] = 0.0
    used, now_s = 0.0, 0.0
    while now_s < seconds:
        earliest = min(free_at, key=lambda allowance: free_at[allowance])
        now_s = max(now_s, free_at[earliest])
        free_at[earliest] = now_s + earliest.charge(COST_S, now_s)
        used += COST_S
    return used


@pytest.mark.many
@pytest.mark.parametrize("standing", [UNKNOWN, VOUCHED])
@pytest.mark.parametrize("n_connections", [1, 3, 16, 200])
def test_all_together_get_their_bursts_and_their_rate(n_connections: int, standing: Standing) -> None:
    seconds = 60.0
    rate = min(standing.together, n_connections * standing.per_connection)
    most_s = n_connections * (standing.burst_s + 2 * COST_S) + seconds * rate

    used = used_s(n_connections, seconds, standing)

    assert 0.9 * seconds * rate <= used <= 1.01 * most_s


def test_who_asks_now_and_then_never_waits_however_many_ask_all_the_time() -> None:
    share = LoopShare()
    greedy = [share.allowance(0.0) for _ in range(100)]
    modest = share.allowance(0.0)
    for tenth in range(100):
        now_s = tenth / 10
        for allowance in greedy:
            allowance.charge(COST_S, now_s)
        if tenth % 10 == 0:
            assert modest.charge(COST_S / 2, now_s) == 0.0


def test_connections_that_are_opened_anew_gain_nothing() -> None:
    """Each uses up what a new one has, is closed, and the next one comes."""
    share, seconds, n_connections = LoopShare(), 60.0, 0
    used = now_s = 0.0
    while now_s < seconds:
        allowance = share.allowance(now_s)
        n_connections += 1
        while allowance.charge(COST_S, now_s) == 0.0:
            used += COST_S
        allowance.end()
        now_s += 0.01

    assert used <= 0.1 + seconds * UNKNOWN.together + n_connections * 2 * COST_S


def test_an_ended_connection_divides_nothing() -> None:
    share = LoopShare()
    others = [share.allowance(0.0) for _ in range(50)]
    for other in others:
        other.charge(COST_S, 0.0)
        other.end()
    alone = share.allowance(0.0)

    while not (wait_s := alone.charge(COST_S, 0.0)):
        pass
    assert 0 < wait_s <= COST_S / UNKNOWN.per_connection


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


@pytest.mark.parametrize("how", ["the client leaves", "the wait is cancelled"])
def test_work_that_nobody_waits_for_is_told_to_end(how: str) -> None:
    """A batch that is cancelled cancels its requests: their grammars need not be compiled."""
    cancel, begun = CancelToken(), threading.Event()

    async def scene() -> None:
        left, lane = asyncio.Event(), FairLane("work", 1, 10)
        loop = asyncio.get_running_loop()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        def work() -> None:
            begun.set()
            ended.wait(ENOUGH_S)

        ended = threading.Event()
        waiting = asyncio.ensure_future(
            while_there(Request({"type": "http"}, receive), lane.run("a", work), cancel)
        )
        assert await loop.run_in_executor(None, begun.wait, ENOUGH_S)
        if how == "the client leaves":
            left.set()
        else:
            waiting.cancel()
        with pytest.raises(ClientLeft if how == "the client leaves" else asyncio.CancelledError):
            await waiting
        assert cancel.ended
        ended.set()
        lane.close()

    asyncio.run(scene())

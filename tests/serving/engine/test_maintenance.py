"""The thread that does what no request waits for."""

from __future__ import annotations

import threading

import pytest

from phasewise.serving.engine.open_engine import Maintenance
from phasewise.serving.pools.contract import Demand, PoolSettings
from phasewise.serving.pools.opening import open_pool


def test_a_chore_is_done_until_the_end_and_not_after() -> None:
    done = threading.Semaphore(0)
    calls: list[str] = []

    def chore() -> None:
        calls.append(threading.current_thread().name)
        done.release()

    with Maintenance(chore, period_s=0.001):
        assert all(done.acquire(timeout=60) for _ in range(3))

    n_calls = len(calls)
    assert set(calls) == {"phasewise-maintenance"}
    assert not done.acquire(timeout=0.02) or len(calls) == n_calls


def test_a_failing_chore_is_told_at_the_end() -> None:
    failed = threading.Event()

    def chore() -> None:
        failed.set()
        raise ValueError("no more bounds")

    maintenance = Maintenance(chore, period_s=0.001)
    maintenance.start()
    assert failed.wait(60)

    with pytest.raises(ValueError, match="no more bounds"):
        maintenance.close()
    maintenance.close()


def test_bounds_are_learnt_beside_a_pool_in_use() -> None:
    """Requests begin and end on one thread while another learns: no length is lost, no slot either."""
    pool = open_pool("odma", 4096, PoolSettings(400, refresh_every=1))
    with Maintenance(pool.refresh, period_s=0.0001):
        for turn in range(3000):
            answer = 1 + turn * 7 % 300
            assert pool.reserve("a", Demand(10, 10 + answer, 10)) is not None
            assert pool.grow("a", 10 + answer) is not None
            pool.release("a", answer)
        pool.check()

    pool.refresh()
    assert pool.stats().refreshes > 0
    assert pool.stats().slots_free == 4096

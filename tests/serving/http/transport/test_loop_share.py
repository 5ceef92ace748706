"""A client gets no more of the event loop by asking more often, or on more connections."""

from __future__ import annotations

import pytest

from phasewise.serving.http.transport.loop_share import UNKNOWN, VOUCHED, Allowance, LoopShare, Standing

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

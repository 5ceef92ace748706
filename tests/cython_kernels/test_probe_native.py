"""A line passed between members and buffers read at once: numbers that make sense, an end in every case."""

from __future__ import annotations

import os
import time

import pytest

from phasewise.cython_kernels._native import Readers, Team, pass_line
from phasewise.cython_kernels.errors import TeamError

ALLOWED = sorted(os.sched_getaffinity(0))
MIB = 1 << 20


@pytest.fixture
def pair() -> Team:
    if len(ALLOWED) < 2:
        pytest.skip("needs two CPUs")
    team = Team(ALLOWED[:2])
    yield team
    team.close()


def test_a_line_takes_some_time_in_every_round(pair: Team) -> None:
    rounds = pass_line(pair, 5, 20, 5.0)

    assert len(rounds) == 5
    assert all(0.1 < ns < 1e8 for ns in rounds)


def test_members_beyond_the_second_only_watch() -> None:
    team = Team(None, members=4)

    assert len(pass_line(team, 2, 5, 5.0)) == 2
    team.close()


def test_a_partner_that_gets_no_time_ends_the_passing_at_the_deadline() -> None:
    """Both members on one CPU: every hand-over needs the scheduler, so the rounds asked for cannot be done
    in time.
    """
    if len(ALLOWED) < 2:
        pytest.skip("needs two CPUs to move a thread between")
    team = Team(ALLOWED[:2])
    team.barriers(1)
    for thread in os.listdir("/proc/self/task"):
        if os.sched_getaffinity(int(thread)) == {ALLOWED[1]}:
            os.sched_setaffinity(int(thread), {ALLOWED[0]})
    began = time.monotonic()

    rounds = pass_line(team, 1000, 10_000, 0.05)

    assert len(rounds) < 1000
    assert time.monotonic() - began < 30
    team.close()


@pytest.mark.parametrize(("rounds", "trips", "timeout_s"), [(0, 1, 1), (2000, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_passing_without_sense_is_refused(pair: Team, rounds: int, trips: int, timeout_s: float) -> None:
    with pytest.raises(ValueError):
        pass_line(pair, rounds, trips, timeout_s)


def test_one_member_has_nobody_to_pass_to() -> None:
    team = Team(None, members=1)

    with pytest.raises(ValueError):
        pass_line(team, 1, 1, 1.0)
    team.close()


def test_only_the_active_read(pair: Team) -> None:
    readers = Readers(pair, 2 * MIB)

    first, second = readers.rates([1], 0.002)
    both = readers.rates([0, 1], 0.002)

    assert first == 0.0
    assert second > 0
    assert all(rate > 0 for rate in both)
    readers.close()


@pytest.mark.parametrize("active", [[], [2], [-1]])
def test_readers_that_do_not_exist_are_refused(pair: Team, active: list[int]) -> None:
    readers = Readers(pair, MIB)

    with pytest.raises(ValueError):
        readers.rates(active, 0.001)
    readers.close()


@pytest.mark.parametrize("size_bytes", [0, 1000, MIB + 1, -MIB])
def test_a_buffer_is_whole_mebibytes(pair: Team, size_bytes: int) -> None:
    with pytest.raises(ValueError, match="mebibytes"):
        Readers(pair, size_bytes)


def test_buffers_larger_than_any_memory_are_refused(pair: Team) -> None:
    with pytest.raises(MemoryError):
        Readers(pair, 1 << 50)


def test_closed_readers_and_teams_say_so(pair: Team) -> None:
    readers = Readers(pair, MIB)
    readers.close()
    readers.close()

    with pytest.raises(ValueError, match="closed"):
        readers.rates([0], 0.001)
    other = Team(None, members=2)
    other.close()
    with pytest.raises(TeamError):
        pass_line(other, 1, 1, 1.0)

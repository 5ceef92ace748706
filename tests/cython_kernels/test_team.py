"""A team runs in lockstep, where it was told to, and leaves the caller's thread as it found it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.errors import TeamError

ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("members", [1, 2, 3, 7])
def test_no_member_passes_a_barrier_before_all_have_arrived(members: int) -> None:
    team = Team(None, members=members)

    assert team.barriers(300) == 0
    assert len(team.observed_cpus()) == members
    team.close()


def test_a_team_beyond_the_cores_still_finishes() -> None:
    """Members wait asleep, so a core that serves many of them, or was taken away, delays but never blocks."""
    team = Team(None, members=4 * len(ALLOWED) + 1, idle_spin_us=0)

    assert team.barriers(20) == 0
    team.close()


def test_members_run_on_the_cores_of_the_plan() -> None:
    team = Team(tuple(reversed(ALLOWED)))
    assert team.observed_cpus() == (-1,) * len(ALLOWED)

    team.barriers(50)

    assert team.observed_cpus() == tuple(reversed(ALLOWED))
    assert team.misplaced() == 0
    team.close()


def test_a_member_that_was_moved_is_noticed() -> None:
    if len(ALLOWED) < 2:
        pytest.skip("needs two CPUs to move a thread between")
    team = Team(ALLOWED[:2])
    team.barriers(1)
    for thread in os.listdir("/proc/self/task"):
        if os.sched_getaffinity(int(thread)) == {ALLOWED[1]}:
            os.sched_setaffinity(int(thread), {ALLOWED[0]})

    team.barriers(1)

    assert team.misplaced() > 0
    assert team.observed_cpus() == (ALLOWED[0], ALLOWED[0])
    team.close()


def test_the_caller_gets_its_affinity_back_after_the_last_team() -> None:
    before = os.sched_getaffinity(0)
    first, second = Team(ALLOWED[:1]), Team(ALLOWED[-1:])
    for _ in range(2):
        first.barriers(1)
        assert os.sched_getaffinity(0) == {ALLOWED[0]}
        second.barriers(1)
        assert os.sched_getaffinity(0) == {ALLOWED[-1]}

    first.close()
    second.close()

    assert os.sched_getaffinity(0) == before


def test_a_team_serves_one_thread_after_another() -> None:
    team, home = Team(ALLOWED), os.sched_getaffinity(0)
    failures: list[int] = []

    def use() -> None:
        failures.append(sum(team.barriers(20) for _ in range(10)))

    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert failures == [0, 0, 0]
    team.close()
    assert os.sched_getaffinity(0) == home


def test_an_idle_team_uses_no_processor_time() -> None:
    team = Team(None, members=3)
    team.barriers(1)
    time.sleep(0.02)
    before = time.process_time()
    time.sleep(0.2)

    assert time.process_time() - before < 0.05
    team.close()


@pytest.mark.parametrize(
    ("cpus", "says"),
    [
        ((ALLOWED[0], ALLOWED[0]), "named twice"),
        ((ALLOWED[0], 8191), "cannot pin a thread to CPU 8191"),
        ((-1,), "cannot pin a thread to CPU -1"),
        ((1 << 40,), "cannot pin"),
        ((), "1 to 8192 members"),
    ],
)
def test_cores_that_cannot_be_had_are_named(cpus: tuple[int, ...], says: str) -> None:
    with pytest.raises(TeamError, match=says):
        Team(cpus)


def test_a_closed_team_says_so() -> None:
    team = Team(None, members=2)
    team.close()
    team.close()

    with pytest.raises(TeamError, match="closed"):
        team.barriers(1)


def test_a_child_process_is_told_to_open_its_own_team() -> None:
    script = """
import os
from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.errors import TeamError
team = Team(None, members=2)
team.barriers(1)
child = os.fork()
if child == 0:
    try:
        team.barriers(1)
    except TeamError as error:
        team.close()
        own = Team(None, members=2)
        os._exit(7 if "fork" in str(error) and own.barriers(5) == 0 else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert team.barriers(5) == 0
"""
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )

    assert result.returncode == 0, result.stderr

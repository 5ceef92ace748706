"""A team runs in lockstep, where it was told to, and leaves the caller's thread as it found it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.errors import TeamError
from tests.support.servers.rude_clients import until
from tests.support.tiers import examples

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


@examples(25)
@given(
    places=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=9),
    rounds=st.integers(1, 6),
)
def test_members_meet_wherever_they_run(places: list[tuple[int, int]], rounds: int) -> None:
    """By L3, node and machine: of each node one arrival comes to where the nodes meet."""
    team = Team(None, members=len(places), idle_spin_us=0, places=places)
    assert team.barriers(rounds) == 0
    n_barriers = 2 * rounds + 1 if len(places) > 1 else 0
    assert (team.passed, team.crossings) == (n_barriers, len({node for _, node in places}) - 1)
    team.close()


def test_a_place_for_each_member_is_needed() -> None:
    with pytest.raises(ValueError, match="1 places for 2 members"):
        Team(None, members=2, places=[(0, 0)])


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


CORE_GONE = """
import ctypes, os, platform, struct
from phasewise.cython_kernels._native import Team

team = Team([{core}])
number = {{"x86_64": 203, "aarch64": 122}}[platform.machine()]
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | 22), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(code)))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0
try:
    os.sched_setaffinity(0, [{core}])
except OSError as error:
    print(error.errno)
print(team.barriers(50), team.observed_cpus()[0] >= 0)
team.close()
"""


def test_a_team_goes_on_where_its_core_is_gone() -> None:
    """As the kernel answers once a CPU is offline or out of the cpuset: the caller cannot be pinned to it."""
    done = subprocess.run(
        [sys.executable, "-c", CORE_GONE.format(core=ALLOWED[0])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (done.stdout.split(), done.stderr) == (["22", "0", "True"], "")


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


@pytest.mark.skipif(len(ALLOWED) < 2, reason="needs two CPUs")
@pytest.mark.parametrize("again", [False, True], ids=["it computes no more", "it is pinned again"])
def test_an_affinity_that_the_caller_was_given_meanwhile_stays(again: bool) -> None:
    """As `taskset` gives it; a team that runs afterwards gives that one back."""
    before, given_cpus = os.sched_getaffinity(0), set(ALLOWED[1:])
    with closing(Team(ALLOWED[:1])) as team, closing(Team(ALLOWED[:1])) as other:
        for each in (team, other):
            each.barriers(1)
        os.sched_setaffinity(0, given_cpus)
        if again:
            other.barriers(1)
            assert os.sched_getaffinity(0) == {ALLOWED[0]}
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)

    assert after == given_cpus


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
    """Once its members sleep."""

    def rests() -> bool:
        before_s = time.process_time()
        time.sleep(0.1)
        return time.process_time() - before_s < 0.025

    team = Team(None, members=3)
    team.barriers(1)

    until(rests, "its members do not sleep")
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
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )

    assert result.returncode == 0, result.stderr

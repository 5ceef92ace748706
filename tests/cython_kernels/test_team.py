"""A team runs in lockstep, where it was told to, and leaves the caller's thread as it found it."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.cython_kernels._native import (
    Team,
    TeamProduct,
    compute_paths,
    default_schedule,
    pace_of_members,
    weighed_part,
)
from phasewise.cython_kernels.errors import TeamError
from phasewise.cython_kernels.limit_loops import rates_of_kinds, rates_of_members
from tests.support.kernels.gemm_reference import FORMATS, make_weight
from tests.support.tiers import examples

ALLOWED = sorted(os.sched_getaffinity(0))


@pytest.mark.parametrize("members", [1, 2, 3, 7])
def test_no_member_passes_a_barrier_before_all_have_arrived(members: int) -> None:
    team = Team(None, members=members)

    assert team.barriers(300) == 0
    assert len(team.observed_cpus()) == members
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
        with suppress(ProcessLookupError):  # one of an earlier test may end
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


MOST_WEIGHT = 1_000_000
drawn_weights = st.lists(st.integers(1, MOST_WEIGHT), min_size=1, max_size=80)


def parts_of(count: int, unit: int, weights: Sequence[int]) -> list[tuple[int, int]]:
    return [weighed_part(count, unit, weights, i) for i in range(len(weights))]


def weight(n: int, k: int, fmt: str) -> packing.PackedWeight:
    return make_weight(fmt, n, k, np.random.default_rng(0))


@examples(300)
@given(count=st.integers(0, 20_000), unit=st.integers(1, 20), weights=drawn_weights)
def test_parts_cover_all_and_overlap_nowhere(count: int, unit: int, weights: list[int]) -> None:
    """In the order of the members, cut at whole units."""
    parts = parts_of(count, unit, weights)

    assert parts[0][0] == 0
    assert parts[-1][1] == count
    for (begin, end), (following, _) in itertools.pairwise(parts):
        assert begin <= end == following
        assert end % unit == 0 or end == count


@examples(300)
@given(count=st.integers(0, 20_000), unit=st.integers(1, 20), weights=drawn_weights)
def test_a_part_is_within_a_unit_of_its_due(count: int, unit: int, weights: list[int]) -> None:
    units, all_weights = -(-count // unit), sum(weights)
    for (begin, end), own in zip(parts_of(count, unit, weights), weights, strict=True):
        assert abs(-(-(end - begin) // unit) - units * own / all_weights) < 1 + 1e-9


@examples(120)
@given(
    fmt=st.sampled_from(FORMATS),
    n=st.sampled_from((1, 16, 90, 200, 700)),
    m=st.sampled_from((1, 7, 9, 70)),
    weights=st.lists(st.tuples(st.integers(1, 1000), st.integers(1, 1000)), min_size=1, max_size=5),
    grid=st.sampled_from(("rows", "columns", "both", "inputs")),
    way=st.integers(0, 4),
)
def test_no_bit_depends_on_weights(
    fmt: str, n: int, m: int, weights: list[tuple[int, int]], grid: str, way: int
) -> None:
    """One that outweighs the others leaves them nothing; the bits stay."""
    pack, threads = weight(n, 100, fmt), len(weights)
    path = compute_paths(pack.kind)[way % len(compute_paths(pack.kind))]
    alone = TeamProduct(Team(None, members=1), [pack], m, path, k_parts=2)
    team = Team(None, members=threads)
    team.weigh([streaming for streaming, _ in weights], [computing for _, computing in weights])
    together = TeamProduct(team, [pack], m, path, k_parts=2)
    cut: dict[str, dict[str, Any]] = {
        "rows": {"threads_m": threads, "threads_n": 1},
        "columns": {"threads_m": 1, "threads_n": threads},
        "both": {"threads_m": 2, "threads_n": 2},
        "inputs": {"threads_m": 1, "threads_n": threads, "threads_k": 2},
    }

    alone.time(None, 1)
    together.time({**default_schedule(pack, m, threads), **cut[grid]}, 3)

    assert (together.result() == alone.result()).all()


def test_weights_may_change_between_two_products() -> None:
    pack = weight(400, 64, "q8")
    team = Team(None, members=3)
    product, alone = TeamProduct(team, [pack], 2), TeamProduct(Team(None, members=1), [pack], 2)
    alone.time(None, 1)
    for weights in ((1, 1, 1), (1000, 1, 1), (1, 1000, 500)):
        team.weigh(weights, weights)
        product.time(None, 2)
        assert (product.result() == alone.result()).all()


@pytest.mark.parametrize("weights", [(1,), (1, 2, 3), (0, 1), (1, MOST_WEIGHT + 1), (-1, 1)])
def test_weights_that_are_none_are_refused(weights: tuple[int, ...]) -> None:
    team = Team(None, members=2)
    for streaming, computing in ((weights, (1, 1)), ((1, 1), weights)):
        with pytest.raises(ValueError, match="2 weights from 1 to"):
            team.weigh(streaming, computing)


def test_every_member_is_measured_while_all_work() -> None:
    team = Team(None, members=3)
    rates = rates_of_members(team)

    assert len(rates.reading) == len(rates.computing) == 3
    assert min(rates.reading) > 0
    assert min(rates.computing) > 0
    team.close()
    with pytest.raises(TeamError):
        pace_of_members(team, 0.01)


@examples(100)
@given(rates=st.lists(st.floats(1, 1e12), min_size=1, max_size=30), data=st.data())
def test_a_disturbed_core_does_not_move_its_kind(rates: list[float], data: st.DataObject) -> None:
    """All of a kind have one rate, which some of them had, or which lies between two of them."""
    kinds = data.draw(st.lists(st.integers(0, 3), min_size=len(rates), max_size=len(rates)))
    of_kinds = rates_of_kinds(rates, kinds)
    for kind in set(kinds):
        own = [rate for rate, each in zip(rates, kinds, strict=True) if each == kind]
        (told,) = {rate for rate, each in zip(of_kinds, kinds, strict=True) if each == kind}
        assert min(own) <= told <= max(own)
        if len(own) > 2:
            others = sorted(own)[:-1]
            assert told <= max(others)

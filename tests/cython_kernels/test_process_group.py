"""Ranks wait for one another, are told, and learn of failure; no interleaving breaks their groups."""

from __future__ import annotations

import os
import platform
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels._native import GROUP_ALIGNMENT, Group, group_bytes
from phasewise.cython_kernels.errors import GroupError
from tests.support.kernels import rank_processes
from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS
from tests.support.tiers import first_is_smoke

LONG_S = 30.0
"""A bound that no wait reaches unless somebody hangs."""


@contextmanager
def opened(n_ranks: int, slots: int = 0) -> Iterator[tuple[Group, np.ndarray]]:
    """A group, and int64 slots beside it that its ranks share."""
    size = group_bytes(n_ranks)
    with rank_processes.shared_memory(size + 8 * max(slots, 1)) as memory:
        group = Group(memory, n_ranks)
        group.initialise()
        yield group, np.frombuffer(memory, np.int64, offset=size)


def yield_at_random(rng: random.Random) -> None:
    """Some other process's turn, often; a sleep long enough that others sleep too, now and then."""
    chance = rng.random()
    if chance < 0.4:
        os.sched_yield()
    elif chance < 0.42:
        time.sleep(0.001 * rng.random())


def pass_barriers(group: Group, rank: int, timeout_s: float) -> None:
    while True:
        group.barrier(rank, timeout_s=timeout_s)


@pytest.mark.many
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5, 16])
def test_no_rank_passes_a_barrier_before_all_have_arrived(n_ranks: int) -> None:
    with opened(n_ranks, slots=n_ranks) as (group, counts):

        def work(rank: int) -> None:
            rng = random.Random(rank)
            for turn in range(1, 61):
                yield_at_random(rng)
                counts[rank] = turn
                group.barrier(rank, timeout_s=LONG_S)
                assert (counts[:n_ranks] == turn).all()
                group.barrier(rank, timeout_s=LONG_S)

        rank_processes.run(n_ranks, work)


def test_barriers_over_different_numbers_of_ranks_do_not_disturb_one_another() -> None:
    """Rank 2 may be far behind, or wait for a barrier of three, while 0 and 1 pass barriers of two."""
    with opened(3, slots=3) as (group, counts):

        def work(rank: int) -> None:
            rng = random.Random(rank)
            for turn in range(1, 101):
                for n_ranks in (2, 3, 2):
                    if rank >= n_ranks:
                        continue
                    counts[rank] = counts[rank] + 1
                    yield_at_random(rng)
                    group.barrier(rank, n_ranks, timeout_s=LONG_S)
                    if n_ranks == 3:
                        assert counts[2] == turn
                    assert counts[0] == counts[1]
                    group.barrier(rank, n_ranks, timeout_s=LONG_S)

        rank_processes.run(3, work)


def test_a_rank_that_is_killed_ends_the_wait_of_the_others_in_time() -> None:
    with opened(3) as (group, _):

        def work(rank: int) -> None:
            if rank == 1:
                signal.pause()
            began = time.monotonic()
            with pytest.raises(GroupError, match=r"not all ranks came within 0\.3 s|the group has failed"):
                group.barrier(rank, timeout_s=0.3)
            assert time.monotonic() - began < LONG_S

        ranks = rank_processes.start(3, work)
        ranks.kill(1)

        assert ranks.ended() == [0, -signal.SIGKILL, 0]
        assert group.failed


@pytest.mark.slow
@pytest.mark.parametrize("victim", first_is_smoke([0, 1, 2]))
def test_ranks_are_killed_anywhere_and_nobody_hangs(victim: int) -> None:
    """At whatever instruction: asleep, counted but not yet waking others, in the middle of a wake."""
    rng = random.Random(victim)
    for _ in range(8):
        with opened(3) as (group, _):

            def work(rank: int, group: Group = group) -> None:
                with pytest.raises(GroupError):  # also where a busy machine lets nobody through in time
                    pass_barriers(group, rank, timeout_s=0.2)
                if rank == victim:
                    signal.pause()

            rank_processes.assert_killed_leaves_nobody_waiting(victim, work, 0.02 * rng.random())


def test_failure_ends_waits_for_barriers_and_bells_at_once_and_later_ones_too() -> None:
    with opened(3) as (group, _):

        def work(rank: int) -> None:
            if rank == 2:
                time.sleep(0.05)  # the others sleep by now
                group.fail()
            for _ in range(2):
                with pytest.raises(GroupError, match="the group has failed"):
                    group.wait_bell(0, seen=0) if rank == 0 else group.barrier(rank)

        rank_processes.run(3, work)


def test_a_bell_is_heard_whenever_it_rings() -> None:
    """Each ring is answered before the next: no rank misses one that comes before or during its wait."""
    turns = 300
    with opened(2, slots=1) as (group, heard):

        def work(rank: int) -> None:
            rng = random.Random(rank)
            for turn in range(turns):
                yield_at_random(rng)
                if rank == 0:
                    group.ring(1)
                assert group.wait_bell(rank, seen=turn, timeout_s=LONG_S) == turn + 1
                if rank == 1:
                    heard[0] = turn + 1
                    group.ring(0)

        rank_processes.run(2, work)

        assert heard[0] == turns
        assert group.bell(1) == turns


def test_memory_that_cannot_hold_the_group_is_refused() -> None:
    with rank_processes.shared_memory(group_bytes(4)) as memory:
        view = memoryview(memory)
        with pytest.raises(GroupError, match=r"a group of 5 ranks takes \d+ bytes, not \d+"):
            Group(memory, 5)
        with pytest.raises(GroupError, match="begins at a multiple"):
            Group(view[64:], 1)
        for ranks in (0, -1, 257):
            with pytest.raises(GroupError, match=f"1 to 256 ranks, not {ranks}"):
                Group(memory, ranks)
        assert group_bytes(4) % GROUP_ALIGNMENT == 0


def test_a_rank_outside_the_group_is_refused() -> None:
    with opened(3) as (group, _):
        for rank, n_ranks in ((3, 3), (-1, 3), (2, 2), (0, 4), (0, 0)):
            with pytest.raises(GroupError, match=f"no rank {rank} among {n_ranks}"):
                group.barrier(rank, n_ranks)


def test_a_group_that_nobody_initialised_says_so() -> None:
    with (
        rank_processes.shared_memory(group_bytes(2)) as memory,
        pytest.raises(GroupError, match="initialise it first"),
    ):
        Group(memory, 2).barrier(0)


GROUP = KERNELS / "group"
RUNS = ((1, 128, 50), (2, 128, 50), (2, 1 << 16, 100), (3, 320, 50), (5, 4096, 40), (16, 128, 6))
"""Ranks, bytes of a slot, turns."""


def built(sanitiser: str, out: Path) -> Path:
    program = out / "exchange_threads"
    sources = [HERE / "exchange_threads.c", GROUP / "group.c", GROUP / "exchange.c"]
    flags = [*COMMON_FLAGS, "-g", f"-fsanitize={sanitiser}", "-fno-sanitize-recover=all", "-I", KERNELS]
    compilation = subprocess.run(["gcc", *flags, *sources, "-o", program], capture_output=True, text=True)
    if "cannot find" in compilation.stderr:
        pytest.skip(f"no library for -fsanitize={sanitiser}")
    assert compilation.returncode == 0, compilation.stderr
    return program


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")
@pytest.mark.parametrize("sanitiser", first_is_smoke(["thread", "address,undefined"]))
def test_ranks_do_not_race_or_stray(sanitiser: str, tmp_path: Path) -> None:
    program = built(sanitiser, tmp_path)
    own = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # of one sanitiser each
    for run_of_ranks in RUNS:
        arguments = [str(number) for number in run_of_ranks]

        run = subprocess.run([program, *arguments], env=own, capture_output=True, text=True, timeout=200)

        assert run.returncode == 0, f"{' '.join(arguments)}: {run.stderr}"


WALKS = ("reduce 2", "mixed 3", "bell 2", "kill 2", "late 2", "fail 3")


def built_model(out: Path, changed: Mapping[str, str] | None = None) -> Path:
    """The model over our sources, or over changed ones."""
    for name, text in (changed or {}).items():
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text(text)
    program = out / "group_model"
    (out / "group_model.c").write_text((HERE / "group_model.c").read_text())  # includes look beside it first
    flags = [*COMMON_FLAGS, "-O1", "-I", out, "-I", KERNELS]
    subprocess.run(["gcc", *flags, out / "group_model.c", "-o", program], check=True)
    return program


def walked(program: Path, walk: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *walk.split()], capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built_model(tmp_path_factory.mktemp("model"))


LONG = {"mixed 3"}


@pytest.mark.many
@pytest.mark.parametrize(
    "walk", [pytest.param(walk, marks=pytest.mark.slow) if walk in LONG else walk for walk in WALKS]
)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the model looks into registers of x86-64")
def test_no_interleaving_breaks(model: Path, walk: str) -> None:
    run = walked(model, walk)

    assert run.returncode == 0, run.stdout
    assert int(run.stdout.split()[0]) > 10  # it has been somewhere

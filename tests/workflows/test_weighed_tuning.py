"""Schedules are timed on teams whose members have the shares that an engine gives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")

from phasewise.kerneldb.store import open_store
from phasewise.serving.ranks import rank_teams
from phasewise.topology import CpuKind, read_machine
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.workflows.bench.kernels import OurKernels
from phasewise.workflows.tune_kernels.rounds import Round, Tuning, evaluator_on
from phasewise.workflows.tune_kernels.run import fight_storage_duels

CPUS = tuple(sorted(os.sched_getaffinity(0)))[:2]
KINDS = tuple(CpuKind(f"kind {cpu}", (cpu,)) for cpu in CPUS)

pytestmark = pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")


class HeldLock(MeasurementLock):
    """Knows whether a turn lasts."""

    is_held = False

    @contextmanager
    def turn(self, seconds: float = 0.0) -> Iterator[bool]:
        self.is_held = True
        yield True
        self.is_held = False


def by_search(folder: Path, lock: HeldLock) -> None:
    with (
        open_store(folder / "tuned.db") as store,
        evaluator_on(CPUS, Tuning(read_machine(), store, lock), 1.0),
    ):
        assert not lock.is_held


def by_storage_duels(folder: Path, lock: HeldLock) -> None:
    with open_store(folder / "tuned.db") as store:
        tuning = Tuning(read_machine(), store, lock, resume=False)
        fight_storage_duels([], Round(("decode",), CPUS, (), ()), tuning, 1.0)


def by_bench(folder: Path, lock: HeldLock) -> None:
    with lock.turn(), closing(OurKernels(CPUS, lambda *_: pytest.fail("nothing is timed"))):
        pass


def by_engine(folder: Path, lock: HeldLock) -> None:
    with lock.turn():
        for team in rank_teams.open_teams({0: CPUS}).values():
            team.close()


@pytest.mark.parametrize("measure", [by_engine, by_search, by_storage_duels, by_bench])
def test_a_team_that_is_timed_is_weighed_as_the_engine_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measure: Callable[[Path, HeldLock], None]
) -> None:
    """By the same kinds and once, while no other process measures; then its thread may run anywhere again."""
    lock, weighed = HeldLock(), list[tuple[Sequence[int], object, bool]]()

    def weigh(_team: Any, cores: Sequence[int], kinds: object) -> None:
        weighed.append((tuple(cores), kinds, lock.is_held))

    monkeypatch.setattr(rank_teams, "read_core_kinds", lambda: KINDS)
    monkeypatch.setattr(rank_teams, "weigh_by_kind", weigh)
    allowed = os.sched_getaffinity(0)
    measure(tmp_path, lock)

    assert weighed == [(CPUS, KINDS, True)]
    assert os.sched_getaffinity(0) == allowed

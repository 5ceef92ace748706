"""A whole `tune-kernels` by a planted clock; teams that are timed have the engine's shares of cores."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")

from phasewise.kerneldb.records import Comparison, Problem, Sample, Schedule
from phasewise.kerneldb.store import open_store
from phasewise.serving.ranks import rank_teams
from phasewise.topology import CpuKind, read_machine
from phasewise.tuner import timing
from phasewise.tuner.machine_limits import Roofline, peak_kinds
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.native import NativeEvaluator
from phasewise.tuner.timing import Duel
from phasewise.workflows.bench.kernels import OurKernels
from phasewise.workflows.opening.open_model import OpenModel, open_model
from phasewise.workflows.opening.settings import Weights
from phasewise.workflows.report import silent
from phasewise.workflows.tune_kernels.rounds import Round, TunedRound, Tuning, TuningBench, evaluator_on
from phasewise.workflows.tune_kernels.run import fight_storage_duels, rounds_of_model, tune_rounds
from tests.support.models.tiny_models import TinyShape, write_sparse_hf
from tests.support.tiers import examples

SHAPE = TinyShape(n_layers=1, hidden=64, ffn=96, head_dim=32, context_length=1024)
CALLS_A_TIMING = 6
WIN = Comparison(1.42, 1.4, 1.45, 0.99, 15)
LOSS, BUSY = Comparison(0.88, 0.86, 0.9, 0.99, 15), Comparison(0.88, 0.19, 6.1, 0.99, 15)
SLOW_PROMPT, BUSY_PROMPT = Comparison(0.95, 0.94, 0.96, 0.99, 15), Comparison(0.95, 0.19, 6.1, 0.99, 15)


@dataclass
class Planted:
    """A clock that timings move: each takes its product's least time, as many times longer as its seed draws.

    gains: of duels between storages, by rows.
    """

    flops: float = 1e9
    seed: int = 0
    gains: dict[int, Comparison] = field(default_factory=dict)
    now_s: float = 0.0

    @property
    def bench(self) -> TuningBench:
        def evaluator(cores: Sequence[int], total_bytes: int) -> NativeEvaluator:
            return cast(NativeEvaluator, self)

        return TuningBench(lambda: self.now_s, evaluator, self.limits)

    def limits(self, cores: Sequence[int], formats: Iterable[str], total_bytes: int) -> Roofline:
        self.now_s += self.call_s(192, 64, 512)
        kinds = {kind: self.flops for each in formats for kind in peak_kinds(each)}
        return Roofline(kinds, 1e15)

    def call_s(self, n: int, k: int, m: int) -> float:
        return 2 * n * k * m / self.flops

    def prepare(self, problem: Problem, schedules: Sequence[Schedule]) -> None:
        self.now_s += 0.1 * self.call_s(problem.n, problem.k, 512)

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> list[Sample]:
        return [self._sample(problem, schedule, CALLS_A_TIMING) for schedule in schedules]

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> Duel:
        old, new = (self._sample(problem, schedule, 16) for schedule in (incumbent, candidate))
        return Duel(timing.compare([(old.samples_ns, new.samples_ns)] * timing.PAIRS), old, new)

    def duel_storages(self, problem: Problem, schedule: Schedule, dense: Schedule) -> Duel:
        old, new = (self._sample(problem, each, 16) for each in (dense, schedule))
        return Duel(self.gains.get(problem.m, BUSY), old, new)

    def close(self) -> None:
        """Nothing is held."""

    def _sample(self, problem: Problem, schedule: Schedule, calls: int) -> Sample:
        factor = 1 + 2 * random.Random(f"{self.seed} {problem} {schedule}").random()
        seconds = factor * self.call_s(problem.n, problem.k, problem.m)
        self.now_s += calls * seconds
        ns = max(1, round(seconds * 1e9))
        return Sample(schedule, (ns,), ns, 0.0, ns, {"steal": 0.0, "others": 0.0})


@pytest.fixture(scope="module")
def sparse_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of the weights of its layers are zero."""
    return write_sparse_hf(tmp_path_factory.mktemp("sparse") / "model", SHAPE, 0.5)


@pytest.fixture(scope="module")
def opened(sparse_model: Path, tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    folder = tmp_path_factory.mktemp("opened")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASEWISE_CACHE", str(folder / "cache"))
        return open_model(str(sparse_model), threads=1, db=str(folder / "none.db"))


def tune_whole(opened: OpenModel, db: str, planted: Planted, budget_s: float) -> list[TunedRound]:
    """Tune as the command does."""
    machine, bench = read_machine(), planted.bench
    rounds = rounds_of_model(opened, machine, ["prefill", "decode"], 512)
    return tune_rounds(
        rounds, machine, db, budget_s, True, MeasurementLock(), silent, lambda _: None, opened.model, bench
    )


@examples(5)
@given(seed=st.integers(0, 1 << 30), budget_s=st.floats(30, 200), dearest=st.floats(2e-3, 4e-3))
def test_a_whole_run_takes_no_more_than_its_budget_and_a_tenth(
    opened: OpenModel, seed: int, budget_s: float, dearest: float
) -> None:
    """Whatever its products cost. dearest: one product of the largest, as a share of the budget."""
    planted = Planted(2 * 192 * 64 * 512 / (dearest * budget_s), seed)
    with tempfile.TemporaryDirectory() as folder:
        tuned = tune_whole(opened, f"{folder}/tuned.db", planted, budget_s)

    assert planted.now_s <= 1.1 * budget_s
    assert planted.now_s >= 0.7 * budget_s or tuned[-1].outcome.end == "complete"
    assert tuned[-1].outcome.timed > 0


@pytest.mark.slow
@examples(5)
@given(
    of_rows=st.fixed_dictionaries({m: st.sampled_from([LOSS, BUSY, WIN]) for m in (8, 16, 32)}),
    prompt=st.sampled_from([SLOW_PROMPT, BUSY_PROMPT]),
)
def test_a_whole_run_chooses_the_storage_that_the_expected_rows_justify(
    opened: OpenModel, sparse_model: Path, of_rows: dict[int, Comparison], prompt: Comparison
) -> None:
    """One sequence keeps the 1.42x that it gains; a server is proven slower at none of its rows."""
    planted = Planted(1e9, gains={1: WIN, **of_rows, 512: prompt})
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASEWISE_CACHE", f"{folder}/cache")
        tuned = tune_whole(opened, f"{folder}/tuned.db", planted, 60.0)
        assert {duel.problem.m for duel in tuned[-1].storage} == {1, 8, 16, 32, 512}
        for sequences in (1, 8, 16, 32):
            weights = Weights(sequences=sequences)
            model = open_model(str(sparse_model), weights, threads=1, db=f"{folder}/tuned.db").model
            stored = {weight.is_sparse for name, weight in model.weights.items() if name.startswith("layers")}
            loses = any(of_rows[m] is LOSS for m in of_rows if m <= sequences)
            is_slow = sequences > 1 and (loses or prompt is SLOW_PROMPT)
            assert stored == {not is_slow}, sequences


CPUS = tuple(sorted(os.sched_getaffinity(0)))[:2]
KINDS = tuple(CpuKind(f"kind {cpu}", (cpu,)) for cpu in CPUS)


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
@pytest.mark.skipif(len(CPUS) < 2, reason="needs two CPUs")
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

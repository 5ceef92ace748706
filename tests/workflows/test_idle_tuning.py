"""Tuning while no request runs: it stops and goes on, its winners come between steps, no bit changes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("phasewise.cython_kernels._native", reason="the kernels are not built")

from phasewise.kerneldb import shipped
from phasewise.kerneldb.records import Measurement, Problem, Sample, Schedule
from phasewise.kerneldb.store import open_store
from phasewise.serving.engine.core_watch import CorePlans, CoreWatch
from phasewise.topology import read_machine
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import machine_key
from phasewise.tuner.timing import Duel
from phasewise.workflows.opening.open_model import NATIVE, OpenModel, open_model
from phasewise.workflows.serve.idle_tuning import IdleTuning, holds_lock, reschedule_under
from phasewise.workflows.tune_kernels.idle_process import (
    IdleTask,
    UninterruptedEvaluator,
    of_its_arithmetic,
    tune_in_idle_time,
)
from phasewise.workflows.tune_kernels.run import rounds_of_model
from tests.support.models.tiny_models import tiny_gguf

ENOUGH_S = 120.0


@pytest.fixture(autouse=True)
def own_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STATE", "CACHE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name))
    monkeypatch.setattr(shipped, "shipped_names", lambda: ())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())
    return path


@pytest.fixture
def opened(path: Path, tmp_path: Path) -> OpenModel:
    return open_model(str(path), threads=1, db=str(tmp_path / "here.db"))


class ForeverError(Exception):
    """Ends a run that would go on."""


class _Evaluator:
    """Answers at once, and counts; `interrupt` is called in the midst of each timing."""

    def __init__(self, interrupt: Callable[[int], None]) -> None:
        self.n_timed = 0
        self._interrupt = interrupt

    def prepare(self, problem: Problem, schedules: object) -> None: ...

    def measure(self, problem: Problem, schedules: list[Schedule]) -> list[Sample]:
        self.n_timed += 1
        self._interrupt(self.n_timed)
        return [Sample(schedule, (self.n_timed,), self.n_timed, None, 1) for schedule in schedules]

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> Duel:
        raise AssertionError("nothing is compared")


def test_a_timing_that_was_stopped_is_taken_again() -> None:
    """Its samples have the stop in them."""
    stops = [0]

    def interrupt(number: int) -> None:
        stops[0] += number in (1, 2, 4)

    evaluator = _Evaluator(interrupt)
    undisturbed = UninterruptedEvaluator(evaluator, lambda: stops[0])  # type: ignore[arg-type]
    problem = Problem("gemm", "bf16", 16, 32, 1)
    schedule = Schedule(1, 1, 1, 16, 32, 1, 1, 1, "fma", 1, 0, "nm")

    first, second = (undisturbed.measure(problem, [schedule])[0].estimate_ns for _ in range(2))

    assert (first, second) == (3, 5)


def test_only_the_arithmetic_of_the_server_is_tuned(path: Path, tmp_path: Path) -> None:
    """A weight that is asked to be computed in another way than the database's is left out."""
    machine = read_machine()
    for weights in (NATIVE, replace(NATIVE, arithmetic="canonical")):
        opened = open_model(str(path), weights, threads=1, db=str(tmp_path / "none.db"))
        by_shape = {(weight.n, weight.k): weight for weight in opened.model.products().values()}
        for own in rounds_of_model(opened, machine, [*opened.plans], 512):
            left = of_its_arithmetic(own, opened)
            assert {task.ms for task in left.tasks} <= {task.ms for task in own.tasks}
            for task in left.tasks:
                (arithmetic,) = task.group.arithmetics
                asked, k_parts = opened.schedules["prefill"].arithmetic(by_shape[task.group.n, task.group.k])
                assert asked in (None, arithmetic.compute_path)
                assert k_parts == arithmetic.k_parts
            if weights is NATIVE:
                assert len(left.tasks) == len(own.tasks) > 0


def test_the_task_of_the_process_is_read_as_it_was_written(opened: OpenModel) -> None:
    task = IdleTask("a model", NATIVE, opened.plans, None, 7)
    again = IdleTask.from_json(task.to_json())
    assert {phase: plan.cores for phase, plan in again.plans.items()} == {
        phase: plan.cores for phase, plan in opened.plans.items()
    }
    assert replace(again, plans={}) == replace(task, plans={})


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_measured_in_idle_time_is_kept(tmp_path: Path, path: Path, ranks: int) -> None:
    """It can be cut off anywhere: here after some timings. Of several ranks one rank's products are tuned."""
    if len(os.sched_getaffinity(0)) < ranks:
        pytest.skip("two ranks need two cores")
    opened = open_model(str(path), threads=ranks, ranks=ranks, db=str(tmp_path / "here.db"))
    assert {len(plan.ranks) for plan in opened.plans.values()} == {ranks}
    machine, count = read_machine(), [0]

    def stops() -> int:
        count[0] += 1
        if count[0] > 12:
            raise ForeverError
        return 0

    rounds = [
        of_its_arithmetic(tuning_round, opened)
        for tuning_round in rounds_of_model(opened, machine, [*opened.plans], 512)
    ]
    with open_store(str(tmp_path / "here.db")) as store:
        with pytest.raises(ForeverError):
            tune_in_idle_time(rounds, machine, store, stops, lambda _: None, MeasurementLock())
        assert len(rounds[0].cores) == 1
        key = machine_key(machine, rounds[0].cores)
        assert sum(row.verified for row in store.key_counts(key)) > 0
        used = {row.sample.schedule.compute_path for row in store.stream(Measurement)}
    assert used <= {
        arithmetic.compute_path for task in rounds[0].tasks for arithmetic in task.group.arithmetics
    }


@pytest.mark.slow
def test_the_process_is_stopped_at_once_and_ends_with_the_server(
    tmp_path: Path, path: Path, opened: OpenModel
) -> None:
    db = str(tmp_path / "here.db")
    tuning = IdleTuning(IdleTask(str(path), NATIVE, opened.plans, db, os.getpid()), lambda _: None)
    pids, paused = list[int](), threading.Event()

    def serve() -> None:
        tuning.pause()  # before its first turn there is nothing to stop
        tuning.go_on()
        pids.append(_child())
        _wait_for(lambda: _n_rows(db) > 0)
        tuning.pause()
        _wait_for(lambda: _state(pids[0]) == "T")
        paused.set()
        tuning.go_on()
        _wait_for(lambda: _state(pids[0]) != "T")

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(ENOUGH_S)
    assert paused.is_set()
    _wait_for(lambda: _state(pids[0]) in ("Z", None))  # the engine's thread has ended


HOLDS = """
import fcntl, signal, sys, time
went_on = []
signal.signal(signal.SIGCONT, lambda *_: went_on.append(True))
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print("held", flush=True)
    while not went_on:
        time.sleep(0.001)
    fcntl.lockf(file, fcntl.LOCK_UN)
    print("free", flush=True)
    time.sleep(600)
"""


def test_a_process_that_is_stopped_holds_no_lock(
    opened: OpenModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever else writes to the database would wait for it as long as requests come."""
    command = [sys.executable, "-c", HOLDS, str(tmp_path / "file")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        assert holds_lock(process.pid)
        tuning = IdleTuning(IdleTask("m", NATIVE, opened.plans, None, os.getpid()), lambda _: None)
        monkeypatch.setattr(tuning, "_start", lambda: process)
        tuning.go_on()

        tuning.pause()

        assert process.stdout.readline() == "free\n"
        _wait_for(lambda: _state(process.pid) == "T")
        assert not holds_lock(process.pid)
        tuning.go_on()
        _wait_for(lambda: _state(process.pid) != "T")
        process.kill()


def test_schedules_of_plans_that_were_left_meanwhile_are_not_used(opened: OpenModel) -> None:
    """The engine may move to other cores while they are looked up on another thread."""
    cores, called = CoreWatch(opened.plans, lambda: 0, lambda: CorePlans({})), list[str]()
    plans = cores.plans
    reschedule_under(plans, cores, lambda: called.append("stayed"))
    reschedule_under(plans, None, lambda: called.append("unwatched"))
    cores.moved(CorePlans(dict(plans)))
    reschedule_under(plans, cores, lambda: called.append("moved"))
    assert called == ["stayed", "unwatched"]


def test_a_process_that_cannot_be_started_is_tried_again_and_ends_nothing(
    opened: OpenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = IdleTuning(IdleTask("m", NATIVE, opened.plans, None, os.getpid()), lambda _: None)
    n_tries = 0

    def fail() -> Any:
        nonlocal n_tries
        n_tries += 1
        raise BlockingIOError("no process more")

    monkeypatch.setattr(tuning, "_start", fail)
    for _ in range(2):
        tuning.go_on()
        tuning.pause()
    assert n_tries == 2


def _child() -> int:
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return int(children[-1])


def _state(pid: int) -> str | None:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None


def _n_rows(db: str) -> int:
    with open_store(db) as store:
        return sum(count.verified for count in store.key_counts())


def _wait_for(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + ENOUGH_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGCONT)
    yield
    signal.signal(signal.SIGCONT, before)

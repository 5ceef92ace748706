"""Schedules that won elsewhere, timed here first: at the start of a tuning run, and of a server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phasewise._version import __version__
from phasewise._words import counted
from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.hints import Hint, counts_told, waiting_hints
from phasewise.kerneldb.records import MachineKey, Measurement, Problem
from phasewise.kerneldb.shipped import shipped_measurements
from phasewise.kerneldb.store import Store
from phasewise.topology import Machine
from phasewise.tuner.first_duels import in_order_of_worth
from phasewise.tuner.ledger import Ledger, Scope
from phasewise.tuner.native import obstacle
from phasewise.tuner.plans import machine_key
from phasewise.tuner.task_division import Task
from phasewise.tuner.tuning_run import Hinted, HintsOutcome, ScheduleEvaluator, Tools, settle_hints
from phasewise.workflows.tune_kernels.rounds import OnFirstCore, Round, Tuning, evaluator_on

MULTIPLY_ADDS_A_BYTE = 16
"""Multiply-adds of a core in the time of reading a weight's byte; only an order follows from this number."""

FAMILIES = ("gemm", "attention")


@dataclass(frozen=True)
class _Waiting:
    """Hints of one round and one family, in the order in which they are tried."""

    round: Round
    machine: MachineKey
    family: str
    hinted: Sequence[Hinted]
    hints: Sequence[Hint]


def fight_hints(rounds: Sequence[Round], tuning: Tuning, budget_s: float) -> list[HintsOutcome]:
    """Time schedules that won elsewhere for these products, and use what a duel proves faster.

    Begins no batch of timings after `budget_s`. Nothing is timed or reported where no hint waits, or where
    the database is only read.
    """
    clock, report = tuning.bench.clock, tuning.report
    deadline_s = clock() + budget_s
    waiting = waiting_of(rounds, tuning.machine, tuning.store) if tuning.store.writable else []
    if not waiting:
        return []
    told = counts_told(hint for group in waiting for hint in group.hints)
    report(f"timing schedules that won elsewhere, {round(budget_s)} s at most: {told} ...")
    done = [_fight(group, tuning, deadline_s - clock()) for group in waiting]
    timed, promoted = (sum(getattr(outcome, name) for outcome in done) for name in ("timed", "promoted"))
    report(f"{promoted} of {counted(timed, 'product')} that were timed run faster by them, and use them")
    return done


def waiting_of(rounds: Sequence[Round], machine: Machine, store: Store) -> list[_Waiting]:
    """The hints that wait for these products, weights first."""
    shipped: list[Measurement] | None = None
    waiting = []
    for tuning_round in rounds:
        key = machine_key(machine, tuning_round.cores)
        if shipped is None:
            shipped = shipped_measurements(key.core_sig)
        for family in FAMILIES:
            tasks = _tasks(tuning_round, family)
            hints = waiting_hints(store, key, kernel_abi(family), shipped)
            hinted = in_order_of_worth(tasks, hints, obstacle, work_of(tuning_round))
            own = [hints[hint.task.problem(m)] for hint in hinted for m in hint.schedules]
            if hinted:
                waiting.append(_Waiting(tuning_round, key, family, hinted, own))
    return waiting


def _tasks(tuning_round: Round, family: str) -> Sequence[Task]:
    if family == "gemm":
        return tuning_round.tasks
    return [tuning_round.attention] if tuning_round.attention else []


def work_of(tuning_round: Round) -> Callable[[Problem], float]:
    """A function that gives a product's work in a step, in bytes read; attention counts once."""

    def work(problem: Problem) -> float:
        if problem.family != "gemm":
            return float(problem.n * problem.m)
        multiply_adds = problem.n * problem.k * problem.m
        return tuning_round.uses(problem) * max(
            tuning_round.weight_bytes(problem), multiply_adds / MULTIPLY_ADDS_A_BYTE
        )

    return work


def _fight(waiting: _Waiting, tuning: Tuning, budget_s: float) -> HintsOutcome:
    cores = waiting.round.cores
    with evaluator_on(cores, tuning, budget_s) as native:
        evaluator: ScheduleEvaluator = OnFirstCore(native, cores[0])
        scope = Scope(waiting.machine, kernel_abi(waiting.family), __version__)
        ledger = Ledger(tuning.store, scope)
        tools = Tools(evaluator, ledger, clock=tuning.bench.clock, lock=tuning.lock)
        return settle_hints(waiting.hinted, tools, budget_s)

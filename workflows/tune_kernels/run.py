"""One run of `tune-kernels`: what to tune for a model or for shapes, then each round within the budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from phasewise._version import __version__
from phasewise._words import counted
from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.store import open_store
from phasewise.kerneldb.upkeep import tidy
from phasewise.serving.models.forward import tuned_attention
from phasewise.topology import Machine
from phasewise.tuner.first_duels import FIRST_S, FIRST_SHARE
from phasewise.tuner.ledger import Scope
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import Phase, ServicePlan, default_plan, machine_key
from phasewise.tuner.tuning_run import TuningProgress
from phasewise.workflows.report import Report
from phasewise.workflows.tune_kernels.for_plans import kernel_rounds
from phasewise.workflows.tune_kernels.hints import fight_hints
from phasewise.workflows.tune_kernels.rounds import (
    HERE,
    Round,
    Shape,
    TunedRound,
    TuningBench,
    bound_s,
    plan_rounds,
    shapes_of,
    tune_round,
)
from phasewise.workflows.tune_kernels.speed_change import (
    BUDGET_SHARE,
    SpeedChange,
    keep_changes,
    measured_change,
)
from phasewise.workflows.tune_kernels.storage_duels import fight_storage_duels, storage_problems

if TYPE_CHECKING:
    from phasewise.serving.engine.throughput import Workload
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.workflows.opening.open_model import OpenModel


STORAGE_SHARE = 0.25
"""Part of a round's share of the budget that duels between storages get, where there are some."""


def rounds_of_model(opened: OpenModel, machine: Machine, phases: Sequence[Phase], max_m: int) -> list[Round]:
    """The products and the attention of a model, on the cores of its plans for `phases`, bands included."""
    plans: dict[Phase, ServicePlan] = {phase: plan for phase, plan in opened.plans.items() if phase in phases}
    if any(len(plan.ranks) > 1 for plan in opened.plans.values()):
        return [
            kernel_round.round
            for kernel_round in kernel_rounds(
                opened.model, machine, [own for plan in plans.values() for own in plan.each], max_m
            )
        ]
    cores: dict[Phase, tuple[int, ...]] = {phase: plan.ranks[0].cores for phase, plan in plans.items()}
    shapes, attention = shapes_of(opened.model), tuned_attention(opened.model)
    rounds = plan_rounds(machine, cores, shapes, max_m, attention)
    of_bands: dict[tuple[int, ...], Phase] = {
        own.ranks[0].cores: plan.phase for plan in plans.values() for own in plan.each[1:]
    }
    for own_cores, phase in of_bands.items():
        if own_cores not in cores.values():
            alone: dict[Phase, tuple[int, ...]] = {phase: own_cores}
            rounds += plan_rounds(machine, alone, shapes, max_m, attention)
    return rounds


def rounds_of_shapes(
    shapes: Sequence[Shape], machine: Machine, phases: Sequence[Phase], max_m: int, threads: int | None
) -> list[Round]:
    """Products of these shapes, on the cores of the default plans for `phases`."""
    cores: dict[Phase, tuple[int, ...]] = {
        phase: default_plan(machine, phase, threads).ranks[0].cores for phase in phases
    }
    return plan_rounds(machine, cores, shapes, max_m)


def tune_rounds(
    rounds: Sequence[Round],
    machine: Machine,
    db: str | None,
    budget_s: float,
    resume: bool,
    lock: MeasurementLock,
    report: Report,
    progress: Callable[[TuningProgress], None],
    model: PackedModel | None = None,
    bench: TuningBench = HERE,
) -> list[TunedRound]:
    """Tune each round within its share of the budget that is left. An interrupted round ends the run.

    A part of the budget is kept back for `change_of_model`. model: whose weights, where some are zero, are
    compared stored sparse and dense at the end of each round.
    """
    deadline_s = bench.clock() + budget_s * (1 - BUDGET_SHARE)
    done: list[TunedRound] = []
    with lock.turn(budget_s), open_store(db, report) as store:
        if resume:
            fight_hints(rounds, machine, store, min(FIRST_S, FIRST_SHARE * budget_s), lock, report, bench)
        for number, tuning_round in enumerate(rounds):
            share_s = (deadline_s - bench.clock()) / (len(rounds) - number)
            problems = [] if model is None else storage_problems(model, tuning_round)
            duels_s = STORAGE_SHARE * share_s if problems else 0.0
            own_s = share_s - duels_s
            done.append(tune_round(tuning_round, machine, store, own_s, resume, progress, lock, bench))
            if done[-1].is_interrupted:
                break
            if problems:
                report(f"comparing sparse and dense storage: {counted(len(problems), 'product')} ...")
                call_s = done[-1].arithmetic_s
                duels = fight_storage_duels(
                    problems, tuning_round, machine, store, duels_s, resume, lock, bench, call_s
                )
                done[-1] = replace(done[-1], storage=tuple(duels))
        for key in dict.fromkeys(machine_key(machine, tuning_round.cores) for tuning_round in rounds):
            tidy(store, key, report)
    return done


def change_of_model(
    opened: OpenModel,
    tuned: Sequence[TunedRound],
    machine: Machine,
    db: str | None,
    budget_s: float,
    lock: MeasurementLock,
    report: Report,
    bench: TuningBench = HERE,
) -> list[SpeedChange]:
    """The effect of a run on the model that it was for: tokens per second before and after, in pairs.

    budget_s: what is left of the run's. Empty where every product that was tuned keeps the kernels' own
    schedule. Kept in the database where
    nothing was tuned before.
    """
    from phasewise.workflows.opening.tuned_schedules import schedules_for

    if all(gain.is_default for tuned_round in tuned for gain in tuned_round.outcome.gains):
        return []
    after = schedules_for(db, machine, opened.plans)
    began_s = bench.clock()
    with lock.turn(budget_s):
        left_s = budget_s - (bench.clock() - began_s)
        changes = measured_change(opened, after, left_s, report, bench, partial(_least_s, tuned))
    if changes and not any(table.is_tuned for table in opened.schedules.values()):
        scope = Scope(machine_key(machine), kernel_abi("gemm"), __version__)
        with open_store(db, report) as store:
            if store.writable:
                keep_changes(store, scope, machine, opened, changes)
    return changes


def _least_s(tuned: Sequence[TunedRound], workload: Workload) -> float:
    """The least time of a turn of the model, by the limits that its run has measured."""
    phase, rows = ("prefill", workload.n_prompt) if workload.n_prompt else ("decode", workload.n_sequences)
    n_steps = 1 if workload.n_prompt else workload.n_gen
    own = next((each for each in tuned if phase in each.round.phases), None)
    if own is None:
        return 0.0
    products = zip(own.round.shapes, own.round.tasks, strict=True)
    return n_steps * sum(
        shape.uses * bound_s(own.round, own.roofline, task.problem(min(rows, task.ms[-1])))
        for shape, task in products
    )

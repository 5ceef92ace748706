"""One run of `tune-kernels`: what to tune for a model or for shapes, then each round within the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from phasewise._version import __version__
from phasewise._words import counted
from phasewise.cython_kernels import sparse
from phasewise.cython_kernels._native import kernel_abi
from phasewise.cython_kernels.packing import PANEL
from phasewise.kerneldb.records import Measurement, Origin, Problem, Schedule, StorageDuel
from phasewise.kerneldb.store import open_store
from phasewise.kerneldb.upkeep import tidy
from phasewise.serving.models.forward import attention_problem, tuned_attention
from phasewise.serving.ranks.core_weights import weights_here
from phasewise.serving.ranks.open_ranks import ALL_LOGITS_ROWS
from phasewise.topology import Machine, placement_signature
from phasewise.tuner.first_duels import FIRST_S, FIRST_SHARE
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.native import default_schedule, paths_of
from phasewise.tuner.plans import Phase, ServicePlan, default_plan
from phasewise.tuner.search.space import Arithmetic, arithmetic_of
from phasewise.tuner.timing import PAIRS
from phasewise.tuner.tuning_run import TuningProgress
from phasewise.tuner.weights import SIXTEENTHS, blank_weight, dense_format, sparse_format, split_format
from phasewise.workflows.opening.tuned_schedules import read_schedules
from phasewise.workflows.report import Report, silent
from phasewise.workflows.tune_kernels.hints import fight_hints
from phasewise.workflows.tune_kernels.rounds import (
    HEADS,
    HERE,
    Round,
    Shape,
    TunedRound,
    Tuning,
    TuningBench,
    evaluator_on,
    plan_rounds,
    shapes_of,
    tune_round,
)

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.topology import Machine
    from phasewise.tuner.search.group import Group
    from phasewise.workflows.opening.open_model import OpenModel

DECODE_ROWS = (1, 8, 16, 32)
"""Rows of the products that decode's duels compare: one sequence, and as many as servers have."""

CALLS_A_DUEL = 4 * PAIRS
"""Number of calls at the limit of speed that last as long as a duel, at half of that speed."""

MOST_KEPT = 15
"""Sixteenths of values: a weight that keeps more of them saves too little in sparse storage for a duel."""


def storage_problems(model: PackedModel, tuning_round: Round) -> list[Problem]:
    """The duels of a round: each shape and density of the model's weights, by the rows of its phases."""
    head = next(name for name in HEADS if name in model.weights)
    problems: dict[Problem, None] = {}
    for name, weight in model.products().items():
        if (name in HEADS and name != head) or not sparse.can_be_sparse(weight.kind, weight.mins is not None):
            continue
        density = sparse.density(weight)
        if round(SIXTEENTHS * density) > MOST_KEPT:
            continue
        kept = sparse_format(dense_format(weight), density)
        for m in _rows(tuning_round, name == head):
            problems[Problem("gemm", kept, weight.n, weight.k, m)] = None
    return list(problems)


def _rows(tuning_round: Round, is_head: bool) -> Iterator[int]:
    """Numbers of rows in duels; the head computes logits of few rows alone."""
    most = max(task.ms[-1] for task in tuning_round.tasks)
    if "decode" in tuning_round.phases:
        yield from (m for m in DECODE_ROWS if m <= most)
    if "prefill" in tuning_round.phases:
        yield min(most, ALL_LOGITS_ROWS) if is_head else most


def fight_storage_duels(
    problems: Sequence[Problem],
    tuning_round: Round,
    tuning: Tuning,
    budget_s: float,
    call_s: Callable[[Problem], float] = lambda _: 0.0,
) -> list[StorageDuel]:
    """Fight the duels that the budget allows; each result is stored at once.

    A duel is expected to take as long as the longest one of as many rows, and as CALLS_A_DUEL calls at least.
    call_s: the least seconds of a call.
    """
    store, clock, cores = tuning.store, tuning.bench.clock, tuning_round.cores
    deadline_s, key, abi = clock() + budget_s, tuning.key(tuning_round), kernel_abi("gemm")
    table = read_schedules(store, tuning.machine, cores, silent)
    rows = store.rows(StorageDuel, machine=key, kernel_abi=abi, verified=True) if tuning.resume else []
    stored_duels = {duel.problem: duel for duel in rows}
    duels: list[StorageDuel] = []
    longest_s: dict[int, float] = {}
    with evaluator_on(cores, tuning, budget_s) as evaluator:
        for problem in problems:
            if problem in stored_duels:
                duels.append(stored_duels[problem])
                continue
            expected_s = max(longest_s.get(problem.m, 0.0), CALLS_A_DUEL * call_s(problem))
            if clock() + expected_s >= deadline_s:
                continue
            schedule, dense = schedules_of_duel(problem, table, len(cores))
            with tuning.lock.turn(deadline_s - clock()) as is_alone:
                if not is_alone:
                    break
                began_s = clock()
                fought = evaluator.duel_storages(problem, schedule, dense)
                longest_s[problem.m] = max(expected_s, clock() - began_s)
            origin = Origin(key, __version__, time.time_ns() // 1_000_000)
            duel = StorageDuel(problem, schedule, dense, fought.comparison, abi, origin)
            of_dense = Problem("gemm", split_format(problem.format)[0], problem.n, problem.k, problem.m)
            samples = [(of_dense, fought.incumbent), (problem, fought.candidate)]
            store.add(Measurement(what, sample, abi, origin) for what, sample in samples)
            store.add([duel])
            duels.append(duel)
    return duels


def schedules_of_duel(problem: Problem, table: ScheduleTable, threads: int) -> tuple[Schedule, Schedule]:
    """The schedule of each storage, sparse first, in the arithmetic of the dense weight."""
    dense = split_format(problem.format)[0]
    of_dense = table.arithmetic_of(("gemm", dense, problem.n, problem.k))
    arithmetic = of_dense or Arithmetic(paths_of(dense)[0])

    def schedule(weight_format: str) -> Schedule:
        tuned = table.choice(("gemm", weight_format, problem.n, problem.k), problem.m).schedule
        if tuned is not None and arithmetic_of(tuned) == arithmetic:
            return tuned
        weight = blank_weight(weight_format, problem.n, problem.k)
        return default_schedule(weight, problem.m, threads, arithmetic)

    return schedule(problem.format), schedule(dense)


STORAGE_SHARE = 0.25
"""Part of a round's share of the budget for duels between storages, where there are some."""

MOST_ROWS = 512
"""Most rows of a product: the engine computes no more at once."""


def kernel_rounds(
    model: PackedModel, machine: Machine, plans: Sequence[ServicePlan], most_rows: int = MOST_ROWS
) -> list[Round]:
    """The products to tune for `plans`, the most wanted first; phases on the same cores share a round."""
    by_placement: dict[tuple[object, ...], tuple[ServicePlan, dict[Phase, tuple[int, ...]]]] = {}
    for plan in plans:
        cores = plan.ranks[0].cores
        key = (placement_signature(machine, cores), weights_here(plan))
        first, phases = by_placement.setdefault(key, (plan, {}))
        phases.setdefault(plan.phase, first.ranks[0].cores)
    return [_round(model, machine, plan, phases, most_rows) for plan, phases in by_placement.values()]


def _round(
    model: PackedModel,
    machine: Machine,
    plan: ServicePlan,
    phases: Mapping[Phase, tuple[int, ...]],
    most_rows: int,
) -> Round:
    whole = shapes_of(model)
    if len(plan.ranks) == 1:
        (only,) = plan_rounds(machine, phases, whole, most_rows, tuned_attention(model))
        return only
    weights = weights_here(plan)
    shapes = tuple(dict.fromkeys(part for shape in whole for part in _parts(shape, weights)))
    (only,) = plan_rounds(machine, phases, shapes, most_rows, _attention_of_a_rank(model, weights))
    tasks = tuple(replace(task, group=_in_default_arithmetic(task.group)) for task in only.tasks)
    return replace(only, tasks=tasks, ranks=len(plan.ranks))


def _attention_of_a_rank(model: PackedModel, weights: tuple[int, ...]) -> tuple[str, int, int] | None:
    """Attention's KV format and heads on the rank that has most heads."""
    from phasewise.cython_kernels.division import head_share

    if tuned_attention(model) is None:
        return None
    config = model.config
    shares = [head_share(config.n_heads, config.n_kv_heads, weights, rank) for rank in range(len(weights))]
    return attention_problem(model, max(shares, key=lambda own: own.n_heads))


def _in_default_arithmetic(group: Group) -> Group:
    """Restrict a group to its default arithmetic: a rank sees only a part of a weight, and arithmetic belongs
    to the whole weight (decision 0008)."""
    own = group.arithmetics[0]
    return replace(group, arithmetics=(own,), kernels={own.compute_path: group.kernels[own.compute_path]})


def _parts(shape: Shape, weights: tuple[int, ...]) -> Iterator[Shape]:
    """The part of one weight that each rank computes, in whole panels."""
    from phasewise.cython_kernels.division import share

    panels = -(-shape.n // PANEL)
    for rank in range(len(weights)):
        begin, end = share(panels, weights, rank)
        if end > begin:
            yield replace(shape, n=min(shape.n, end * PANEL) - begin * PANEL)


def rounds_of_model(opened: OpenModel, machine: Machine, phases: Sequence[Phase], max_m: int) -> list[Round]:
    """The products and the attention of a model, on the cores of its plans for `phases`, bands included."""
    plans: dict[Phase, ServicePlan] = {phase: plan for phase, plan in opened.plans.items() if phase in phases}
    if any(len(plan.ranks) > 1 for plan in opened.plans.values()):
        each = [own for plan in plans.values() for own in plan.each]
        return kernel_rounds(opened.model, machine, each, max_m)
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

    model: its weights with zeros are compared in sparse and dense storage at the end of each round.
    """
    deadline_s = bench.clock() + budget_s
    done: list[TunedRound] = []
    with lock.turn(budget_s), open_store(db, report) as store:
        tuning = Tuning(machine, store, lock, report, progress, resume, bench)
        if resume:
            fight_hints(rounds, tuning, min(FIRST_S, FIRST_SHARE * budget_s))
        for number, tuning_round in enumerate(rounds):
            share_s = (deadline_s - bench.clock()) / (len(rounds) - number)
            problems = [] if model is None else storage_problems(model, tuning_round)
            duels_s = STORAGE_SHARE * share_s if problems else 0.0
            done.append(tune_round(tuning_round, tuning, share_s - duels_s))
            if done[-1].is_interrupted:
                break
            if problems:
                report(f"comparing sparse and dense storage: {counted(len(problems), 'product')} ...")
                duels = fight_storage_duels(problems, tuning_round, tuning, duels_s, done[-1].arithmetic_s)
                done[-1] = replace(done[-1], storage=tuple(duels))
        for key in dict.fromkeys(map(tuning.key, rounds)):
            tidy(store, key, report)
    return done

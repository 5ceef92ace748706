"""One run of `tune-kernels`: what to tune for a model or for shapes, then each round within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.cython_kernels.packing import PANEL
from phasewise.kerneldb.store import open_store
from phasewise.kerneldb.upkeep import tidy
from phasewise.serving.models.forward import attention_problem, tuned_attention
from phasewise.serving.ranks.core_weights import weights_here
from phasewise.topology import Machine, placement_signature
from phasewise.tuner.first_duels import FIRST_S, FIRST_SHARE
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import Phase, ServicePlan, default_plan, list_cores, machine_key
from phasewise.tuner.tuning_run import TuningProgress
from phasewise.workflows.report import Report
from phasewise.workflows.tune_kernels.hints import fight_hints
from phasewise.workflows.tune_kernels.rounds import (
    HERE,
    Round,
    Shape,
    TunedRound,
    TuningBench,
    plan_rounds,
    shapes_of,
    tune_round,
)
from phasewise.workflows.tune_kernels.storage_duels import fight_storage_duels, storage_problems

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.tuner.search.group import Group
    from phasewise.workflows.opening.open_model import OpenModel


STORAGE_SHARE = 0.25
"""Part of a round's share of the budget that duels between storages get, where there are some."""


MOST_ROWS = 512
"""Most rows of a product: the engine computes no more at once."""


@dataclass(frozen=True)
class KernelRound:
    """One set of products on one rank's cores."""

    round: Round
    ranks: int

    def describe(self) -> str:
        """E.g. `prefill and decode on cores 0,1`."""
        of = f" (a rank of {self.ranks})" if self.ranks > 1 else ""
        return f"{' and '.join(self.round.phases)} on cores {list_cores(self.round.cores)}{of}"


def kernel_rounds(
    model: PackedModel, machine: Machine, plans: Sequence[ServicePlan], most_rows: int = MOST_ROWS
) -> list[KernelRound]:
    """The products to tune for `plans`, the most wanted first; both phases at once where they use the same
    cores.
    """
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
) -> KernelRound:
    whole = shapes_of(model)
    if len(plan.ranks) == 1:
        (only,) = plan_rounds(machine, phases, whole, most_rows, tuned_attention(model))
        return KernelRound(only, 1)
    weights = weights_here(plan)
    shapes = tuple(dict.fromkeys(part for shape in whole for part in _parts(shape, weights)))
    (only,) = plan_rounds(machine, phases, shapes, most_rows, _attention_of_a_rank(model, weights))
    tasks = tuple(replace(task, group=_in_default_arithmetic(task.group)) for task in only.tasks)
    return KernelRound(replace(only, tasks=tasks), len(plan.ranks))


def _attention_of_a_rank(model: PackedModel, weights: tuple[int, ...]) -> tuple[str, int, int] | None:
    """With as many heads as the rank that has most."""
    from phasewise.cython_kernels.division import head_share

    if tuned_attention(model) is None:
        return None
    config = model.config
    shares = [head_share(config.n_heads, config.n_kv_heads, weights, rank) for rank in range(len(weights))]
    return attention_problem(model, max(shares, key=lambda own: own.n_heads))


def _in_default_arithmetic(group: Group) -> Group:
    """The arithmetic belongs to the whole weight (decision 0008), which no rank sees."""
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

    model: whose weights, where some are zero, are compared stored sparse and dense at the end of each round.
    """
    deadline_s = bench.clock() + budget_s
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

"""Kernels for service plans: the products that one rank computes, tuned on that rank's cores.

A rank of several has fewer columns of every weight, so its products are others than those of the whole model.
Plans whose ranks look alike to a kernel (as many threads, which share alike, on as many columns) share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise.cython_kernels.packing import PANEL
from phasewise.serving.models.forward import attention_problem, tuned_attention
from phasewise.serving.ranks.core_weights import weights_here
from phasewise.topology import Machine, placement_signature
from phasewise.tuner.plans import Phase, ServicePlan, list_cores
from phasewise.workflows.tune_kernels.rounds import Round, Shape, plan_rounds, shapes_of

if TYPE_CHECKING:
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.tuner.search.group import Group

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

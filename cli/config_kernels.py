"""Kernels for service plans: the products that one rank computes, tuned on that rank's cores.

A rank of several has fewer columns of every weight, so its products are others than those of the whole model.
Plans whose ranks look alike to a kernel (as many threads, which share alike, on as many columns) share them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from phasewise.cli.tuning import Round, Shape, plan_rounds, shapes_of
from phasewise.cython_kernels.packing import PANEL
from phasewise.serving.forward import attention_problem
from phasewise.topology import Machine, placement_signature
from phasewise.tuner.plans import Phase, ServicePlan, list_cores

if TYPE_CHECKING:
    from phasewise.serving.model import PackedModel

MOST_ROWS = 512
"""Of a product: the engine computes no more at once."""


@dataclass(frozen=True)
class KernelRound:
    """One set of products on one rank's cores."""

    round: Round
    ranks: int

    def describe(self) -> str:
        """E.g. `prefill and decode on cores 0,1`."""
        of = f" (a rank of {self.ranks})" if self.ranks > 1 else ""
        return f"{' and '.join(self.round.phases)} on cores {list_cores(self.round.cores)}{of}"


def kernel_rounds(model: PackedModel, machine: Machine, plans: Sequence[ServicePlan]) -> list[KernelRound]:
    """What to tune for `plans`, the most wanted first; both phases at once where they use the same cores."""
    found: dict[tuple[object, ...], tuple[ServicePlan, dict[Phase, tuple[int, ...]]]] = {}
    for plan in plans:
        cores = plan.ranks[0].cores
        key = (placement_signature(machine, cores), tuple(len(rank.cores) for rank in plan.ranks))
        first, phases = found.setdefault(key, (plan, {}))
        phases.setdefault(plan.phase, first.ranks[0].cores)
    return [_round(model, machine, plan, phases) for plan, phases in found.values()]


def _round(
    model: PackedModel, machine: Machine, plan: ServicePlan, phases: Mapping[Phase, tuple[int, ...]]
) -> KernelRound:
    whole = shapes_of(model)
    if len(plan.ranks) == 1:
        shapes, attention = whole, attention_problem(model)
    else:
        teams = tuple(len(rank.cores) for rank in plan.ranks)
        shapes = tuple(dict.fromkeys(part for shape in whole for part in _parts(shape, teams)))
        attention = None
    (only,) = plan_rounds(machine, phases, shapes, MOST_ROWS, attention)
    return KernelRound(only, len(plan.ranks))


def _parts(shape: Shape, teams: tuple[int, ...]) -> Iterator[Shape]:
    """What each rank computes of one weight, in whole panels."""
    from phasewise.cython_kernels.division import share

    panels = -(-shape.n // PANEL)
    for rank in range(len(teams)):
        begin, end = share(panels, teams, rank)
        if end > begin:
            yield replace(shape, n=min(shape.n, end * PANEL) - begin * PANEL)

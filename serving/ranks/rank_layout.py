"""The ranks of all plans as processes: which process takes part in which phase, with which cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from phasewise._words import counted
from phasewise.cython_kernels.division import Division
from phasewise.serving.errors import RanksError
from phasewise.serving.models.packed_model import PackedModel
from phasewise.tuner.plans import PHASES, Phase, RankCores, ServicePlan


@dataclass(frozen=True)
class RankLayout:
    """A phase of R ranks uses processes 0 to R - 1; process 0 is the engine's own."""

    plans: Mapping[Phase, ServicePlan]

    @cached_property
    def teams(self) -> tuple[tuple[int, ...], ...]:
        """For each phase the numbers of threads of its ranks: `Division.teams`."""
        return tuple(
            tuple(len(rank.cores) for rank in self.plans[phase].ranks) if phase in self.plans else ()
            for phase in PHASES
        )

    @property
    def n_ranks(self) -> int:
        return max(map(len, self.teams))

    @property
    def spans_nodes(self) -> bool:
        """True if ranks should have their memory on different NUMA nodes."""
        return len({self.node(rank) for rank in range(self.n_ranks)} - {None}) > 1

    def division(self, rank: int) -> Division:
        return Division(self.teams, rank)

    def threads(self, rank: int) -> int:
        """The most threads that a rank has in any phase."""
        return max(len(cores) for cores in self.cores(rank).values())

    def cores(self, rank: int) -> dict[Phase, tuple[int, ...]]:
        """The cores of a rank in each phase that it takes part in."""
        return {phase: member.cores for phase, member in self._roles(rank).items()}

    def node(self, rank: int) -> int | None:
        """The NUMA node for a rank's memory: its node in decode, which memory bounds. None: any."""
        roles = self._roles(rank)
        return (roles.get("decode") or roles["prefill"]).numa_node

    def check_divides(self, model: PackedModel) -> None:
        """RanksError if a phase has more ranks than the model has KV heads."""
        heads = model.config.n_kv_heads
        for plan in self.plans.values():
            if len(plan.ranks) > heads:
                raise RanksError(
                    f"the {plan.phase} plan has {counted(len(plan.ranks), 'rank')}, but {model.name} has"
                    f" {counted(heads, 'KV head')} to share: use a plan of at most {heads}"
                )

    def _roles(self, rank: int) -> dict[Phase, RankCores]:
        return {phase: plan.ranks[rank] for phase, plan in self.plans.items() if rank < len(plan.ranks)}

"""Layout of the ranks of all plans: the processes of each phase, and their cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from phasewise._words import counted
from phasewise.cython_kernels.division import Division, Teams
from phasewise.serving.errors import RanksError
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.ranks.core_weights import weights_here
from phasewise.serving.ranks.rank_teams import plans_by_table, starts_of
from phasewise.topology import MemoryNodes, TopologyError, read_memory_nodes
from phasewise.tuner.plans import PHASES, Phase, ServicePlan


def teams_of(plans: Mapping[Phase, ServicePlan]) -> Teams:
    """Number of threads of each rank, by schedule table: `Division.teams`."""
    return _by_rank(plans, lambda plan: tuple(len(rank.cores) for rank in plan.ranks))


def _by_rank(plans: Mapping[Phase, ServicePlan], of_ranks: Callable[[ServicePlan], tuple[int, ...]]) -> Teams:
    """The ranks' numbers by schedule table; () for a table that no plan has."""
    by_table = plans_by_table(plans)
    n_tables = max(len(PHASES), *(table + 1 for table in by_table))
    return tuple(of_ranks(by_table[table]) if table in by_table else () for table in range(n_tables))


@dataclass(frozen=True)
class RankLayout:
    """Ranks as processes: a phase of R ranks uses processes 0 to R - 1; process 0 is the engine's own."""

    plans: Mapping[Phase, ServicePlan]
    memory: MemoryNodes | None = field(default=None)
    """NUMA nodes with memory; None: the machine has one node."""
    weights: Teams = ()
    """Weights of the ranks by schedule table: `Division.weights`; (): their numbers of threads."""

    @classmethod
    def here(cls, plans: Mapping[Phase, ServicePlan], *, pinned: bool = True) -> RankLayout:
        """The layout on this machine, with cores of several kinds measured. `pinned`: threads stay on their
        cores. RanksError: the machine's topology cannot be read."""
        try:
            weights = _by_rank(plans, weights_here) if pinned else ()
            return cls(plans, read_memory_nodes(), weights)
        except TopologyError as error:
            raise RanksError(str(error)) from error

    @cached_property
    def teams(self) -> Teams:
        return teams_of(self.plans)

    @cached_property
    def _by_table(self) -> dict[int, ServicePlan]:
        return plans_by_table(self.plans)

    @property
    def starts(self) -> tuple[int, ...]:
        """Number of sequences from which a decode step uses each further schedule table."""
        return starts_of(self.plans)

    @property
    def n_ranks(self) -> int:
        return max(map(len, self.teams))

    @property
    def all_cores(self) -> frozenset[int]:
        return frozenset(core for plan in self.plans.values() for core in plan.all_cores)

    @property
    def places_memory(self) -> bool:
        """True if the machine has several NUMA nodes, or the ranks are on several."""
        homes = {node for rank in range(self.n_ranks) for node in self.home(rank)}
        return self.memory is not None or len(homes) > 1

    def division(self, rank: int) -> Division:
        return Division(self.teams, rank, self.weights)

    def threads(self, rank: int) -> int:
        """Most threads of a rank in any phase or band."""
        return max(len(cores) for cores in self.cores(rank).values())

    def cores(self, rank: int) -> dict[int, tuple[int, ...]]:
        """Cores of a rank, by schedule table that the rank takes part in."""
        return {
            table: plan.ranks[rank].cores for table, plan in self._by_table.items() if rank < len(plan.ranks)
        }

    def cores_by(self, table: int) -> tuple[int, ...]:
        """Cores of all ranks in the steps of a schedule table."""
        return self._by_table[table].cores

    def nodes(self, rank: int) -> tuple[int, ...]:
        """NUMA nodes of a rank's memory, near its cores in decode, which memory limits; (): any."""
        home = self.home(rank)
        if not self.places_memory or self.memory is None:
            return home if self.places_memory else ()
        return tuple(sorted({self.memory.nearest(node) for node in home}))

    def home(self, rank: int) -> tuple[int, ...]:
        """NUMA nodes of a rank's cores in decode (else prefill), including nodes without memory."""
        roles = {phase: plan.ranks[rank] for phase, plan in self.plans.items() if rank < len(plan.ranks)}
        role = roles.get("decode") or roles["prefill"]
        if role.numa_node is not None:
            return (role.numa_node,)
        return () if self.memory is None else self.memory.homes(role.cores)

    def check_divides(self, model: PackedModel) -> None:
        """Raise RanksError if a phase has more ranks than the model has query heads."""
        heads = model.config.n_heads
        for plan in self.plans.values():
            if len(plan.ranks) > heads:
                raise RanksError(
                    f"the {plan.phase} plan has {counted(len(plan.ranks), 'rank')}, but {model.name} has"
                    f" {counted(heads, 'query head')} to share: use a plan of at most {heads}"
                )

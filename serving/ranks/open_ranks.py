"""Opening of ranks: one in this process, or several in processes of their own over one set of weights and KV.
Both phases, and the bands of decode's plan, run one program over the same memory, so that switching copies
nothing. Teams on the same cores are one team."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.batch import STEP_TOKENS
from phasewise.serving.errors import RanksError
from phasewise.serving.models.draft_head import FedRows
from phasewise.serving.models.forward import build_program, kv_bytes_per_slot, reschedule, resolve_kv_format
from phasewise.serving.models.linears import PlacedProduct
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.pools.arena import aligned
from phasewise.serving.processes.headroom import check_memory
from phasewise.serving.processes.segments import Segment
from phasewise.serving.ranks.first_rank import (
    ALL_LOGITS_ROWS,
    FirstRank,
    KvSettings,
    RankOptions,
    Ranks,
    Teams,
    room_for,
)
from phasewise.serving.ranks.kv_share import KvShape, KvShare
from phasewise.serving.ranks.rank_layout import RankLayout
from phasewise.serving.ranks.rank_memory import tell_of_others
from phasewise.serving.ranks.rank_teams import (
    MOST_TABLES,
    lookups_by_table,
    open_teams,
    plans_by_table,
    starts_of,
    touch_memory,
)
from phasewise.serving.ranks.shared_weights import weights_near
from phasewise.tuner.plans import Phase, ServicePlan

if TYPE_CHECKING:
    from phasewise.serving.ranks.process_ranks import ProcessRanks

__all__ = ["ALL_LOGITS_ROWS", "STEP_TOKENS", "KvSettings", "LocalRanks", "RankOptions", "Ranks", "open_ranks"]


def open_ranks(
    model: PackedModel, plans: Mapping[Phase, ServicePlan], options: RankOptions
) -> LocalRanks | ProcessRanks:
    """Open the ranks of `plans`: in this process if every phase has one rank, else in one process per rank.
    RanksError: a plan cannot be run here, or memory is short. ModelError: no kernel computes this model."""
    if all(len(plan.ranks) == 1 for plan in plans.values()):
        return LocalRanks(model, plans, options)
    from phasewise.serving.ranks.process_ranks import ProcessRanks

    return ProcessRanks(model, plans, options)


class LocalRanks(FirstRank, Ranks):
    """The only rank of a plan, in this process. Arguments and errors: as `open_ranks`."""

    moves_in_place = True

    def __init__(self, model: PackedModel, plans: Mapping[Phase, ServicePlan], options: RankOptions) -> None:
        cores = _of_only_rank(plans)
        self.kv_format = resolve_kv_format(model, options.kv.format)
        self.kv_bytes_per_slot = kv_bytes_per_slot(model, self.kv_format)
        self.kv_slots = options.kv.slots
        threads = max(len(members) for members in cores.values())
        capacity = room_for(options, threads, self.kv_format)
        self._pinned = options.pinned
        layout = RankLayout.here(plans, pinned=options.pinned)
        nodes = layout.nodes(0)
        if nodes:
            tell_of_others(0, layout.home(0), nodes)
        model = weights_near(model, nodes, options.kv.slots * self.kv_bytes_per_slot)
        lookups = _lookups_of_all_tables(options.schedules)
        teams = open_teams(cores, options.pinned)
        self._kv_share: KvShare | None = None
        self._model, self._capacity = model, capacity
        self._placed: list[PlacedProduct] = []

        def share_kv(n_bytes: int) -> memoryview:
            shape = KvShape.of(model.config, self.kv_format)
            segment = Segment.create(n_bytes, "kv")
            self._kv_share = KvShare.of(segment, shape, 0, aligned(options.kv.slots), options.kv.states, ())
            return memoryview(segment.memory)

        try:
            kv_memory = share_kv if options.kv.shared else None
            program = build_program(
                model, capacity, check_memory, lookups, kv_memory=kv_memory, placed=self._placed
            )
            if nodes:
                program.spread(nodes)  # a refusal was told of the weights
            if options.kv.touched:
                touch_memory(program, teams)
        except Exception:
            for team in teams.values():
                team.close()
            self._close_kv()
            raise
        room = capacity.step_tokens, capacity.logit_rows
        fed = FedRows.of(program, model.config, *room) if capacity.feeds else None
        super().__init__(program, Teams(teams, starts_of(plans)), capacity, fed=fed, nodes=nodes)

    @property
    def first_rank(self) -> FirstRank:
        return self

    @property
    def kv_share(self) -> KvShare:
        if self._kv_share is None:
            raise RanksError("these ranks do not share their keys and values")
        return self._kv_share

    def reschedule(self, schedules: Mapping[Phase, ScheduleLookup]) -> None:
        """Use other schedules from the next step on. No bit of a result changes."""
        lookups = _lookups_of_all_tables(schedules)
        reschedule(self.program, self._model, self._capacity, lookups, self._placed)

    def move(
        self, plans: Mapping[Phase, ServicePlan], schedules: Mapping[Phase, ScheduleLookup] | None
    ) -> None:
        cores = _of_only_rank(plans)
        most = max(len(members) for members in cores.values())
        if most > self._capacity.threads:
            raise RanksError(f"{most} threads do not fit: there is room for {self._capacity.threads}")
        self.teams.change(open_teams(cores, self._pinned), starts_of(plans))
        self._warned = False
        if schedules:
            self.reschedule(schedules)

    def close(self) -> None:
        super().close()
        self._close_kv()

    def _close_kv(self) -> None:
        if self._kv_share is not None:
            self._kv_share.segment.close()


def _lookups_of_all_tables(schedules: Mapping[Phase, ScheduleLookup] | None) -> list[ScheduleLookup]:
    """Lookups of all possible tables, with defaults for tables that only later plans may have."""
    lookups = lookups_by_table(schedules)
    return lookups and [*lookups, *[ScheduleLookup()] * (MOST_TABLES - len(lookups))]


def _of_only_rank(plans: Mapping[Phase, ServicePlan]) -> dict[int, tuple[int, ...]]:
    """Cores of the only rank, by schedule table."""
    for plan in plans.values():
        for own in plan.each:
            if len(own.ranks) != 1:
                raise RanksError(
                    f"the {plan.phase} plan has {counted(len(own.ranks), 'rank')};"
                    " those run in processes: `open_ranks`"
                )
    return {table: plan.ranks[0].cores for table, plan in plans_by_table(plans).items()}

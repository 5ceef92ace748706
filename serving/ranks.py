"""Where batches are computed: one rank in this process, or several in processes of their own, over one set
of weights and KV.

Both phases run the same program over the same memory, so switching between them copies nothing, whatever
ranks and cores each of them has. Teams that would use the same cores are one team.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch
from phasewise.serving.errors import RanksError
from phasewise.serving.first_rank import ALL_LOGITS_ROWS, STEP_TOKENS, FirstRank, room_for
from phasewise.serving.forward import AUTO, build_program, kv_bytes_per_slot, resolve_kv_format
from phasewise.serving.memory import check_memory
from phasewise.serving.model import PackedModel
from phasewise.serving.rank_teams import open_teams, touch_memory
from phasewise.serving.schedules import ScheduleLookup
from phasewise.tuner.plans import PHASES, Phase, ServicePlan

__all__ = ["ALL_LOGITS_ROWS", "STEP_TOKENS", "LocalRanks", "Ranks", "open_ranks"]


class Ranks(Protocol):
    """What computes the steps of a model. Calls are for one thread at a time, which may be pinned by them."""

    kv_slots: int
    kv_format: str
    """How keys and values are stored: `forward.resolve_kv_format`."""
    kv_bytes_per_slot: int

    @property
    def native_ns(self) -> int:
        """Time spent computing steps outside Python, since the start."""
        ...

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits float32 [slices that want them, vocab], in the slices' order; valid until the next call."""
        ...

    def all_logits(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits after every token of the batch, float32 [tokens, vocab]."""
        ...

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """Copy keys and values of all layers; the ranges may overlap."""
        ...

    def observed_cpus(self) -> dict[Phase, tuple[int, ...]]:
        """Where each phase's threads, rank by rank, were last seen working; -1 before their first step."""
        ...

    @property
    def lost(self) -> str | None:
        """In one line, why these ranks are of no more use until `reopen`; None while all is well."""
        ...

    def watch(self, on_loss: Callable[[], None]) -> None:
        """`on_loss` is called, on any thread, when a rank has died."""
        ...

    def reopen(self) -> None:
        """Start the ranks anew, with the same plans and weights; keys and values are lost."""
        ...

    def close(self) -> None:
        """End threads and processes. Logits still held stay valid. Twice is harmless."""
        ...


def open_ranks(
    model: PackedModel,
    plans: Mapping[Phase, ServicePlan],
    kv_slots: int,
    max_batch_tokens: int,
    max_sequences: int,
    schedules: Mapping[Phase, ScheduleLookup] | None = None,
    pinned: bool = True,
    kv_format: str = AUTO,
    touched: bool = False,
) -> Ranks:
    """The ranks that `plans` ask for: in this process where every phase has one, else a process each.

    kv_slots: positions that all sequences together may hold. schedules: a lookup for each phase; prefill's
    says by which arithmetic every weight is computed, in both. kv_format: how keys and values are stored
    (`forward.resolve_kv_format`). Not pinned: the system may move the threads,
    so that there may be more of them than cores (for tests). touched: all memory is there before the first
    step (for servers). RanksError if a plan cannot be run here or the
    memory is not there; ModelError if no kernel computes this model.
    """
    if all(len(plan.ranks) == 1 for plan in plans.values()):
        return LocalRanks(
            model, plans, kv_slots, max_batch_tokens, max_sequences, schedules, pinned, kv_format, touched
        )
    from phasewise.serving.process_ranks import ProcessRanks

    return ProcessRanks(
        model, plans, kv_slots, max_batch_tokens, max_sequences, schedules, pinned, kv_format, touched
    )


class LocalRanks(FirstRank):
    """One rank, in this process. What the arguments mean, and what may go wrong: `open_ranks`."""

    def __init__(
        self,
        model: PackedModel,
        plans: Mapping[Phase, ServicePlan],
        kv_slots: int,
        max_batch_tokens: int,
        max_sequences: int,
        schedules: Mapping[Phase, ScheduleLookup] | None = None,
        pinned: bool = True,
        kv_format: str = AUTO,
        touched: bool = False,
    ) -> None:
        cores = {phase: _only_rank(plan) for phase, plan in plans.items()}
        self.kv_format = resolve_kv_format(model, kv_format)
        self.kv_bytes_per_slot = kv_bytes_per_slot(model, self.kv_format)
        self.kv_slots = kv_slots
        threads = max(len(members) for members in cores.values())
        capacity = room_for(kv_slots, max_batch_tokens, max_sequences, threads, self.kv_format, touched)
        lookups = [schedules[phase] for phase in PHASES] if schedules else []
        teams = open_teams(cores, pinned)
        try:
            program = build_program(model, capacity, check_memory, lookups)
            if touched:
                touch_memory(program, teams)
        except Exception:
            for team in teams.values():
                team.close()
            raise
        super().__init__(program, teams, capacity)

    @property
    def lost(self) -> str | None:
        """Never: this rank dies with its process."""
        return None

    def watch(self, on_loss: Callable[[], None]) -> None:
        """Nothing to watch."""

    def reopen(self) -> None:
        """RanksError: there is nothing that could be started anew."""
        raise RanksError("the only rank is this process; it cannot be started anew")


def _only_rank(plan: ServicePlan) -> tuple[int, ...]:
    if len(plan.ranks) != 1:
        raise RanksError(
            f"the {plan.phase} plan has {len(plan.ranks)} ranks; those run in processes: `open_ranks`"
        )
    return plan.ranks[0].cores

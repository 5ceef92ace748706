"""A small model that computes on the first rank's threads, between the steps of the model that is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch
from phasewise.serving.models.forward import build_program, kv_bytes_per_slot, resolve_kv_format
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.memory import check_memory
from phasewise.serving.ranks.first_rank import FirstRank, room_for
from phasewise.serving.ranks.rank_teams import touch_memory
from phasewise.serving.ranks.ranks_contract import RankOptions


class DraftRanks(Protocol):
    """The ranks that compute a draft model's steps. Its slots are those of the model that is served."""

    vocab_size: int
    """Columns of its logits; tokens beyond them it cannot read."""

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As Ranks.forward."""
        ...

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """As Ranks.copy_kv."""
        ...


class GuestRank:
    """`model` on the teams of `host`, which may become another rank when ranks are started anew.

    Other ranks' cores rest meanwhile: a model that is worth drafting with is small. Errors: `open_ranks`.
    """

    def __init__(self, model: PackedModel, host: Callable[[], FirstRank], options: RankOptions) -> None:
        kv_format = resolve_kv_format(model, options.kv.format)
        self.vocab_size = model.config.vocab_size
        self.kv_bytes = options.kv.slots * kv_bytes_per_slot(model, kv_format)
        self._host = host
        at_first = host()
        self._capacity = room_for(options, at_first.teams.most_threads, kv_format)
        self._program = build_program(model, self._capacity, check_memory)
        if options.kv.touched:
            touch_memory(self._program, at_first.teams.by_phase)
        self._guest, self._guest_of = self._open(at_first), at_first

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As Ranks.forward. Adapters are those of the model that is served: this one has none."""
        slices = tuple(piece._replace(adapter=0) for piece in batch.slices)
        return self._rank.forward(batch._replace(slices=slices))

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """As Ranks.copy_kv. This model's layers keep no rings: nothing is to be done for those."""
        if source_slot >= self._capacity.kv_slots:
            return
        self._rank.copy_kv(source_slot, target_slot, n_slots)

    @property
    def _rank(self) -> FirstRank:
        host = self._host()
        if host is not self._guest_of:
            self._guest, self._guest_of = self._open(host), host
        return self._guest

    def _open(self, host: FirstRank) -> FirstRank:
        return FirstRank(self._program, {}, self._capacity, host)

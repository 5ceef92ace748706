"""A small model that computes on the first rank's threads, between the steps of the model that is served."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch
from phasewise.serving.models.draft_head import FedRows, RowVectors
from phasewise.serving.models.forward import build_program, kv_bytes_per_slot, resolve_kv_format
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.headroom import check_memory
from phasewise.serving.ranks.first_rank import FirstRank, room_for, slices_at_once
from phasewise.serving.ranks.rank_teams import touch_memory
from phasewise.serving.ranks.ranks_contract import RankOptions
from phasewise.serving.ranks.shared_weights import weights_near


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
        nodes = at_first.nodes
        self._program = build_program(weights_near(model, nodes, self.kv_bytes), self._capacity, check_memory)
        if nodes:
            self._program.spread(nodes)
        if options.kv.touched:
            touch_memory(self._program, at_first.teams.by_table)
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
        return FirstRank(self._program, host.teams, self._capacity, host)


class HeadRanks(Protocol):
    """The ranks that compute a head's steps, in the slots of the model that is served."""

    def forward_rows(self, batch: Batch, rows: RowVectors) -> tuple[npt.NDArray[np.float32], RowVectors]:
        """Logits as Ranks.forward, and the head's own row for each. rows: the model's, of every token."""
        ...

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """As Ranks.copy_kv."""
        ...


class GuestHead(GuestRank):
    """A head that drafts for the model of `host`, on its teams."""

    def __init__(self, model: PackedModel, host: Callable[[], FirstRank], options: RankOptions) -> None:
        super().__init__(model, host, options)
        room = self._capacity
        self._fed = FedRows.of(self._program, model.config, room.step_tokens, room.logit_rows)

    def forward_rows(self, batch: Batch, rows: RowVectors) -> tuple[npt.NDArray[np.float32], RowVectors]:
        """As HeadRanks.forward_rows; of a prefill batch, which wants no logits, both are empty."""
        if batch.phase == "decode":
            self._fed.write(rows)
            logits = self.forward(batch)
            return logits, self._fed.read(len(logits))
        first = 0
        for step in slices_at_once(batch.slices, self._capacity.step_tokens):
            n_tokens = sum(len(piece.token_ids) for piece in step)
            self._fed.write(rows[first : first + n_tokens])
            self.forward(Batch("prefill", tuple(step)))
            first += n_tokens
        return np.empty((0, self.vocab_size), np.float32), rows[:0]

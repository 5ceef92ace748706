"""Between an engine's steps and its store of prefixes: what was read is checked and goes on, what was
computed is offered. Called on the engine's thread.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.prefix_store.blocks import RecordShape
from phasewise.serving.prefix_store.store import PrefixStore, Restored, StoreCounts
from phasewise.serving.ranks.kv_share import KvShape

if TYPE_CHECKING:
    from phasewise.serving.engine.messages import StepStats
    from phasewise.serving.ranks.ranks_contract import Ranks
    from phasewise.serving.scheduling.scheduler import Scheduler

_OF_THE_NEWEST = 0.2
"""Weight of a step in the mean time of a prompt's token."""


def shape_of(kv: KvShape) -> RecordShape:
    """The size of records of such keys and values."""
    return RecordShape(kv.n_layers, kv.n_kv_heads * kv_slot_bytes(kv.kv_format, kv.head_dim, kv.latent))


class StoredPrefixes:
    """rng: draws the rows that are computed again."""

    def __init__(
        self, store: PrefixStore, ranks: Ranks, scheduler: Scheduler, rng: random.Random | None = None
    ) -> None:
        self._store = store
        self._ranks = ranks
        self._scheduler = scheduler
        self._beginnings = scheduler.reads_from(store.find)
        self._rng = rng or random.SystemRandom()
        self._token_s = 0.0
        self.watch = store.watch
        self.cancel = store.cancel
        self.close = store.close

    @property
    def counts(self) -> StoreCounts:
        return self._store.counts

    def settle(self) -> None:
        """Before a step: requests whose beginnings are in their blocks go on, where a row of it that is drawn
        and computed again is the one that was read."""
        for restored in self._store.take_restored():
            n_tokens = restored.n_tokens
            if n_tokens and not self._is_right(restored):
                self._store.refuse(restored)
                n_tokens = 0
            elif n_tokens:
                self._store.believe(restored)
            self._scheduler.restored(restored.request_id, n_tokens)

    def follow(self, stats: StepStats | None) -> None:
        """After a step: the store may read what was computed, and write into blocks that wait."""
        if stats is not None and stats.phase == "prefill" and stats.n_tokens:
            token_s = stats.duration_ns / 1e9 / stats.n_tokens
            self._token_s += (token_s - self._token_s) * (_OF_THE_NEWEST if self._token_s else 1.0)
        computed, wanted = self._beginnings.take_computed(), self._beginnings.take_wanted()
        if not (computed or wanted):
            return
        rows = self._ranks.kv_share.memory
        for beginning in computed:
            self._store.keep(beginning, rows, self._token_s)
        for request_id, token_ids, space, placement in wanted:
            self._store.restore(Restored(request_id, token_ids, space, placement, rows))

    def _is_right(self, restored: Restored) -> bool:
        position = self._rng.randrange(restored.n_tokens)
        before = self._panel(restored, position)
        base, _, table, ring, _ = restored.placement
        token = restored.token_ids[position : position + 1]
        self._ranks.forward(
            Batch("prefill", (SequenceSlice(token, position, base, False, table, ring=ring),))
        )
        return before == self._panel(restored, position)

    def _panel(self, restored: Restored, position: int) -> bytes:
        """The rows of the panel that has this position, of all layers."""
        shape = self._store.shape
        n_layer = shape.slot_bytes * ALIGNMENT
        panel = bytearray(shape.n_layers * n_layer)
        slot = restored.placement.slot(position // ALIGNMENT * ALIGNMENT)
        for layer in range(shape.n_layers):
            restored.rows.read(layer, slot, ALIGNMENT, memoryview(panel)[layer * n_layer :][:n_layer])
        return bytes(panel)

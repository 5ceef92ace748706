"""Prefixes between an engine's steps and its store: those read from the store are checked, computed ones are
offered. Called on the engine's thread."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.engine.step_parts import StepPart
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.prefix_store.blocks import RecordShape
from phasewise.serving.prefix_store.store import PrefixStore, Restored, StoreCounts
from phasewise.serving.ranks.kv_share import KvShape

if TYPE_CHECKING:
    from phasewise.serving.engine.messages import Delivery
    from phasewise.serving.ranks.first_rank import Ranks
    from phasewise.serving.scheduling.scheduler import Scheduler

MOST_CHECKED_TOKENS = 64
"""Most first tokens that are computed again to check a prefix with a state."""
_OF_THE_NEWEST = 0.2
"""Weight of the newest step in the mean time per prompt token."""


def shape_of(kv: KvShape) -> RecordShape:
    """The size of a stored record of keys and values of this shape."""
    slot_bytes = kv.n_kv_heads * kv_slot_bytes(kv.kv_format, kv.head_dim, kv.latent)
    return RecordShape(kv.n_layers, slot_bytes, kv.state_bytes)


class StoredPrefixes(StepPart):
    """Passes prefixes between an engine and its store."""

    def __init__(self, store: PrefixStore, ranks: Ranks, scheduler: Scheduler) -> None:
        self._store = store
        self._ranks = ranks
        self._scheduler = scheduler
        self._beginnings = scheduler.reads_from(store.find)
        self._rng = random.SystemRandom()
        self._token_s = 0.0
        self.watch = store.watch
        self.forget = store.cancel  # type: ignore[method-assign]
        self.kept = store.kept
        self.close = store.close

    @property
    def counts(self) -> StoreCounts:
        return self._store.counts

    def settle(self) -> None:
        """Before a step: start the requests whose prefix was read into their block, if a randomly drawn row,
        computed again, equals the one read."""
        for restored in self._store.take_restored():
            n_tokens = restored.n_tokens
            if n_tokens and not self._is_right(restored):
                self._store.refuse(restored)
                n_tokens = 0
            elif n_tokens:
                self._store.believe(restored)
            self._scheduler.restored(restored.request_id, n_tokens)

    def tells(self, delivery: Delivery) -> Delivery:
        """Let the store read computed prefixes, and fill the blocks that wait for it."""
        stats = delivery.stats
        if stats is not None and stats.phase == "prefill" and stats.n_tokens:
            token_s = stats.duration_ns / 1e9 / stats.n_tokens
            self._token_s += (token_s - self._token_s) * (_OF_THE_NEWEST if self._token_s else 1.0)
        computed, wanted = self._beginnings.take_computed(), self._beginnings.take_wanted()
        if not (computed or wanted):
            return delivery
        rows = self._ranks.kv_share.memory
        for beginning in computed:
            self._store.keep(beginning, rows, self._token_s)
        for request_id, token_ids, space, placement in wanted:
            self._store.restore(Restored(request_id, token_ids, space, placement, rows))
        return delivery

    def _is_right(self, restored: Restored) -> bool:
        """True if rows computed again equal the rows read: one row, or, for models with states (which begin
        at zero), some of the first rows."""
        drawn = self._rng.randrange(restored.n_tokens)
        begin, end = drawn, drawn + 1
        if self._store.shape.state_bytes:
            begin, end = 0, 1 + drawn % MOST_CHECKED_TOKENS
        rows, state = self._rows(restored, begin, end), self._state(restored)
        base, _, table, ring, place = restored.placement
        tokens = restored.token_ids[begin:end]
        piece = SequenceSlice(tokens, begin, base, False, table, ring=ring, state=place or 0)
        self._ranks.forward(Batch("prefill", (piece,)))
        if state and place is not None:
            restored.rows.write_state(place, 0, memoryview(state))
        return rows == self._rows(restored, begin, end)

    def _state(self, restored: Restored) -> bytearray:
        """The state read from the store."""
        state = bytearray(self._store.shape.state_bytes)
        if restored.placement.state is not None and state:
            restored.rows.read_state(restored.placement.state, 0, state)
        return state

    def _rows(self, restored: Restored, begin: int, end: int) -> list[bytes]:
        """Bytes of the panels with positions [begin, end), of all layers."""
        n_panel = self._store.shape.slot_bytes * ALIGNMENT
        panels = []
        for first in range(begin // ALIGNMENT * ALIGNMENT, end, ALIGNMENT):
            for layer in range(self._store.shape.n_layers):
                panel = bytearray(n_panel)
                restored.rows.read(layer, restored.placement.slot(first), ALIGNMENT, memoryview(panel))
                panels.append(bytes(panel))
        return panels

"""The work of one engine step: slices of sequences, all of one phase. Integers only; the scheduler makes it,
ranks read it. Named tuples, as in messages.py: created at every step, and cheaper than frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phasewise.tuner.plans import Phase

STEP_TOKENS = 512
"""Most rows that pass through the model at once; larger batches are cut, with the same results. Enough to use
the weights well, few enough for a layer's rows to stay in the L2 caches."""


KV_CHUNK = 128
"""Positions of a run in a placement by table (PW_CHUNK of the kernels)."""


class SequenceSlice(NamedTuple):
    """Consecutive tokens of one sequence, and the KV slots of their keys and values.

    Token `token_ids[i]` has position `start + i`, writes KV slot `slot_base + start + i`, and attends to
    slots `slot_base` up to and including its own."""

    token_ids: Sequence[int]
    start: int
    slot_base: int
    wants_logits: bool
    """True if the logits after the last token of this slice are wanted."""
    table: tuple[int, ...] | None = None
    """First slots of the runs of KV_CHUNK positions; None: contiguous from `slot_base`."""
    n_drafted: int = 0
    """Number of drafts at the end, each of which adds a row of logits, of the token before it, if any are
    wanted."""
    ring: tuple[int, int] | None = None
    """For ring layers: first slot and number of slots. Position p lies at `first + p % slots`."""
    adapter: int = 0
    """Number of the model's adapter for the slice's rows, from 1 on; 0: none."""
    state: int = 0
    """For layers that keep a state: its place. A slice with start 0 begins with an empty state."""
    keeps: tuple[tuple[int, int], ...] = ()
    """Pairs (position, place): the state before that position is copied to that place."""


class KvCopy(NamedTuple):
    """Copy of the keys and values of `n_slots` slots to `target_slot`. The ranges may overlap. Ring slots are
    numbered after all other slots; both ranges are of rings, or neither."""

    source_slot: int
    target_slot: int
    n_slots: int


class Batch(NamedTuple):
    """One step. In a decode batch every slice has one token and its drafts, and wants their logits (in a
    draft model's batch, possibly one token more)."""

    phase: Phase
    slices: tuple[SequenceSlice, ...]
    request_ids: tuple[str, ...] = ()
    """Id of each slice's request, in the same order. Ranks do not read it."""
    copies: tuple[KvCopy, ...] = ()
    """Copies that the engine does through `Ranks.copy_kv`, in this order, before anything is computed."""
    n_in_shadow: int = 0
    """Number of slices of requests in shadow (those of batches), for pacing."""

    @property
    def n_tokens(self) -> int:
        return sum(len(piece.token_ids) for piece in self.slices)

    @property
    def n_logits(self) -> int:
        """Rows of logits: for each slice that wants any, in order, one and one for each draft."""
        return sum(1 + piece.n_drafted for piece in self.slices if piece.wants_logits)

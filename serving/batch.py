"""The work of one engine step: slices of sequences, all of one phase. Integers only; ranks read it, the
scheduler makes it. Named tuples, as in messages.py: they are made at every step, and more cheaply than
frozen dataclasses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phasewise.tuner.plans import Phase

STEP_TOKENS = 512
"""Rows that pass through the model at once; larger batches go in pieces, with the same results. Enough to use
the weights well, few enough for a layer's rows to stay in the L2 caches."""


class SequenceSlice(NamedTuple):
    """Consecutive tokens of one sequence, and where their keys and values go.

    Token `token_ids[i]` stands at position `start + i` of its sequence and writes KV slot
    `slot_base + start + i`; it attends to slots `slot_base` up to and including its own.
    """

    token_ids: Sequence[int]
    start: int
    slot_base: int
    wants_logits: bool
    """True if the logits after the last token of this slice are wanted."""
    table: tuple[int, ...] | None = None
    """None: contiguous from `slot_base`. Else slots at which the runs of KV_CHUNK positions begin, and
    `slot_base` is not read."""
    n_drafted: int = 0
    """The last tokens that are drafts. Where logits are wanted, those after the token before each of them
    are wanted too."""
    ring: tuple[int, int] | None = None
    """For layers that keep rings: first slot and number of slots. Position p lies at `first + p % slots`."""
    adapter: int = 0
    """The number of the model's adapter that its rows have, from 1 on; 0: none."""
    state: int = 0
    """For layers that keep a state: its place. A slice that starts at 0 begins with none, another goes on."""
    keeps: tuple[tuple[int, int], ...] = ()
    """Pairs (position, place): the state before that position is copied there."""


class KvCopy(NamedTuple):
    """Keys and values of `n_slots` slots, to be had at `target_slot` too. The ranges may overlap.

    Slots of rings are counted from all other slots on; both ranges are of rings, or neither.
    """

    source_slot: int
    target_slot: int
    n_slots: int


class Batch(NamedTuple):
    """One step. In a decode batch every slice has one token and its drafts, and wants their logits (that of a
    draft model may have a token more).
    """

    phase: Phase
    slices: tuple[SequenceSlice, ...]
    request_ids: tuple[str, ...] = ()
    """The request of each slice, in the same order. Ranks do not read it."""
    copies: tuple[KvCopy, ...] = ()
    """Done in this order before anything is computed; by the engine, through `Ranks.copy_kv`."""
    n_in_shadow: int = 0
    """Slices of requests that take what others leave. For pacing."""

    @property
    def n_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(len(piece.token_ids) for piece in self.slices)

    @property
    def n_logits(self) -> int:
        """Rows of the result, in the order of the slices: one for each slice that wants logits, and one for
        each of its drafts."""
        return sum(1 + piece.n_drafted for piece in self.slices if piece.wants_logits)

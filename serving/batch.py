"""What one engine step computes: slices of sequences, all of one phase. Integers only; ranks read it, the
scheduler makes it. Named tuples, as in messages.py: they are made at every step, and more cheaply than
frozen dataclasses (benchmarks/python_share.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from phasewise.tuner.plans import Phase


class SequenceSlice(NamedTuple):
    """Consecutive tokens of one sequence, and where their keys and values go.

    Token `token_ids[i]` stands at position `start + i` of its sequence and writes KV slot
    `slot_base + start + i`; it attends to slots `slot_base` up to and including its own.
    """

    token_ids: Sequence[int]
    start: int
    slot_base: int
    wants_logits: bool
    """Whether the logits after the last token of this slice are wanted."""
    table: tuple[int, ...] | None = None
    """None: contiguous from `slot_base`. Else slots at which the runs of KV_CHUNK positions begin, and
    `slot_base` is not read."""


class KvCopy(NamedTuple):
    """Keys and values of `n_slots` slots, to be had at `target_slot` too. The ranges may overlap."""

    source_slot: int
    target_slot: int
    n_slots: int


class Batch(NamedTuple):
    """One step. In a decode batch every slice has exactly one token and wants its logits."""

    phase: Phase
    slices: tuple[SequenceSlice, ...]
    request_ids: tuple[str, ...] = ()
    """Whose each slice is, in the same order. For the scheduler and the sampler; ranks do not read it."""
    copies: tuple[KvCopy, ...] = ()
    """Done in this order before anything is computed; by the engine, through `Ranks.copy_kv`."""

    @property
    def n_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(len(piece.token_ids) for piece in self.slices)

    @property
    def n_logits(self) -> int:
        """Rows of the result: one for each slice that wants logits, in the order of the slices."""
        return sum(piece.wants_logits for piece in self.slices)

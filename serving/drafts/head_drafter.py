"""Drafts by a head of the model that is served (Gloeckle et al. 2024; DeepSeek-AI 2024).

Of every position whose next token is known it computes keys and values, from the model's row there and that
token, in the slots of the model: rows wait for their tokens, and where drafts do not pay until they are many.
From the last one on it drafts token by token; its own row then stands in for the model's, and what it wrote
with that is written over when the model's has come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.drafts.agreement import Agreement
from phasewise.serving.drafts.contract import Draft, DraftMemory
from phasewise.serving.drafts.draft_ranks import HeadRanks
from phasewise.serving.drafts.drafted_rows import DraftedRow, DraftState
from phasewise.serving.drafts.gain import DraftGain, Drafting
from phasewise.serving.drafts.step_costs import StepCosts
from phasewise.serving.models.heads.draft_head import RowVectors
from phasewise.serving.sampling.sampling import Sampler
from phasewise.serving.scheduling.request import DraftRoom, LiveSequence

_FIRST_RATES = (0.75, 0.6, 0.5, 0.4)  # of the first draft, the second, ..: each is further from a row
_MOST_WAITING = 64  # rows of a sequence that is not drafted

TakeRows = Callable[[int], RowVectors | None]
"""Rows of the model's newest batch, for so many tokens; None: they are not there."""


class _Followed(DraftState):
    """The head's state of one request: `rows` wait, from position `n_computed` on."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.n_computed = 0
        self.rows: list[RowVectors] = []

    def take(self, start: int, rows: RowVectors) -> None:
        """The model's rows from this position on: behind those that wait, in place of some, or anew."""
        n_before = start - self.n_computed
        if not 0 <= n_before <= self.n_waiting:
            self.n_computed, n_before = start, 0
        self.keep(n_before)
        self.rows.append(rows)

    def keep(self, n_rows: int) -> None:
        """Keep the first of the rows that wait, and drop the others."""
        if n_rows < self.n_waiting:
            self.rows = [np.concatenate(self.rows)[:n_rows].copy()] if n_rows else []

    def skip_to(self, position: int) -> None:
        """Rows before this position will never be computed: their tokens are not at hand."""
        if self.n_computed < position:
            self.advance(position - self.n_computed)

    def advance(self, n_rows: int) -> RowVectors | None:
        """The first rows that wait, which are computed next."""
        if not self.rows:
            return None
        waiting = np.concatenate(self.rows)
        self.rows = [waiting[n_rows:].copy()] if n_rows < len(waiting) else []
        self.n_computed += n_rows
        return waiting[:n_rows]

    @property
    def n_waiting(self) -> int:
        return sum(map(len, self.rows))

    def read(self, sequence: LiveSequence) -> None:
        """Note the outcome of the draft before, and keep rows of what stayed."""
        self.settle(sequence)
        self.keep(max(0, sequence.n_tokens - 1 - self.n_computed))


class _Row(DraftedRow[_Followed]):
    @property
    def is_ready(self) -> bool:
        """True if the head has a row of the model's right before what it would draft."""
        state = self.state
        end = state.n_computed + state.n_waiting
        return state.n_waiting > 0 and end == self.sequence.n_tokens - 1

    def next_rows(self, n_rows: int, *, wants_logits: bool) -> tuple[SequenceSlice, RowVectors]:
        """Rows that wait, with the token behind each."""
        start = self.state.n_computed
        rows = self.state.advance(n_rows)
        assert rows is not None
        token_ids = self.tokens(start + 1, start + 1 + n_rows)
        return _slice(self.piece, token_ids, start, wants_logits=wants_logits), rows

    def next_drafted(self) -> SequenceSlice:
        """The token that was drafted last, behind the head's own row."""
        start = self.state.n_computed + len(self.token_ids) - 1
        return _slice(self.piece, self.token_ids[-1:], start, wants_logits=True)


def _slice(
    piece: SequenceSlice, token_ids: Sequence[int], start: int, *, wants_logits: bool
) -> SequenceSlice:
    return piece._replace(
        token_ids=token_ids, start=start, wants_logits=wants_logits, n_drafted=0, state=0, keeps=()
    )


class HeadDrafter(DraftMemory[_Followed]):
    """A Drafter with a head. take_rows: of the model that is served. most_rows: of one of its steps, and of
    the head's. n_tokens: as `DraftSource.n_tokens`.
    """

    def __init__(
        self,
        ranks: HeadRanks,
        take_rows: TakeRows,
        costs: StepCosts,
        most_rows: int,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        n_tokens: int | None = None,
    ) -> None:
        agreement = Agreement(_FIRST_RATES, fading=True)
        super().__init__(costs, lambda _: _Followed(agreement.of_request()))
        self._ranks = ranks
        self._take_rows = take_rows
        self._clock_ns = clock_ns
        self._most_rows = most_rows
        self._rng = np.random.default_rng()
        self.gain = DraftGain(costs, most_rows, n_tokens)

    def computed(self, batch: Batch) -> None:
        """As Drafter.computed."""
        self._copy(batch)
        computable = []
        for name, piece, followed in self._taken(batch):
            del name
            followed.skip_to(piece.start - 1)
            n_rows = piece.start + len(piece.token_ids) - 1 - followed.n_computed
            if n_rows > 0:
                start = followed.n_computed
                rows = followed.advance(n_rows)
                assert rows is not None
                token_ids = piece.token_ids[start + 1 - piece.start :]
                computable.append((_slice(piece, token_ids, start, wants_logits=False), rows))
        self._compute(computable)

    def observe(self, batch: Batch, duration_ns: int) -> None:
        """As Drafter.observe."""
        super().observe(batch, duration_ns)
        for _ in self._taken(batch):
            pass

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        """As Drafter.draft."""
        self._copy(batch)
        rows = [
            _Row(self._of(room.sequence.request_id), piece, room, sampler)
            for piece, room, sampler in zip(batch.slices, rooms, samplers, strict=True)
        ]
        for row in rows:
            row.state.read(row.sequence)
        length = self.gain.length(
            [Drafting(row.room.most, row.rate, max(0, row.state.n_waiting - 1)) for row in rows]
        )
        ready = [row for row in rows if length and row.room.most and row.is_ready]
        self._catch_up(rows, ready)
        if ready:
            self.gain.tried()
            self._draft(ready, length)
        return [row.finish() for row in rows]

    def _copy(self, batch: Batch) -> None:
        for copy in batch.copies:
            self._ranks.copy_kv(*copy)

    def _taken(self, batch: Batch) -> list[tuple[str, SequenceSlice, _Followed]]:
        """Slices of a batch that was computed, whose rows wait now."""
        fed = self._take_rows(batch.n_tokens)
        if fed is None:
            return []
        taken, first = [], 0
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            followed = self._of(name)
            followed.take(piece.start, fed[first : first + len(piece.token_ids)])
            first += len(piece.token_ids)
            taken.append((name, piece, followed))
        return taken

    def _catch_up(self, rows: Sequence[_Row], ready: Sequence[_Row]) -> None:
        """Compute rows that have waited long, and those that would be too many for one step with drafts; of a
        sequence that is drafted all but the last.
        """
        n_rows, late = sum(row.state.n_waiting for row in ready), []
        for row in rows:
            is_drafted = row in ready
            n_waiting = row.state.n_waiting - is_drafted
            is_long = n_waiting >= _MOST_WAITING or (is_drafted and n_rows > self._most_rows)
            if n_waiting > 0 and is_long:
                late.append(row.next_rows(n_waiting, wants_logits=False))
        self._compute(late)

    def _compute(self, late: Sequence[tuple[SequenceSlice, RowVectors]]) -> None:
        if late:
            batch = Batch("prefill", tuple(piece for piece, _ in late))
            self._ranks.forward_rows(batch, np.concatenate([rows for _, rows in late]))

    def _draft(self, rows: list[_Row], length: int) -> None:
        asked = [row.next_rows(row.state.n_waiting, wants_logits=True) for row in rows]
        slices, given = [piece for piece, _ in asked], np.concatenate([own for _, own in asked])
        going_on = rows
        for n in range(1, length + 1):
            batch = Batch("decode", tuple(slices))
            began_ns = self._clock_ns()
            logits, after = self._ranks.forward_rows(batch, given)
            self.gain.draft_costs.observe(batch.n_tokens, self._clock_ns() - began_ns)
            for row, own in zip(going_on, logits, strict=True):
                row.propose(own, self._rng)
            staying = [i for i, row in enumerate(going_on) if n < min(length, row.room.most)]
            if not staying:
                break
            going_on, given = [going_on[i] for i in staying], after[staying]
            slices = [row.next_drafted() for row in going_on]

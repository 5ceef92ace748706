"""Drafts by a small model of the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

It computes the same sequences in the same slots, so that a block that moves, or a beginning that is copied,
is moved and copied here too. What it has computed of a sequence is known up to a position; where that lags
behind, because drafts did not pay for a while, it catches up in parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.drafts.agreement import Agreement
from phasewise.serving.drafts.contract import Draft, DraftMemory
from phasewise.serving.drafts.draft_ranks import DraftRanks
from phasewise.serving.drafts.drafted_rows import DraftedRow, DraftState
from phasewise.serving.drafts.gain import DraftGain, Drafting
from phasewise.serving.drafts.step_costs import StepCosts
from phasewise.serving.sampling.sampling import Sampler
from phasewise.serving.scheduling.request import DraftRoom, LiveSequence

_FIRST_RATE = 0.7
_CATCH_UP_TOKENS = 128  # of all sequences, in one step
_LEAST_LATE = 1  # all drafts were right: the last of them is computed with the token after it


class _Followed(DraftState):
    """The draft model's state of one request."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.n_known = 0
        """Positions from the first on whose keys and values it has."""

    def read(self, sequence: LiveSequence) -> None:
        """Note the outcome of the draft before, and keep what of it stayed."""
        if self.draft:
            self.n_known = min(self.n_known, self.drafted_at + self.settle(sequence))


class _Row(DraftedRow[_Followed]):
    @property
    def lag(self) -> int:
        """Tokens whose keys and values are missing, the last one included."""
        return self.sequence.n_tokens - self.state.n_known

    def missing(self, n_tokens: int) -> Sequence[int]:
        """The first of the tokens whose keys and values are missing."""
        start = self.state.n_known
        return self.tokens(start, start + n_tokens)

    def catching_up(self, n_tokens: int, *, wants_logits: bool) -> SequenceSlice:
        """The next missing tokens."""
        start, token_ids = self.state.n_known, self.missing(n_tokens)
        self.state.n_known += len(token_ids)
        return self.piece._replace(token_ids=token_ids, start=start, wants_logits=wants_logits)

    def next_slice(self) -> SequenceSlice:
        """The token that was drafted last."""
        start = self.state.n_known
        self.state.n_known += 1
        return self.piece._replace(token_ids=self.token_ids[-1:], start=start)


class ModelDrafter(DraftMemory[_Followed]):
    """A Drafter with a model. most_rows: of one step of the model that is served, whose logits have
    `vocab_size` columns; the draft model's may have fewer or more. n_tokens: as `DraftSource.n_tokens`.
    """

    def __init__(
        self,
        ranks: DraftRanks,
        costs: StepCosts,
        most_rows: int,
        vocab_size: int,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        n_tokens: int | None = None,
    ) -> None:
        self._ranks = ranks
        self._clock_ns = clock_ns
        agreement = Agreement((_FIRST_RATE,))
        super().__init__(costs, lambda _: _Followed(agreement.of_request()))
        self._gain = DraftGain(costs, most_rows, n_tokens)
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng()

    def computed(self, batch: Batch) -> None:
        """As Drafter.computed: the draft model computes the same prompts, while drafts pay."""
        self._copy(batch)
        slices = []
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            is_new = name not in self._known
            drafted = self._of(name)
            if is_new or piece.start < drafted.n_known:
                drafted.n_known, drafted.draft = piece.start, ()  # copied, or begun again in another block
            if self._gain.pays and piece.start == drafted.n_known:
                slices.append(piece._replace(wants_logits=False))
                drafted.n_known += len(piece.token_ids)
        if slices:
            self._ranks.forward(Batch("prefill", tuple(slices)))

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        """As Drafter.draft."""
        self._copy(batch)
        rows = [
            _Row(self._of(room.sequence.request_id), piece, room, sampler)
            for piece, room, sampler in zip(batch.slices, rooms, samplers, strict=True)
        ]
        for row in rows:
            row.state.read(row.sequence)
        length = self._length(rows)
        if length:
            self._draft(self._caught_up(rows), length)
        return [row.finish() for row in rows]

    def _copy(self, batch: Batch) -> None:
        for copy in batch.copies:
            self._ranks.copy_kv(*copy)

    def _length(self, rows: list[_Row]) -> int:
        """Drafts of each sequence."""
        return self._gain.length([Drafting(row.room.most, row.rate, row.lag - 1) for row in rows])

    def _caught_up(self, rows: list[_Row]) -> list[_Row]:
        """Those that can be drafted now. Others compute a part of what they lack."""
        left, ready, slices = _CATCH_UP_TOKENS, [], []
        for row in rows:
            n_late = row.lag - 1
            if not self._is_readable(row):
                continue
            if n_late > _LEAST_LATE and left:
                slices.append(row.catching_up(min(left, n_late), wants_logits=False))
                left -= len(slices[-1].token_ids)
            if row.lag - 1 <= _LEAST_LATE and row.room.most:
                ready.append(row)
        if slices:
            self._ranks.forward(Batch("prefill", tuple(slices)))
        return ready

    def _is_readable(self, row: _Row) -> bool:
        """True if the tokens that it would compute next are in the draft model's vocabulary."""
        return max(row.missing(_CATCH_UP_TOKENS)) < self._ranks.vocab_size

    def _draft(self, rows: list[_Row], length: int) -> None:
        slices = [row.catching_up(row.lag, wants_logits=True) for row in rows]
        going_on = rows
        if rows:
            self._gain.tried()
        for n in range(1, length + 1):
            if not going_on:
                break
            batch = Batch("decode", tuple(slices))
            began_ns = self._clock_ns()
            logits = self._ranks.forward(batch)
            self._gain.draft_costs.observe(batch.n_tokens, self._clock_ns() - began_ns)
            for row, own in zip(going_on, self._as_wide(logits), strict=True):
                row.propose(own, self._rng)
            going_on = [row for row in going_on if n < min(length, row.room.most)]
            slices = [row.next_slice() for row in going_on]

    def _as_wide(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits of tokens that the served model knows."""
        n_rows, n_known = logits.shape
        if n_known >= self._vocab_size:
            return logits[:, : self._vocab_size]
        wide = np.full((n_rows, self._vocab_size), -np.inf, dtype=np.float32)
        wide[:, :n_known] = logits
        return wide

"""Drafts that are computed: by a small model of the same vocabulary (Leviathan et al. 2023; Chen et al.
2023), or by a head of the served model (Gloeckle et al. 2024; DeepSeek-AI 2024).

A draft model keeps keys and values of the same sequences in the same slots as the served model, so that
copies of blocks are made for both. A head computes keys and values of a position from the served model's row
there and the next token; from the last such row on it drafts by its own rows, and writes over their keys and
values when the served model's rows have come."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from phasewise.serving.batch import KV_CHUNK, Batch, SequenceSlice
from phasewise.serving.drafts.contract import NO_DRAFT, Agreement, Draft, DraftMemory, StepCosts
from phasewise.serving.drafts.gain import DraftGain, Drafting
from phasewise.serving.models.draft_head import FedRows, RowVectors
from phasewise.serving.models.forward import build_program, kv_bytes_per_slot, resolve_kv_format
from phasewise.serving.models.packed_model import PackedModel
from phasewise.serving.processes.headroom import check_memory
from phasewise.serving.ranks.first_rank import FirstRank, RankOptions, room_for, slices_at_once
from phasewise.serving.ranks.rank_teams import touch_memory
from phasewise.serving.ranks.shared_weights import weights_near
from phasewise.serving.sampling.sampling import FloatVector, Sampler
from phasewise.serving.scheduling.request import DraftRoom, LiveSequence


class GuestRank:
    """A rank that computes `model`, a small one, on the thread teams of the first rank, which `host` returns:
    another one once ranks were started anew. Other ranks' cores rest. Errors: those of `open_ranks`."""

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
        """Compute a batch as `Ranks.forward` does, but without the adapters that its slices name."""
        slices = tuple(piece._replace(adapter=0) for piece in batch.slices)
        return self._rank.forward(batch._replace(slices=slices))

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        """Copy keys and values between slots; slots of rings, which this model's layers lack, are skipped."""
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


class GuestHead(GuestRank):
    """A rank that computes a draft head on the thread teams of the served model's first rank."""

    def __init__(self, model: PackedModel, host: Callable[[], FirstRank], options: RankOptions) -> None:
        super().__init__(model, host, options)
        room = self._capacity
        self._fed = FedRows.of(self._program, model.config, room.step_tokens, room.logit_rows)

    def forward_rows(self, batch: Batch, rows: RowVectors) -> tuple[npt.NDArray[np.float32], RowVectors]:
        """Compute a decode batch: logits, and the head's own row for each of them; both are empty for a
        prefill batch. `rows`: float32 [tokens, hidden], the row that the head reads beside each token: the
        served model's, or the head's own."""
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


def slots_of(piece: SequenceSlice, begin: int, end: int) -> npt.NDArray[np.int64]:
    """The slots of positions [begin, end) of a slice's sequence."""
    positions = np.arange(begin, end)
    if piece.table is None:
        return piece.slot_base + positions
    return np.array(piece.table)[positions // KV_CHUNK] + positions % KV_CHUNK


class DraftState:
    """The newest draft of one request. `agreement`: rates of right drafts, by their place in a draft."""

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self.draft: tuple[int, ...] = ()
        self.drafted_at = 0
        """Tokens that the sequence had when `draft` was made."""

    def settle(self, sequence: LiveSequence) -> int:
        """Return how many first tokens of the last draft the sequence then had; note it in `agreement`."""
        came_after = sequence.generated[self.drafted_at - len(sequence.request.prompt_token_ids) :]
        n_right = 0
        for drafted, came in zip(self.draft, came_after, strict=False):
            self.agreement.saw(n_right, right=drafted == came)
            if drafted != came:
                break
            n_right += 1
        self.draft = ()
        return n_right


State = TypeVar("State", bound=DraftState)


class DraftedRow(ABC, Generic[State]):
    """A sequence for which a step makes a draft. `state`: the request's record, which lasts between steps."""

    def __init__(self, state: State, piece: SequenceSlice, room: DraftRoom, sampler: Sampler) -> None:
        self.state = state
        self.piece = piece
        self.room = room
        self.token_ids: list[int] = []
        self._sampler = sampler
        self._chances: list[FloatVector] = []

    @property
    def sequence(self) -> LiveSequence:
        return self.room.sequence

    def rate(self, index: int) -> float:
        """The share of the request's drafts at place `index` of a draft that were right."""
        return self.state.agreement.rate(index)

    def tokens(self, start: int, end: int) -> Sequence[int]:
        n_prompt = len(self.sequence.request.prompt_token_ids)
        if start >= n_prompt:
            return self.sequence.generated[start - n_prompt : end - n_prompt]
        return self.sequence.token_ids[start:end]

    def propose(self, logits: FloatVector, rng: np.random.Generator) -> None:
        """Draw one more token of the draft from `logits`."""
        token_id, chances = self._sampler.propose(logits, len(self.token_ids), rng)
        self.token_ids.append(token_id)
        if chances is not None:
            self._chances.append(chances)

    @abstractmethod
    def next_drafted(self) -> SequenceSlice:
        """The slice that computes the token drafted last."""

    def finish(self) -> Draft:
        """Return the draft, and keep it in `state`, which settles the draft in the next step."""
        if not self.token_ids:
            return NO_DRAFT
        self.state.draft = tuple(self.token_ids)
        self.state.drafted_at = self.sequence.n_tokens
        return Draft(self.state.draft, tuple(self._chances))


class ComputedDrafter(DraftMemory[State]):
    """Base of drafters by a model or by a head. `n_tokens`: as `DraftSource.n_tokens`."""

    def __init__(
        self,
        ranks: GuestRank,
        costs: StepCosts,
        most_rows: int,
        begun: Callable[[str], State],
        clock_ns: Callable[[], int],
        n_tokens: int | None,
    ) -> None:
        super().__init__(costs, begun)
        self._copied_by = ranks
        self._clock_ns = clock_ns
        self._rng = np.random.default_rng()
        self.gain = DraftGain(costs, most_rows, n_tokens)

    def _copy(self, batch: Batch) -> None:
        for copy in batch.copies:
            self._copied_by.copy_kv(*copy)

    def _extend(
        self,
        rows: Sequence[DraftedRow[State]],
        slices: Sequence[SequenceSlice],
        length: int,
        compute: Callable[[Batch, list[int]], npt.NDArray[np.float32]],
    ) -> None:
        """Draft up to `length` tokens of each row, one token with each batch. `compute(batch, places)`:
        logits of a batch, whose i-th row was row `places[i]` of the batch before."""
        places = list(range(len(rows)))
        for n in range(1, length + 1):
            batch = Batch("decode", tuple(slices))
            began_ns = self._clock_ns()
            logits = compute(batch, places)
            self.gain.draft_costs.observe(batch.n_tokens, self._clock_ns() - began_ns)
            for row, own in zip(rows, logits, strict=True):
                row.propose(own, self._rng)
            places = [place for place, row in enumerate(rows) if n < min(length, row.room.most)]
            if not places:
                break
            rows = [rows[place] for place in places]
            slices = [row.next_drafted() for row in rows]


_FIRST_RATE = 0.7
_CATCH_UP_TOKENS = 128  # of all sequences, in one step
_LEAST_LATE = 1  # all drafts were right: the last of them is computed with the token after it


class _Computed(DraftState):
    """The draft model's progress in one request."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.n_known = 0
        """Leading positions whose keys and values the draft model has."""

    def read(self, sequence: LiveSequence) -> None:
        """Settle the last draft, and forget keys and values of its wrong tokens."""
        if self.draft:
            self.n_known = min(self.n_known, self.drafted_at + self.settle(sequence))


class _ModelRow(DraftedRow[_Computed]):
    @property
    def lag(self) -> int:
        """Tokens whose keys and values the draft model lacks, the last token included."""
        return self.sequence.n_tokens - self.state.n_known

    def missing(self, n_tokens: int) -> Sequence[int]:
        """The first tokens whose keys and values the draft model lacks."""
        start = self.state.n_known
        return self.tokens(start, start + n_tokens)

    def catching_up(self, n_tokens: int, *, wants_logits: bool) -> SequenceSlice:
        """The slice that computes the next missing tokens, which count as known from now on."""
        start, token_ids = self.state.n_known, self.missing(n_tokens)
        self.state.n_known += len(token_ids)
        return self.piece._replace(token_ids=token_ids, start=start, wants_logits=wants_logits)

    def next_drafted(self) -> SequenceSlice:
        start = self.state.n_known
        self.state.n_known += 1
        return self.piece._replace(token_ids=self.token_ids[-1:], start=start)


class ModelDrafter(ComputedDrafter[_Computed]):
    """A Drafter by a small model. `most_rows`, `vocab_size`: of the served model's steps and logits; the
    draft model may know fewer or more tokens. `n_tokens`: as `DraftSource.n_tokens`."""

    def __init__(
        self,
        ranks: GuestRank,
        costs: StepCosts,
        most_rows: int,
        vocab_size: int,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        n_tokens: int | None = None,
    ) -> None:
        self._ranks = ranks
        agreement = Agreement((_FIRST_RATE,))
        super().__init__(
            ranks, costs, most_rows, lambda _: _Computed(agreement.of_request()), clock_ns, n_tokens
        )
        self._vocab_size = vocab_size
        self._lacking = np.zeros(0, bool)
        """By slot: True where the served model has keys and values of a prompt, and the draft model none."""

    def computed(self, batch: Batch) -> None:
        """Compute the batch's prompts by the draft model too, while drafts pay."""
        self._copy(batch)
        slices = []
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            is_new = name not in self._known
            drafted = self._of(name)
            if is_new or piece.start < drafted.n_known:  # copied, or begun again in another block
                drafted.n_known, drafted.draft = self._n_known_before(piece), ()
            is_read = self.gain.pays and piece.start == drafted.n_known
            self._note_slots(piece, lacking=not is_read)
            if is_read:
                slices.append(piece._replace(wants_logits=False))
                drafted.n_known += len(piece.token_ids)
        if slices:
            self._ranks.forward(Batch("prefill", tuple(slices)))

    def _copy(self, batch: Batch) -> None:
        super()._copy(batch)
        for source, target, n_slots in batch.copies:
            self._reach(max(source, target) + n_slots)
            self._lacking[target : target + n_slots] = self._lacking[source : source + n_slots].copy()

    def _reach(self, n_slots: int) -> None:
        more = n_slots - len(self._lacking)
        if more > 0:
            self._lacking = np.append(self._lacking, np.zeros(more, bool))

    def _note_slots(self, piece: SequenceSlice, *, lacking: bool) -> None:
        """Note whether the draft model lacks keys and values of the slice's tokens."""
        slots = slots_of(piece, piece.start, piece.start + len(piece.token_ids))
        self._reach(int(slots.max()) + 1)
        self._lacking[slots] = lacking

    def _n_known_before(self, piece: SequenceSlice) -> int:
        """Leading positions before the slice whose keys and values the draft model has."""
        slots = slots_of(piece, 0, piece.start)
        self._reach(int(slots.max(initial=-1)) + 1)
        lacking = np.flatnonzero(self._lacking[slots])
        return int(lacking[0]) if len(lacking) else piece.start

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        self._copy(batch)
        rows = [
            _ModelRow(self._of(room.sequence.request_id), piece, room, sampler)
            for piece, room, sampler in zip(batch.slices, rooms, samplers, strict=True)
        ]
        for row in rows:
            row.state.read(row.sequence)
        length = self.gain.length([Drafting(row.room.most, row.rate, row.lag - 1) for row in rows])
        ready = self._caught_up(rows) if length else []
        if ready:
            self.gain.tried()
            slices = [row.catching_up(row.lag, wants_logits=True) for row in ready]
            for piece in slices:
                self._note_slots(piece, lacking=False)
            self._extend(ready, slices, length, lambda batch, _: self._as_wide(self._ranks.forward(batch)))
        return [row.finish() for row in rows]

    def _caught_up(self, rows: list[_ModelRow]) -> list[_ModelRow]:
        """The rows that can be drafted now. The draft model computes a part of what other rows lack."""
        left, ready, slices = _CATCH_UP_TOKENS, [], []
        for row in rows:
            n_late = row.lag - 1
            if max(row.missing(_CATCH_UP_TOKENS)) >= self._ranks.vocab_size:  # which it cannot read
                continue
            if n_late > _LEAST_LATE and left:
                slices.append(row.catching_up(min(left, n_late), wants_logits=False))
                left -= len(slices[-1].token_ids)
            if row.lag - 1 <= _LEAST_LATE and row.room.most:
                ready.append(row)
        for piece in slices:
            self._note_slots(piece, lacking=False)
        if slices:
            self._ranks.forward(Batch("prefill", tuple(slices)))
        return ready

    def _as_wide(self, logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Logits cut, or padded with -inf, to the served model's vocabulary."""
        n_rows, n_known = logits.shape
        if n_known >= self._vocab_size:
            return logits[:, : self._vocab_size]
        wide = np.full((n_rows, self._vocab_size), -np.inf, dtype=np.float32)
        wide[:, :n_known] = logits
        return wide


_FIRST_RATES = (0.75, 0.6, 0.5, 0.4)  # of the first draft, the second, ..: each is further from a row
_MOST_WAITING = 64  # rows of a sequence that is not drafted

TakeRows = Callable[[int], RowVectors | None]
"""Returns the served model's rows of its newest batch of N tokens; None: the rows are not there."""


class _Followed(DraftState):
    """The head's progress in one request: `rows` of the served model wait, from position `n_computed` on."""

    def __init__(self, agreement: Agreement) -> None:
        super().__init__(agreement)
        self.n_computed = 0
        self.rows: list[RowVectors] = []

    def take(self, start: int, rows: RowVectors) -> None:
        """Add the served model's rows from position `start` on, in place of waiting rows there; where a gap
        would be left, all rows that waited are dropped."""
        n_before = start - self.n_computed
        if not 0 <= n_before <= self.n_waiting:
            self.n_computed, n_before = start, 0
        self.keep(n_before)
        self.rows.append(rows)

    def keep(self, n_rows: int) -> None:
        """Keep the first of the waiting rows, and drop the others."""
        if n_rows < self.n_waiting:
            self.rows = [np.concatenate(self.rows)[:n_rows].copy()] if n_rows else []

    def advance(self, n_rows: int) -> RowVectors | None:
        """Take the first waiting rows, to be computed next; None: no row waits."""
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
        """Settle the last draft, and drop waiting rows of its wrong tokens."""
        self.settle(sequence)
        self.keep(max(0, sequence.n_tokens - 1 - self.n_computed))


class _HeadRow(DraftedRow[_Followed]):
    @property
    def is_ready(self) -> bool:
        """True if the served model's row before the sequence's last token is among the waiting rows."""
        state = self.state
        end = state.n_computed + state.n_waiting
        return state.n_waiting > 0 and end == self.sequence.n_tokens - 1

    def next_rows(self, n_rows: int, *, wants_logits: bool) -> tuple[SequenceSlice, RowVectors]:
        """Take the next waiting rows, with the slice of the tokens that follow each row."""
        start = self.state.n_computed
        rows = self.state.advance(n_rows)
        assert rows is not None
        token_ids = self.tokens(start + 1, start + 1 + n_rows)
        return _slice(self.piece, token_ids, start, wants_logits=wants_logits), rows

    def next_drafted(self) -> SequenceSlice:
        start = self.state.n_computed + len(self.token_ids) - 1
        return _slice(self.piece, self.token_ids[-1:], start, wants_logits=True)


def _slice(
    piece: SequenceSlice, token_ids: Sequence[int], start: int, *, wants_logits: bool
) -> SequenceSlice:
    return piece._replace(
        token_ids=token_ids, start=start, wants_logits=wants_logits, n_drafted=0, state=0, keeps=()
    )


class HeadDrafter(ComputedDrafter[_Followed]):
    """A Drafter by a head of the served model. `take_rows`: returns the served model's newest rows.
    `most_rows`: rows of one step of either model. `n_tokens`: as `DraftSource.n_tokens`."""

    def __init__(
        self,
        ranks: GuestHead,
        take_rows: TakeRows,
        costs: StepCosts,
        most_rows: int,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
        n_tokens: int | None = None,
    ) -> None:
        agreement = Agreement(_FIRST_RATES, fading=True)
        super().__init__(
            ranks, costs, most_rows, lambda _: _Followed(agreement.of_request()), clock_ns, n_tokens
        )
        self._ranks = ranks
        self._take_rows = take_rows
        self._most_rows = most_rows

    def computed(self, batch: Batch) -> None:
        self._copy(batch)
        computable = []
        for piece, followed in self._taken(batch):
            if followed.n_computed < piece.start - 1:  # tokens of waiting rows are not at hand
                followed.advance(piece.start - 1 - followed.n_computed)
            n_rows = piece.start + len(piece.token_ids) - 1 - followed.n_computed
            if n_rows > 0:
                start = followed.n_computed
                rows = followed.advance(n_rows)
                assert rows is not None
                token_ids = piece.token_ids[start + 1 - piece.start :]
                computable.append((_slice(piece, token_ids, start, wants_logits=False), rows))
        self._compute(computable)

    def observe(self, batch: Batch, duration_ns: int) -> None:
        super().observe(batch, duration_ns)
        self._taken(batch)

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        self._copy(batch)
        rows = [
            _HeadRow(self._of(room.sequence.request_id), piece, room, sampler)
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

    def _taken(self, batch: Batch) -> list[tuple[SequenceSlice, _Followed]]:
        """Queue the served model's rows of a computed batch: each slice with its request's record."""
        fed = self._take_rows(batch.n_tokens)
        if fed is None:
            return []
        taken, first = [], 0
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            followed = self._of(name)
            followed.take(piece.start, fed[first : first + len(piece.token_ids)])
            first += len(piece.token_ids)
            taken.append((piece, followed))
        return taken

    def _catch_up(self, rows: Sequence[_HeadRow], ready: Sequence[_HeadRow]) -> None:
        """Compute rows of sequences with _MOST_WAITING or more, and rows that would be too many for one step
        with drafts; of a drafted sequence all but the last row."""
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

    def _draft(self, rows: list[_HeadRow], length: int) -> None:
        asked = [row.next_rows(row.state.n_waiting, wants_logits=True) for row in rows]
        given = np.concatenate([own for _, own in asked])

        def compute(batch: Batch, places: list[int]) -> npt.NDArray[np.float32]:
            nonlocal given
            logits, given = self._ranks.forward_rows(batch, given[places])
            return logits

        self._extend(rows, [piece for piece, _ in asked], length, compute)

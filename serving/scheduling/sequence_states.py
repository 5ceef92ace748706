"""The scheduler's part in states: which place a sequence goes on from, and which copies its steps make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from phasewise._words import counted
from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.serving.pools.contract import KvPool, Placement
from phasewise.serving.pools.state_places import KeptCopy, StatePlaces
from phasewise.serving.scheduling.prefixes import (
    NOTHING,
    Computed,
    Match,
    PrefixIndex,
    PrefixSource,
    chain,
    copies_between,
)
from phasewise.serving.scheduling.request import LiveSequence, SchedulerError
from phasewise.serving.scheduling.state_index import Keeps, KeptState, KnownState, StateIndex

LEAST_RESTORED_TOKENS = 128
"""The store is read where it has so many tokens more than memory has."""

FindStored = Callable[[tuple[int, ...], str], int]
"""The number of the first of these tokens that the store has, for requests of this space."""


CopiesAlong = Callable[[Computed], tuple[KeptCopy, ...]]


class WantedBeginning(NamedTuple):
    """A request whose beginning may be read into its block, which stays where it is."""

    request_id: str
    token_ids: tuple[int, ...]
    space: str
    placement: Placement


class StoredBeginnings:
    """Asks a store for the beginnings of a scheduler's prompts. copies_along: of states of a sequence."""

    def __init__(self, find: FindStored, prefixes: PrefixIndex, copies_along: CopiesAlong) -> None:
        self._find = find
        self._copies_along = copies_along
        self._computed: list[Computed] = []
        self._wanted: list[LiveSequence] = []
        prefixes.report_to(self._computed)

    def is_wanted(self, sequence: LiveSequence, n_ready: int) -> bool:
        """True if the store has so much more than `n_ready` that it is worth a wait. It is asked once."""
        if sequence.has_looked:
            return False
        n_stored = self._find(sequence.token_ids, sequence.request.cache_space)
        sequence.has_looked, sequence.is_restored = True, n_stored - n_ready >= LEAST_RESTORED_TOKENS
        if sequence.is_restored:
            self._wanted.append(sequence)
        return sequence.is_restored

    def take_wanted(self) -> list[WantedBeginning]:
        """Requests that wait since it was asked last. For when no copies are to be done: their sources may
        lie in a block that has a new owner."""
        wanted = [
            WantedBeginning(
                waiting.request_id, waiting.token_ids, waiting.request.cache_space, waiting.placement
            )
            for waiting in self._wanted
            if waiting.is_restored and waiting.placement is not None
        ]
        self._wanted.clear()
        return wanted

    def take_computed(self) -> list[Computed]:
        """Prompts that became whole and sequences that ended since it was asked last."""
        computed = list(self._computed)
        self._computed.clear()
        for sequence in computed:
            sequence.states = self._copies_along(sequence)
        return computed


Brought = tuple[int, list[KvCopy]]
"""Tokens whose keys, values and state are had by these copies."""


class SequenceStates:
    """Keys, values and states that sequences of one scheduler take over from each other, and go on from.
    reuses: False: nothing is taken over, and `prefixes` stays empty. Models whose layers keep no states have
    no places for them."""

    def __init__(self, pool: KvPool, prefixes: PrefixIndex, *, reuses: bool) -> None:
        self._places = pool.states
        self._window = pool.rings.window if pool.rings else 0
        self._prefixes = prefixes
        self._reuses = reuses
        self._index = StateIndex(pool.states, prefixes) if reuses and pool.states is not None else None
        self._most_drafts: int | None = None

    def take_over(self, sequence: LiveSequence, placement: Placement) -> Brought | None:
        """All that a sequence takes over from others as it begins its block; None: they will soon have
        more."""
        if not self._reuses:
            return 0, []
        request, token_ids = sequence.request, sequence.token_ids
        if sequence.runs is None:
            sequence.runs = chain(token_ids, space=request.cache_space)
        held: Match | KnownState = NOTHING
        if request.takes_over:
            index = self._prefixes if self._index is None else self._index
            held = index.find(token_ids, sequence.runs, request.cache_space)
        if 2 * (held.n_coming - held.n_ready) >= len(token_ids) - held.n_ready:
            return None
        self._prefixes.start(request.request_id, (token_ids, sequence.runs), placement, request.cache_space)
        if self._index is not None:
            self._index.plan(request.request_id, request.turns)
        if isinstance(held, Match):
            source, n_ready = held.source, held.n_ready
            return (0, []) if source is None else copies_between(source, placement, n_ready, self._window)
        assert self._index is not None
        return self._index.copies(held, placement)

    def arrived(self, sequence: LiveSequence, placement: Placement) -> None:
        """Keys and values of a sequence, computed elsewhere, are in its block."""
        if self._reuses:
            token_ids, space = sequence.token_ids, sequence.request.cache_space
            sequence.runs = chain(token_ids, space=space)
            self._prefixes.start(sequence.request_id, (token_ids, sequence.runs), placement, space)
            self._prefixes.advance(sequence.request_id, len(token_ids))

    def took_over(self, owner: str, n_tokens: int) -> None:
        """Keys, values and the state of so many tokens of a sequence are brought."""
        self._prefixes.brought(owner, n_tokens)
        if self._index is not None:
            self._index.took_over(owner, n_tokens)

    def held(self) -> Iterator[tuple[PrefixSource, int]]:
        """Sequences that can be taken over, each with the number of its first tokens that are there."""
        index = self._index
        for source in self._prefixes.sources:
            yield source, self._prefixes.n_held(source) if index is None else index.n_kept(source)

    def keeps(self, sequence: LiveSequence, n_tokens: int) -> Keeps:
        """The copies of states that a prefill step of so many tokens makes."""
        if self._index is None:
            return ()
        begin = sequence.n_computed
        return self._index.keeps(sequence.request_id, begin, begin + n_tokens)

    def share_for_drafts(self, n_sequences: int) -> None:
        """Spare places are for drafts of so many sequences alike: each has a copy of its state."""
        if self._places is not None:
            self._most_drafts = self._places.n_spare // n_sequences

    def room_for_drafts(self, sequence: LiveSequence) -> int:
        """As many as its block has slots for, as the tokens that it may still get after one more, and as its
        share of spare places for states."""
        request, placement = sequence.request, sequence.placement
        if placement is None or request.prefill_only:
            return 0
        most = min(placement.n_slots, request.most_tokens - 1) - sequence.n_tokens
        return most if self._most_drafts is None else min(most, self._most_drafts)

    def with_drafts(
        self, batch: Batch, sequences: Sequence[LiveSequence], drafts: Sequence[Sequence[int]]
    ) -> Batch:
        """A decode batch, each slice with its drafts behind its token, and copies of the state before each of
        them, which may be wrong. SchedulerError: more than have room."""
        slices = []
        for sequence, piece, draft in zip(sequences, batch.slices, drafts, strict=True):
            if len(draft) > self.room_for_drafts(sequence):
                raise SchedulerError(f"{counted(len(draft), 'draft')} for {sequence}")
            keeps = piece.keeps
            if self._places is not None:
                keeps = tuple((piece.start + 1 + i, self._places.set_aside()) for i in range(len(draft)))
            tokens = (*piece.token_ids, *draft)
            slices.append(piece._replace(token_ids=tokens, n_drafted=len(draft), keeps=keeps))
        return batch._replace(slices=tuple(slices))

    def go_on(self, sequence: LiveSequence, piece: SequenceSlice, n_run: int) -> None:
        """A step of a sequence is computed, `n_run` tokens came of it: it goes on from the state after
        them."""
        if self._places is None or sequence.placement is None:
            return
        state = self._computed(self._places, sequence.request_id, piece, n_run)
        if state != sequence.placement.state:
            sequence.placement = sequence.placement._replace(state=state)
            self._prefixes.moved(sequence.request_id, sequence.placement)

    def _computed(self, places: StatePlaces, owner: str, piece: SequenceSlice, n_run: int) -> int | None:
        """The step has made its copies. The place that the sequence goes on from."""
        if not piece.n_drafted:
            if self._index is not None:
                self._index.computed(owner, piece.keeps)
            return piece.state
        for position, place in piece.keeps:
            if position == piece.start + n_run:
                places.swap(owner, place)
            else:
                places.put_back(place)
        return places.place_of(owner)

    def put_back(self, pieces: Iterable[SequenceSlice]) -> None:
        """Nobody needs the copies of states that a step made."""
        for piece in pieces:
            for _, place in piece.keeps:
                assert self._places is not None
                self._places.put_back(place)

    def copies_along(self, computed: Computed) -> tuple[KeptState, ...]:
        """Copies of states that a sequence has passed."""
        if self._index is None:
            return ()
        return tuple(self._index.along(computed.token_ids, computed.chain, computed.space))

    def forget(self, sequence: LiveSequence) -> None:
        """Nothing that the sequence wrote is known to be there."""
        if self._index is not None:
            self._index.forget(self._prefixes.source(sequence.request_id))
        self._prefixes.drop(sequence.request_id)

    def give_up(self, sequence: LiveSequence) -> None:
        """Drop what the sequence was to keep: the prefix that it waited for is not in its block."""
        self._prefixes.drop(sequence.request_id)
        if self._index is not None:
            self._index.ended(sequence.request_id, None)

    def leave(self, sequence: LiveSequence, *, is_computed: bool) -> None:
        """Keep what a sequence has computed as it gives its block back, for others to take over. is_computed:
        no step of it is under way, so that its state is that after these tokens."""
        if sequence.is_restored:
            self.give_up(sequence)
        elif sequence.has_started and self._reuses:
            source = self._prefixes.retire(sequence.request_id, sequence.token_ids[: sequence.n_computed])
            if self._index is not None:
                self._index.ended(sequence.request_id, source if is_computed else None)

    def forget_ended(self) -> None:
        """Nobody knows where keys and values of ended sequences are, nor any state."""
        self._prefixes.forget_ended()
        if self._index is not None:
            self._index.clear()

    def clear(self) -> None:
        """All keys, values and states are lost."""
        if self._index is not None:
            self._index.clear()
        self._prefixes.clear()

"""The scheduler's part in states: which place a sequence goes on from, and which copies its steps make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from phasewise._words import counted
from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.serving.pools.contract import Placement
from phasewise.serving.pools.state_places import KeptCopy, StatePlaces
from phasewise.serving.scheduling.prefixes import NOTHING, Computed, PrefixIndex, PrefixSource, copies_between
from phasewise.serving.scheduling.request import LiveSequence, SchedulerError
from phasewise.serving.scheduling.state_index import Keeps, KeptState, StateIndex

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
    """Asks a store for the beginnings of a scheduler's prompts. copies_along: of states of a sequence; None:
    there are none.
    """

    def __init__(
        self, find: FindStored, prefixes: PrefixIndex, copies_along: CopiesAlong | None = None
    ) -> None:
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
        if self._copies_along is not None:
            for sequence in computed:
                sequence.states = self._copies_along(sequence)
        return computed


Brought = tuple[int, list[KvCopy]]
"""Tokens whose keys, values and state are had by these copies."""


class SequenceStates:
    """States of the sequences of one scheduler; without an index of prefixes none is kept for others."""

    def __init__(self, places: StatePlaces, prefixes: PrefixIndex | None) -> None:
        self._places = places
        self._index = None if prefixes is None else StateIndex(places, prefixes)
        self._most_drafts = 0

    def start(self, sequence: LiveSequence, placement: Placement, prefixes: PrefixIndex) -> Brought | None:
        """All that a sequence takes over as it begins to write its block; None: more soon will be there."""
        owner, token_ids, space = sequence.request_id, sequence.token_ids, sequence.request.cache_space
        runs = sequence.runs
        assert runs is not None
        assert self._index is not None
        state = self._index.find(token_ids, runs, space) if sequence.request.takes_over else None
        if state is not None and 2 * (state.n_coming - state.n_ready) >= len(token_ids) - state.n_ready:
            return None
        prefixes.start(owner, (token_ids, runs), placement, space)
        self._index.plan(owner, sequence.request.turns)
        return (0, []) if state is None else self._index.copies(state, placement)

    def took_over(self, owner: str, n_tokens: int) -> None:
        """Keys, values and the state of so many tokens of a sequence are brought."""
        if self._index is not None:
            self._index.took_over(owner, n_tokens)

    def keeps(self, sequence: LiveSequence, n_tokens: int) -> Keeps:
        """The copies that a prefill step of so many tokens makes."""
        if self._index is None:
            return ()
        begin = sequence.n_computed
        return self._index.keeps(sequence.request_id, begin, begin + n_tokens)

    def share_for_drafts(self, n_sequences: int) -> None:
        """Spare places are for drafts of so many sequences alike: each has a copy of its state."""
        self._most_drafts = self._places.n_spare // n_sequences

    @property
    def most_drafts(self) -> int:
        """The most drafts of each sequence."""
        return self._most_drafts

    def keeps_before_drafts(self, piece: SequenceSlice, n_drafts: int) -> Keeps:
        """Copies of the state before each draft, which may be wrong."""
        return tuple((piece.start + 1 + i, self._places.set_aside()) for i in range(n_drafts))

    def computed(self, sequence: LiveSequence, piece: SequenceSlice, n_run: int) -> int | None:
        """The step has made its copies, `n_run` tokens came of it. The place that the sequence goes on
        from."""
        owner = sequence.request_id
        if not piece.n_drafted:
            if self._index is not None:
                self._index.computed(owner, piece.keeps)
            return piece.state
        for position, place in piece.keeps:
            if position == piece.start + n_run:
                self._places.swap(owner, place)
            else:
                self._places.put_back(place)
        return self._places.place_of(owner)

    def put_back(self, piece: SequenceSlice) -> None:
        """Nobody needs the copies of a step."""
        for _, place in piece.keeps:
            self._places.put_back(place)

    def ended(self, sequence: LiveSequence, source: PrefixSource | None, *, is_computed: bool) -> None:
        """A sequence gives its block back. is_computed: no step of it is under way, so that its state is that
        after the tokens of `source`."""
        if self._index is not None:
            self._index.ended(sequence.request_id, source if is_computed else None)

    def copies_along(self, computed: Computed) -> tuple[KeptState, ...]:
        """Copies of states that a sequence has passed."""
        if self._index is None:
            return ()
        return tuple(self._index.along(computed.token_ids, computed.chain, computed.space))

    def n_kept(self, source: PrefixSource) -> int:
        """The tokens of a sequence that its last kept state is after."""
        return 0 if self._index is None else self._index.n_kept(source)

    def forget(self, source: PrefixSource | None) -> None:
        """Nothing that a sequence wrote is known to be there."""
        if self._index is not None:
            self._index.forget(source)

    def clear(self) -> None:
        """All states are lost, or nobody knows where their keys and values are."""
        if self._index is not None:
            self._index.clear()


def take_over(
    sequence: LiveSequence,
    placement: Placement,
    prefixes: PrefixIndex,
    states: SequenceStates | None,
    window: int,
) -> Brought | None:
    """All that a sequence takes over from others as it begins its block; None: they will soon have
    more."""
    if states is not None:
        return states.start(sequence, placement, prefixes)
    token_ids, space, runs = sequence.token_ids, sequence.request.cache_space, sequence.runs
    assert runs is not None
    match = prefixes.find(token_ids, runs, space) if sequence.request.takes_over else NOTHING
    if 2 * (match.n_coming - match.n_ready) >= len(token_ids) - match.n_ready:
        return None
    prefixes.start(sequence.request_id, (token_ids, runs), placement, space)
    if match.source is None:
        return 0, []
    return copies_between(match.source, placement, match.n_ready, window)


def held(prefixes: PrefixIndex, states: SequenceStates | None) -> Iterator[tuple[PrefixSource, int]]:
    """Sequences that can be taken over, each with the number of its first tokens that are there."""
    for source in prefixes.sources:
        yield source, prefixes.n_held(source) if states is None else states.n_kept(source)


def go_on(
    sequence: LiveSequence,
    piece: SequenceSlice,
    n_run: int,
    states: SequenceStates | None,
    prefixes: PrefixIndex | None,
) -> None:
    """A step of a sequence is computed, `n_run` tokens came of it: it goes on from the state after them."""
    if states is None or sequence.placement is None:
        return
    state = states.computed(sequence, piece, n_run)
    if state != sequence.placement.state:
        sequence.placement = sequence.placement._replace(state=state)
        if prefixes is not None:
            prefixes.moved(sequence.request_id, sequence.placement)


def put_back(states: SequenceStates | None, pieces: Iterable[SequenceSlice]) -> None:
    """Nobody needs the copies of states that a step made."""
    if states is not None:
        for piece in pieces:
            states.put_back(piece)


def forget(sequence: LiveSequence, states: SequenceStates | None, prefixes: PrefixIndex | None) -> None:
    """Nothing that the sequence wrote is known to be there."""
    if prefixes is not None:
        if states is not None:
            states.forget(prefixes.source(sequence.request_id))
        prefixes.drop(sequence.request_id)


def give_up(sequence: LiveSequence, states: SequenceStates | None, prefixes: PrefixIndex) -> None:
    """Drop what the sequence was to keep: the prefix that it waited for is not in its block."""
    prefixes.drop(sequence.request_id)
    if states is not None:
        states.ended(sequence, None, is_computed=False)


def leave(
    sequence: LiveSequence,
    states: SequenceStates | None,
    prefixes: PrefixIndex | None,
    *,
    is_computed: bool,
) -> None:
    """Keep what a sequence has computed as it gives its block back, for others to take over. is_computed: no
    step of it is under way.
    """
    if prefixes is None:
        return
    if sequence.is_restored:
        give_up(sequence, states, prefixes)
    elif sequence.has_started:
        source = prefixes.retire(sequence.request_id, sequence.token_ids[: sequence.n_computed])
        if states is not None:
            states.ended(sequence, source, is_computed=is_computed)


def room_for_drafts(sequence: LiveSequence, states: SequenceStates | None) -> int:
    """As many as its block has slots for, as the tokens that it may still get after one more, and as its
    share of spare places for states.
    """
    request, placement = sequence.request, sequence.placement
    if placement is None or request.prefill_only:
        return 0
    most = min(placement.n_slots, request.most_tokens - 1) - sequence.n_tokens
    return most if states is None else min(most, states.most_drafts)


def with_drafts(
    batch: Batch,
    sequences: Sequence[LiveSequence],
    drafts: Sequence[Sequence[int]],
    states: SequenceStates | None,
) -> Batch:
    """A decode batch, each slice with its drafts behind its token. SchedulerError: more than have room."""
    slices = []
    for sequence, piece, draft in zip(sequences, batch.slices, drafts, strict=True):
        if len(draft) > room_for_drafts(sequence, states):
            raise SchedulerError(f"{counted(len(draft), 'draft')} for {sequence}")
        keeps = () if states is None else states.keeps_before_drafts(piece, len(draft))
        tokens = (*piece.token_ids, *draft)
        slices.append(piece._replace(token_ids=tokens, n_drafted=len(draft), keeps=keeps))
    return batch._replace(slices=tuple(slices))

"""The scheduler's part in states: which place a sequence goes on from, and which copies its steps make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phasewise._words import counted
from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import KvPool, Placement
from phasewise.serving.pools.state_places import KeptCopy, StatePlaces
from phasewise.serving.scheduling.prefixes import (
    NOTHING,
    RUN_TOKENS,
    Computed,
    Match,
    PrefixIndex,
    PrefixSource,
    chain,
    copies_between,
)
from phasewise.serving.scheduling.request import LiveSequence, SchedulerError

INTERVAL_TOKENS = 256
MOST_INTERVALS = 4
"""The most of one prompt: its states are kept at multiples of INTERVAL_TOKENS, or of as many times that as
leave so few."""

Key = tuple[str, int, int, tuple[int, ...]]
Keeps = tuple[tuple[int, int], ...]
"""Pairs (position, place): `SequenceSlice.keeps`."""


@dataclass(slots=True, eq=False)
class _Kept:
    n_tokens: int
    source: PrefixSource
    """A sequence that begins with the copy's tokens and has keys and values for them."""
    place: int
    is_needed: bool
    """True if the next prompt of the conversation may differ from here: its newest prompt begins a turn here,
    or ends."""


class KeptState:
    """A copy of a sequence's state. Any thread may ask `is_there`: a reader asks it after it has read, and
    believes what it read only then."""

    def __init__(self, index: StateIndex, key: Key, kept: _Kept) -> None:
        self._index, self._key, self._kept = index, key, kept
        self.n_tokens, self.place = kept.n_tokens, kept.place

    @property
    def is_there(self) -> bool:
        """True if the copy was not overwritten."""
        return self._index.holds(self._key, self._kept)


class KnownState(NamedTuple):
    """The part of a sequence's beginning that a kept state is after."""

    n_ready: int
    n_coming: int
    """Tokens that a running sequence will have kept a state after; at least `n_ready`."""
    kept: _Kept | None
    placement: Placement | None
    """The block that keys and values are copied from."""


class _Plan(NamedTuple):
    source: PrefixSource
    keys: dict[int, Key]
    """By position: where the sequence's state is to be kept."""
    needed: frozenset[int]
    """Positions for which other copies give way."""


class StateIndex:
    """Kept states of all sequences whose keys and values `prefixes` knows.

    A sequence of a model with a state can go on only from a place where its state was kept: at the end of
    every sequence that ends or is preempted, where a prompt's turns begin, because the next prompt may differ
    there, before a prompt's last token, and at intervals of a long prompt where a place is free. Of the half
    that was used longest ago the copy gives way whose loss costs the fewest tokens, those between it and the
    copy before it; but first those that a later prompt has gone past. Integers only.
    """

    def __init__(self, places: StatePlaces, prefixes: PrefixIndex) -> None:
        self._places = places
        self._prefixes = prefixes
        self._by_key: dict[Key, _Kept] = {}  # the one used longest ago first
        self._key_of: dict[int, Key] = {}  # by place
        self._plans: dict[str, _Plan] = {}
        places.give_way = self._give_way

    def find(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> KnownState:
        """The latest kept state for a sequence of these tokens and this chain; its last token is always
        computed."""
        coming = self._coming(token_ids, runs, space)
        for _, kept in reversed(list(self._passed(token_ids, runs, space, len(token_ids) - 1))):
            placement = self._prefixes.placed(kept.source, kept.n_tokens)
            if placement is not None:
                return KnownState(kept.n_tokens, max(kept.n_tokens, coming), kept, placement)
            self._forget(kept.place)
        return KnownState(0, coming, None, None)

    def copies(self, state: KnownState, target: Placement) -> tuple[int, list[KvCopy]]:
        """Tokens that are brought to a block and its place, and the copies that do it: all, or none."""
        if state.kept is None or state.placement is None:
            return 0, []
        n_slots = aligned(state.n_ready)
        done, copies = copies_between(state.placement, target, n_slots)
        if done < n_slots or target.state is None:
            return 0, []
        first = self._places.first_slot
        return state.n_ready, [*copies, KvCopy(first + state.kept.place, first + target.state, 1)]

    def plan(self, owner: str, turns: Iterable[int]) -> None:
        """Decide where states of `owner` are kept; assistant turns of its prompt begin at `turns`. Call after
        `PrefixIndex.start`."""
        source = self._prefixes.source(owner)
        assert source is not None, owner
        last = len(source.token_ids) - 1
        needed = frozenset(turn for turn in turns if 0 < turn <= last) or frozenset({last})
        keys = {n: _key_of(source, n) for n in sorted({*_intervals(last), last, *needed} - {0})}
        self._plans[owner] = _Plan(source, keys, needed)

    def took_over(self, owner: str, n_tokens: int) -> None:
        """Keys and values of its first tokens are in the block of `owner`: states that it has passed can be
        gone on from there. They are used, and most of all those that it was to keep itself."""
        plan = self._plans[owner]
        source = plan.source
        passed = list(self._passed(source.token_ids, source.chain, source.space, n_tokens))
        for _, kept in passed:
            kept.source, kept.is_needed = source, kept.n_tokens in plan.needed
        for key, _ in sorted(passed, key=lambda pair: pair[1].is_needed):
            self._by_key[key] = self._by_key.pop(key)

    def keeps(self, owner: str, begin: int, end: int) -> Keeps:
        """Places, set aside, for the states that a step which computes these positions is to keep."""
        plan, keeps = self._plans.get(owner), []
        if plan is None:
            return ()
        for position, key in plan.keys.items():
            if not begin < position <= end or key in self._by_key:
                continue
            if self._places.has_free or (position in plan.needed and self._places.n_spare):
                keeps.append((position, self._places.set_aside()))
        return tuple(keeps)

    def computed(self, owner: str, keeps: Keeps) -> None:
        """Record the copies that a step has made. Copies of an owner that is gone are dropped."""
        plan = self._plans.get(owner)
        for position, place in keeps:
            if plan is None or plan.keys[position] in self._by_key:
                self._places.put_back(place)
                continue
            self._places.keep(place)
            self._enter(plan.keys[position], _Kept(position, plan.source, place, position in plan.needed))

    def ended(self, owner: str, source: PrefixSource | None) -> None:
        """`owner` gives its block back: the state at its end is kept. source: as `PrefixIndex.retire` knows
        it now, with the tokens that it has computed; None: nothing is known of it."""
        self._plans.pop(owner, None)
        if source is None or not source.token_ids:
            return
        key = _key_of(source, len(source.token_ids))
        if key not in self._by_key:
            self._enter(key, _Kept(len(source.token_ids), source, self._places.keep_of(owner), True))

    def along(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> Iterator[KeptState]:
        """The copies of all states that a sequence of these tokens and this chain has passed, whoever made
        them."""
        for key, kept in self._passed(token_ids, runs, space, len(token_ids)):
            yield KeptState(self, key, kept)

    def holds(self, key: Key, kept: _Kept) -> bool:
        """True if the index has this copy under that key."""
        return self._by_key.get(key) is kept

    def n_kept(self, source: PrefixSource) -> int:
        """The tokens of a sequence that its last kept state is after, whose keys and values are there too."""
        kept = (kept.n_tokens for kept in self._by_key.values() if kept.source is source)
        return max((n for n in kept if self._prefixes.placed(source, n) is not None), default=0)

    def forget(self, source: PrefixSource | None) -> None:
        """Nothing that a sequence wrote is known to be there."""
        for place in [kept.place for kept in self._by_key.values() if kept.source is source]:
            self._forget(place)

    def clear(self) -> None:
        """Forget all states: they are lost."""
        for place in list(self._key_of):
            self._forget(place)
        self._plans.clear()

    def _coming(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> int:
        """Tokens after which a running sequence will have kept a state; 0 where none will."""
        coming = 0
        for plan in self._plans.values():
            for n_tokens, key in plan.keys.items():
                is_to_come = coming < n_tokens < len(token_ids) and plan.source.n_ready < n_tokens
                if is_to_come and key == _key(token_ids, runs, n_tokens, space):
                    coming = n_tokens
        return coming

    def _passed(
        self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str, most: int
    ) -> Iterator[tuple[Key, _Kept]]:
        """Kept states of these tokens, up to a number of tokens, the shortest first."""
        for n_tokens in sorted({key[1] for key in self._by_key if key[1] <= most}):
            key = _key(token_ids, runs, n_tokens, space)
            kept = self._by_key.get(key)
            if kept is not None and kept.source.token_ids[:n_tokens] == token_ids[:n_tokens]:
                yield key, kept

    def _give_way(self) -> int:
        """The place of the copy that is given up for a new one."""
        all_kept = list(self._by_key.values())
        victim = min(all_kept[: -(-len(all_kept) // 2)], key=self._cost)
        self._lost(victim.place)
        return victim.place

    def _cost(self, kept: _Kept) -> tuple[bool, int]:
        """The need for a copy, and the tokens that are computed again where it is gone."""
        source = kept.source
        if self._prefixes.placed(source, kept.n_tokens) is None:
            return False, 0
        shorter = sorted({key[1] for key in self._by_key if key[1] < kept.n_tokens}, reverse=True)
        before = next((n for n in shorter if _key_of(source, n) in self._by_key), 0)
        return kept.is_needed, kept.n_tokens - before

    def _enter(self, key: Key, kept: _Kept) -> None:
        self._by_key[key] = kept
        self._key_of[kept.place] = key
        self._prefixes.n_changes += 1

    def _forget(self, place: int) -> None:
        self._lost(place)
        self._places.free(place)

    def _lost(self, place: int) -> None:
        del self._by_key[self._key_of.pop(place)]
        self._prefixes.n_changes += 1


def _intervals(last: int) -> Iterable[int]:
    """Positions up to `last` at which the state of a long prompt is to be kept."""
    every = INTERVAL_TOKENS
    while last // every > MOST_INTERVALS:
        every *= 2
    return range(every, last + 1, every)


def _key_of(source: PrefixSource, n_tokens: int) -> Key:
    return _key(source.token_ids, source.chain, n_tokens, source.space)


def _key(token_ids: tuple[int, ...], runs: tuple[int, ...], n_tokens: int, space: str) -> Key:
    whole = n_tokens // RUN_TOKENS
    return space, n_tokens, runs[whole - 1] if whole else 0, tuple(token_ids[whole * RUN_TOKENS : n_tokens])


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

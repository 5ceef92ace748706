"""States of sequences, for layers that keep one: where each sequence goes on, and copies that steps make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from phasewise._words import counted
from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import Placement
from phasewise.serving.pools.pool import KvPool
from phasewise.serving.pools.state_places import StatePlaces
from phasewise.serving.scheduling.prefixes import (
    NOTHING,
    RUN_TOKENS,
    Computed,
    KeptState,
    Match,
    PrefixIndex,
    PrefixSource,
    chain,
    copies_between,
)
from phasewise.serving.scheduling.request import LiveSequence, SchedulerError

INTERVAL_TOKENS = 256
MOST_INTERVALS = 4
"""Most interval copies of one prompt's states: the interval is INTERVAL_TOKENS times the smallest power of
two that gives so few."""

Key = tuple[str, int, int, tuple[int, ...]]
Keeps = tuple[tuple[int, int], ...]
"""Pairs (position, place), as in `SequenceSlice.keeps`."""


@dataclass(slots=True, eq=False)
class _Kept:
    n_tokens: int
    source: PrefixSource
    """A sequence that begins with the copy's tokens and has their keys and values."""
    place: int
    is_needed: bool
    """True if the conversation's next prompt may differ from here: its newest begins a turn or ends here."""


class _Plan(NamedTuple):
    source: PrefixSource
    keys: dict[int, Key]
    """Keys of the positions at which the sequence's state is to be kept."""
    needed: frozenset[int]
    """Positions whose copies may replace others."""


class StateIndex:
    """Kept states of the sequences whose keys and values `prefixes` knows. Integers only.

    A sequence with a state can only continue from a position whose state was kept: the end of each ended or
    preempted sequence, the beginnings of a prompt's turns, the position before a prompt's last token, and
    intervals of a long prompt while places are free. Of the half of all copies used longest ago, the one
    gives way whose loss costs the fewest tokens (those since the copy before it), and first those that a
    later prompt has gone past."""

    def __init__(self, places: StatePlaces, prefixes: PrefixIndex) -> None:
        self._places = places
        self._prefixes = prefixes
        self._by_key: dict[Key, _Kept] = {}  # the one used longest ago first
        self._key_of: dict[int, Key] = {}  # by place
        self._plans: dict[str, _Plan] = {}
        places.give_way = self._give_way

    def find(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> Match:
        """The latest kept state before a sequence's last token. `runs`: the `chain` of its tokens."""
        coming = self._coming(token_ids, runs, space)
        for _, kept in reversed(list(self._passed(token_ids, runs, space, len(token_ids) - 1))):
            placement = self._prefixes.placed(kept.source, kept.n_tokens)
            if placement is not None:
                return Match(kept.n_tokens, placement, max(kept.n_tokens, coming), kept.place)
            self._forget(kept.place)
        return Match(0, None, coming)

    def copies(self, held: Match, target: Placement) -> tuple[int, list[KvCopy]]:
        """Copies of keys, values and a kept state to a block, and the tokens they bring: all or none (0)."""
        if held.state is None or held.source is None or target.state is None:
            return 0, []
        n_slots, first = aligned(held.n_ready), self._places.first_slot
        done, copies = copies_between(held.source, target, n_slots)
        if done < n_slots:
            return 0, []
        return held.n_ready, [*copies, KvCopy(first + held.state, first + target.state, 1)]

    def plan(self, owner: str, turns: Iterable[int]) -> None:
        """Decide at which positions states of `owner` are kept. `turns`: positions of its prompt where
        assistant turns begin. Call after `PrefixIndex.start`."""
        source = self._prefixes.source(owner)
        assert source is not None, owner
        last = len(source.token_ids) - 1
        needed = frozenset(turn for turn in turns if 0 < turn <= last) or frozenset({last})
        keys = {n: _key_of(source, n) for n in sorted({*_intervals(last), last, *needed} - {0})}
        self._plans[owner] = _Plan(source, keys, needed)

    def took_over(self, owner: str, n_tokens: int) -> None:
        """Record that keys and values of the first `n_tokens` of `owner` are in its block, so that it can
        stand for the kept states of that prefix, which count as just used."""
        plan = self._plans[owner]
        source = plan.source
        passed = list(self._passed(source.token_ids, source.chain, source.space, n_tokens))
        for _, kept in passed:
            kept.source, kept.is_needed = source, kept.n_tokens in plan.needed
        for key, _ in sorted(passed, key=lambda pair: pair[1].is_needed):
            self._by_key[key] = self._by_key.pop(key)

    def keeps(self, owner: str, begin: int, end: int) -> Keeps:
        """Reserve places for states to keep in a step with positions [begin, end) of `owner`."""
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
        """Record the state copies that a step has made; copies of an owner that is gone are dropped."""
        plan = self._plans.get(owner)
        for position, place in keeps:
            if plan is None or plan.keys[position] in self._by_key:
                self._places.put_back(place)
                continue
            self._places.keep(place)
            self._enter(plan.keys[position], _Kept(position, plan.source, place, position in plan.needed))

    def ended(self, owner: str, source: PrefixSource | None) -> None:
        """Keep the state at the end of `owner`, which gives its block back. `source`: what
        `PrefixIndex.retire` returned; None: nothing is known, and no state is kept."""
        self._plans.pop(owner, None)
        if source is None or not source.token_ids:
            return
        key = _key_of(source, len(source.token_ids))
        if key not in self._by_key:
            self._enter(key, _Kept(len(source.token_ids), source, self._places.keep_of(owner), True))

    def along(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> Iterator[KeptState]:
        """Copies of all kept states along a sequence's tokens, whichever sequence made them."""
        for key, kept in self._passed(token_ids, runs, space, len(token_ids)):
            yield KeptState(kept.n_tokens, kept.place, partial(self._holds, key, kept))

    def _holds(self, key: Key, kept: _Kept) -> bool:
        return self._by_key.get(key) is kept

    def n_kept(self, source: PrefixSource) -> int:
        """Number of first tokens at a sequence's last kept state, with keys and values present."""
        kept = (kept.n_tokens for kept in self._by_key.values() if kept.source is source)
        return max((n for n in kept if self._prefixes.placed(source, n) is not None), default=0)

    def forget(self, source: PrefixSource | None) -> None:
        """Forget all states that `source` made."""
        for place in [kept.place for kept in self._by_key.values() if kept.source is source]:
            self._forget(place)

    def clear(self) -> None:
        for place in list(self._key_of):
            self._forget(place)
        self._plans.clear()

    def _coming(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> int:
        """Most first tokens after which a running sequence will keep a state; 0: none will."""
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
        """Kept states along these tokens, up to `most` tokens, the shortest first."""
        for n_tokens in sorted({key[1] for key in self._by_key if key[1] <= most}):
            key = _key(token_ids, runs, n_tokens, space)
            kept = self._by_key.get(key)
            if kept is not None and kept.source.token_ids[:n_tokens] == token_ids[:n_tokens]:
                yield key, kept

    def _give_way(self) -> int:
        """Drop the copy that is cheapest to lose, and return its place."""
        all_kept = list(self._by_key.values())
        victim = min(all_kept[: -(-len(all_kept) // 2)], key=self._cost)
        self._lost(victim.place)
        return victim.place

    def _cost(self, kept: _Kept) -> tuple[bool, int]:
        """Sort key of a copy: whether it is needed, and the tokens to compute again without it."""
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
"""Read a prefix from the store only if it has so many more tokens than memory."""

FindStored = Callable[[tuple[int, ...], str], int]
"""Number of first tokens that the store has, called with token ids and the cache space."""


CopiesAlong = Callable[[Computed], tuple[KeptState, ...]]


class WantedBeginning(NamedTuple):
    """A request whose prefix may be read into its pinned block."""

    request_id: str
    token_ids: tuple[int, ...]
    space: str
    placement: Placement


class StoredBeginnings:
    """Asks a store for prefixes of a scheduler's prompts. `copies_along`: lists a sequence's state copies."""

    def __init__(self, find: FindStored, prefixes: PrefixIndex, copies_along: CopiesAlong) -> None:
        self._find = find
        self._copies_along = copies_along
        self._computed: list[Computed] = []
        self._wanted: list[LiveSequence] = []
        prefixes.report_to(self._computed)

    def is_wanted(self, sequence: LiveSequence, n_ready: int) -> bool:
        """True if the store, which is asked once, has LEAST_RESTORED_TOKENS or more beyond `n_ready`."""
        if sequence.has_looked:
            return False
        n_stored = self._find(sequence.token_ids, sequence.request.cache_space)
        sequence.has_looked, sequence.is_restored = True, n_stored - n_ready >= LEAST_RESTORED_TOKENS
        if sequence.is_restored:
            self._wanted.append(sequence)
        return sequence.is_restored

    def take_wanted(self) -> list[WantedBeginning]:
        """Requests that wait for the store since the last call. Call while no copies are pending, whose
        sources may lie in these requests' blocks."""
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
        """Computed prompts and ended sequences since the last call, each with its state copies."""
        computed = list(self._computed)
        self._computed.clear()
        for sequence in computed:
            sequence.states = self._copies_along(sequence)
        return computed


Brought = tuple[int, list[KvCopy]]
"""Number of tokens brought, and the copies that bring their keys, values and state."""


class SequenceStates:
    """Keys, values and states that sequences of one scheduler reuse from each other. `reuses` False: nothing
    is reused, and `prefixes` stays empty. Models without state layers have no state places."""

    def __init__(self, pool: KvPool, prefixes: PrefixIndex, *, reuses: bool) -> None:
        self._places = pool.states
        self._window = pool.rings.window if pool.rings else 0
        self._prefixes = prefixes
        self._reuses = reuses
        self._index = StateIndex(pool.states, prefixes) if reuses and pool.states is not None else None
        self._most_drafts: int | None = None

    def take_over(self, sequence: LiveSequence, placement: Placement) -> Brought | None:
        """Number of reused tokens and the copies that bring them as a sequence begins its block; None: wait,
        since running sequences are about to compute more."""
        if not self._reuses:
            return 0, []
        request, token_ids = sequence.request, sequence.token_ids
        if sequence.runs is None:
            sequence.runs = chain(token_ids, space=request.cache_space)
        held = NOTHING
        if request.takes_over:
            index = self._prefixes if self._index is None else self._index
            held = index.find(token_ids, sequence.runs, request.cache_space)
        if 2 * (held.n_coming - held.n_ready) >= len(token_ids) - held.n_ready:
            return None
        self._prefixes.start(request.request_id, (token_ids, sequence.runs), placement, request.cache_space)
        if self._index is not None:
            self._index.plan(request.request_id, request.turns)
            return self._index.copies(held, placement)
        source, n_ready = held.source, held.n_ready
        return (0, []) if source is None else copies_between(source, placement, n_ready, self._window)

    def arrived(self, sequence: LiveSequence, placement: Placement) -> None:
        """Record that keys and values of a sequence, computed elsewhere, are in its block."""
        if self._reuses:
            token_ids, space = sequence.token_ids, sequence.request.cache_space
            sequence.runs = chain(token_ids, space=space)
            self._prefixes.start(sequence.request_id, (token_ids, sequence.runs), placement, space)
            self._prefixes.advance(sequence.request_id, len(token_ids))

    def took_over(self, owner: str, n_tokens: int) -> None:
        """Record that keys, values and state of `n_tokens` were copied into the block of `owner`."""
        self._prefixes.brought(owner, n_tokens)
        if self._index is not None:
            self._index.took_over(owner, n_tokens)

    def held(self) -> Iterator[tuple[PrefixSource, int]]:
        """Sequences whose prefix can be reused, each with the number of its first tokens that are held."""
        index = self._index
        for source in self._prefixes.sources:
            yield source, self._prefixes.n_held(source) if index is None else index.n_kept(source)

    def keeps(self, sequence: LiveSequence, n_tokens: int) -> Keeps:
        """Reserve the state copies of a prefill step of `n_tokens`."""
        if self._index is None:
            return ()
        begin = sequence.n_computed
        return self._index.keeps(sequence.request_id, begin, begin + n_tokens)

    def share_for_drafts(self, n_sequences: int) -> None:
        """Divide spare state places equally among `n_sequences`: each draft needs a state copy."""
        if self._places is not None:
            self._most_drafts = self._places.n_spare // n_sequences

    def room_for_drafts(self, sequence: LiveSequence) -> int:
        """Most drafts of a sequence: limited by free slots of its block, tokens left of its answer and its
        share of the spare state places."""
        request, placement = sequence.request, sequence.placement
        if placement is None or request.prefill_only:
            return 0
        most = min(placement.n_slots, request.most_tokens - 1) - sequence.n_tokens
        return most if self._most_drafts is None else min(most, self._most_drafts)

    def with_drafts(
        self, batch: Batch, sequences: Sequence[LiveSequence], drafts: Sequence[Sequence[int]]
    ) -> Batch:
        """Append drafts to each slice of a decode batch, with a state copy before each draft, since it may be
        rejected. SchedulerError: more drafts than there is room for."""
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
        """Record a sequence's computed step: it continues from the state after `n_run` tokens."""
        if self._places is None or sequence.placement is None:
            return
        state = self._computed(self._places, sequence.request_id, piece, n_run)
        if state != sequence.placement.state:
            sequence.placement = sequence.placement._replace(state=state)
            self._prefixes.moved(sequence.request_id, sequence.placement)

    def _computed(self, places: StatePlaces, owner: str, piece: SequenceSlice, n_run: int) -> int | None:
        """Record a step's state copies, and return the place that the sequence continues from."""
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
        """Free the places of state copies that are not needed."""
        for piece in pieces:
            for _, place in piece.keeps:
                assert self._places is not None
                self._places.put_back(place)

    def copies_along(self, computed: Computed) -> tuple[KeptState, ...]:
        """Copies of the states kept along a computed sequence."""
        if self._index is None:
            return ()
        return tuple(self._index.along(computed.token_ids, computed.chain, computed.space))

    def forget(self, sequence: LiveSequence) -> None:
        """Forget all keys, values and states that the sequence wrote."""
        if self._index is not None:
            self._index.forget(self._prefixes.source(sequence.request_id))
        self._prefixes.drop(sequence.request_id)

    def give_up(self, sequence: LiveSequence) -> None:
        """Forget what the sequence was to keep: its stored prefix did not arrive in its block."""
        self._prefixes.drop(sequence.request_id)
        if self._index is not None:
            self._index.ended(sequence.request_id, None)

    def leave(self, sequence: LiveSequence, *, is_computed: bool) -> None:
        """Offer the computed prefix of a sequence that gives its block back for reuse. `is_computed`: no step
        of the sequence is under way, so that its state matches its computed tokens."""
        if sequence.is_restored:
            self.give_up(sequence)
        elif sequence.has_started and self._reuses:
            source = self._prefixes.retire(sequence.request_id, sequence.token_ids[: sequence.n_computed])
            if self._index is not None:
                self._index.ended(sequence.request_id, source if is_computed else None)

    def forget_ended(self) -> None:
        """Forget the keys and values of ended sequences, and all states."""
        self._prefixes.forget_ended()
        if self._index is not None:
            self._index.clear()

    def clear(self) -> None:
        """Forget everything: all keys, values and states are lost."""
        if self._index is not None:
            self._index.clear()
        self._prefixes.clear()

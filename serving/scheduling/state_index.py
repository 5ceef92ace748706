"""State checkpoints: copies of states, by the tokens that they are after.

A sequence of a model with a state can go on only from a place where its state was kept. Kept are the state
before a prompt's last token, the states at intervals of a long prompt where a place is free, and the state
of every sequence that ends or is preempted, at its end, so that the next turn of a conversation computes new
tokens alone. Keys and values of those tokens must still be where the sequence wrote them (`prefixes`).
Integers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from phasewise.serving.batch import KvCopy
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import Placement
from phasewise.serving.pools.state_places import StatePlaces
from phasewise.serving.scheduling.prefixes import RUN_TOKENS, PrefixIndex, PrefixSource, copies_between

INTERVAL_TOKENS = 256
MOST_INTERVALS = 4
"""The most of one prompt: its states are kept at multiples of INTERVAL_TOKENS, or of as many times that as
leave so few."""

Key = tuple[str, int, int, tuple[int, ...]]
Keeps = tuple[tuple[int, int], ...]
"""Pairs (position, place): `SequenceSlice.keeps`."""


class _Kept(NamedTuple):
    n_tokens: int
    source: PrefixSource
    place: int


class KeptState:
    """A copy of a sequence's state. Any thread may ask `is_there`: a reader asks it after it has read, and
    believes what it read only then."""

    def __init__(self, index: StateIndex, key: Key, kept: _Kept) -> None:
        self._index, self._key, self._kept = index, key, kept
        self.n_tokens, self.place = kept.n_tokens, kept.place

    @property
    def is_there(self) -> bool:
        """True if nothing has taken its place."""
        return self._index.holds(self._key, self._kept)


class KnownState(NamedTuple):
    """The part of a sequence's beginning that a kept state is after."""

    n_ready: int
    n_coming: int
    """Tokens that a running sequence will have kept a state after; at least `n_ready`."""
    kept: _Kept | None
    placement: Placement | None
    """From there keys and values are copied."""


class _Plan(NamedTuple):
    source: PrefixSource
    keys: dict[int, Key]
    """By position: where the sequence's state is to be kept."""


class StateIndex:
    """Kept states of all sequences whose keys and values `prefixes` knows."""

    def __init__(self, places: StatePlaces, prefixes: PrefixIndex) -> None:
        self._places = places
        self._prefixes = prefixes
        self._by_key: dict[Key, _Kept] = {}
        self._key_of: dict[int, Key] = {}  # by place
        self._plans: dict[str, _Plan] = {}
        places.on_loss = self._lost

    def find(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> KnownState:
        """The best that there is for a sequence of these tokens and this chain; its last token is
        computed."""
        coming = self._coming(token_ids, runs, space)
        for n_tokens in sorted({key[1] for key in self._by_key if key[1] < len(token_ids)}, reverse=True):
            kept = self._by_key.get(_key(token_ids, runs, n_tokens, space))
            if kept is None or kept.source.token_ids[:n_tokens] != token_ids[:n_tokens]:
                continue
            placement = self._prefixes.placed(kept.source, n_tokens)
            if placement is None:
                self._forget(kept.place)
                continue
            self._places.use(kept.place)
            return KnownState(n_tokens, max(n_tokens, coming), kept, placement)
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

    def plan(self, owner: str, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> None:
        """`owner` begins to compute these tokens. After `PrefixIndex.start`."""
        source = self._prefixes.source(owner)
        assert source is not None, owner
        positions = _positions(len(token_ids))
        self._plans[owner] = _Plan(source, {n: _key(token_ids, runs, n, space) for n in positions})

    def keeps(self, owner: str, begin: int, end: int) -> Keeps:
        """Places, set aside, for the states that a step which computes these positions is to keep."""
        plan, keeps = self._plans.get(owner), []
        if plan is None:
            return ()
        last = max(plan.keys, default=0)
        for position in sorted(plan.keys):
            if not begin < position <= end or plan.keys[position] in self._by_key:
                continue
            if self._places.has_free or (position == last and self._places.n_spare):
                keeps.append((position, self._places.set_aside()))
        return tuple(keeps)

    def computed(self, owner: str, keeps: Keeps) -> None:
        """The step has kept these. An owner that has gone has nothing to keep."""
        plan = self._plans.get(owner)
        for position, place in keeps:
            if plan is None or plan.keys[position] in self._by_key:
                self._places.put_back(place)
                continue
            self._places.keep(place)
            self._enter(plan.keys[position], _Kept(position, plan.source, place))

    def ended(self, owner: str, source: PrefixSource | None) -> None:
        """`owner` gives its block back: the state at its end is kept. source: as `PrefixIndex.retire` knows
        it now, with the tokens that it has computed; None: nothing is known of it."""
        self._plans.pop(owner, None)
        if source is None or not source.token_ids:
            return
        n_tokens = len(source.token_ids)
        key = _key(source.token_ids, source.chain, n_tokens, source.space)
        if key not in self._by_key:
            self._enter(key, _Kept(n_tokens, source, self._places.keep_of(owner)))

    def along(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str) -> Iterator[KeptState]:
        """The copies of all states that a sequence of these tokens and this chain has passed, whoever made
        them."""
        for n_tokens in sorted({key[1] for key in self._by_key if key[1] <= len(token_ids)}):
            key = _key(token_ids, runs, n_tokens, space)
            kept = self._by_key.get(key)
            if kept is not None and kept.source.token_ids[:n_tokens] == token_ids[:n_tokens]:
                yield KeptState(self, key, kept)

    def holds(self, key: Key, kept: _Kept) -> bool:
        """True if this is the copy of that key."""
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
        """All states are lost."""
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


def _positions(n_tokens: int) -> Iterable[int]:
    """Positions of a prompt of so many tokens before which its state is to be kept."""
    every = INTERVAL_TOKENS
    while (n_tokens - 1) // every > MOST_INTERVALS:
        every *= 2
    return sorted({*range(every, n_tokens, every), n_tokens - 1} - {0})


def _key(token_ids: tuple[int, ...], runs: tuple[int, ...], n_tokens: int, space: str) -> Key:
    whole = n_tokens // RUN_TOKENS
    return space, n_tokens, runs[whole - 1] if whole else 0, tuple(token_ids[whole * RUN_TOKENS : n_tokens])

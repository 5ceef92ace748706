"""State checkpoints: copies of states, by the tokens that they are after.

A sequence of a model with a state can go on only from a place where its state was kept. Kept are the state
of every sequence that ends or is preempted, at its end, so that the next turn of a conversation computes new
tokens alone; the states where a prompt's turns begin, because the next prompt may differ there; the state
before a prompt's last token, and the states at intervals of a long prompt where a place is free. Keys and
values of those tokens must still be where a sequence wrote them (`prefixes`).

Of the half that was used longest ago the copy gives way whose loss costs the fewest tokens, those between it
and the copy before it; but first those that a later prompt has gone past. Integers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
    """Kept states of all sequences whose keys and values `prefixes` knows."""

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

"""Prefix index: which KV block holds the keys and values of a prompt's prefix.

Tokens are looked up in runs of `RUN_TOKENS` by a chain of hashes, and then compared. A sequence finds only
sequences of its own `space`, so that the time of an answer does not tell one user what another has sent. A
released block stays readable until its slots are written again: each panel of slots carries the serial of the
sequence that wrote it last, and a run is present while its panel carries its sequence's serial. Integers
only; copies are listed in the order in which they must be done, before anything is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phasewise._words import counted
from phasewise.serving.batch import KV_CHUNK, KvCopy
from phasewise.serving.pools.contract import ALIGNMENT, Placement, Rings

RUN_TOKENS = ALIGNMENT
"""Tokens in a run: one panel of keys, since copies move whole panels."""


class PrefixError(AssertionError):
    """The index and the scheduler disagree on where a sequence is: a bug."""


class Match(NamedTuple):
    """The part of a sequence's prefix that others have: whole runs, never the last token."""

    n_ready: int
    """Tokens that can be copied now."""
    source: Placement | None
    """Placement of the sequence to copy from; None if nothing is ready."""
    n_coming: int
    """Tokens that a running sequence will have computed soon; at least `n_ready`."""
    state: int | None = None
    """Place of the kept state to continue from; None: there is none."""


NOTHING = Match(0, None, 0)


@dataclass(slots=True, eq=False)
class PrefixSource:
    """A sequence whose first `n_ready` tokens have keys and values in `placement`."""

    serial: int
    space: str
    token_ids: tuple[int, ...]
    chain: tuple[int, ...]
    placement: Placement
    n_ready: int
    is_live: bool = True
    n_written: int = 0
    """Tokens ever stored, drafts included: in a ring they overwrote earlier positions."""
    ring_begin: int = 0
    """First position stored in the sequence's ring: no later token sees earlier ones."""


class KeptState(NamedTuple):
    """A copy of a sequence's state after its first `n_tokens`, for a reader on any thread, which calls
    `is_there` after reading the state and discards what it read if that is False: it was overwritten."""

    n_tokens: int
    place: int
    is_there: Callable[[], bool]


class Computed:
    """Keys and values of a sequence's first tokens, for a reader on any thread, which calls `is_there` after
    reading and discards what it read if that is False."""

    states: tuple[KeptState, ...] = ()
    """Copies of the sequence's states, for layers that keep a state."""

    def __init__(self, index: PrefixIndex, source: PrefixSource) -> None:
        self._index = index
        self._source = source
        self.space = source.space
        self.placement = source.placement
        self.n_tokens = source.n_ready
        self.token_ids = source.token_ids[: source.n_ready]
        self.chain = source.chain

    def is_there(self, begin: int, end: int) -> bool:
        """True if positions [begin, end) were neither overwritten nor moved."""
        return self._index.holds(self._source, self.placement, begin, end)


def chain(token_ids: Sequence[int], prefix: tuple[int, ...] = (), space: str = "") -> tuple[int, ...]:
    """Chained hashes of `space` and the tokens to the end of each whole run. `prefix`: known first ones."""
    hashes = list(prefix)
    last = hashes[-1] if hashes else hash(space)
    for start in range(len(hashes) * RUN_TOKENS, len(token_ids) - RUN_TOKENS + 1, RUN_TOKENS):
        last = hash((last, tuple(token_ids[start : start + RUN_TOKENS])))
        hashes.append(last)
    return tuple(hashes)


class PrefixIndex:
    """Finds sequences by their first runs of tokens. An owner is the id of a request that writes a block."""

    def __init__(self, n_slots: int, rings: Rings | None = None) -> None:
        self._n_slots = n_slots
        self._rings = rings
        self._stamps = [0] * (n_slots // RUN_TOKENS)
        self._ring_stamps = [0] * (rings.n_slots // RUN_TOKENS if rings else 0)
        self._serial = 0
        self._by_chain: dict[int, PrefixSource] = {}
        self._live: dict[str, PrefixSource] = {}
        self._retired: dict[PrefixSource, None] = {}  # the one that ended longest ago first
        self._n_retired_tokens = 0
        self._listener: list[Computed] | None = None
        self.n_changes = 0
        """Counter of changes in what can be reused, not counting prompts that are still being computed."""

    @property
    def sources(self) -> tuple[PrefixSource, ...]:
        """Every sequence that the index knows, running or ended."""
        return (*self._live.values(), *self._retired)

    def n_held(self, source: PrefixSource) -> int:
        """Number of first tokens of `source` whose keys and values can be reused now. With rings: for a
        sequence that begins with all of these tokens."""
        n_there = self._n_there(source, source.n_ready)
        if self._rings is not None and n_there and not self._is_in_ring(source, n_there, n_there):
            return 0
        return n_there

    def find(self, token_ids: tuple[int, ...], runs: tuple[int, ...], space: str = "") -> Match:
        """The longest match for a sequence within `space`. `runs`: the `chain` of its tokens."""
        best = NOTHING
        for n_runs in range(min(len(runs), (len(token_ids) - 1) // RUN_TOKENS), 0, -1):
            n_tokens = n_runs * RUN_TOKENS
            if n_tokens <= best.n_ready:
                break
            source = self._by_chain.get(runs[n_runs - 1])
            if source is None or source.space != space or source.token_ids[:n_tokens] != token_ids[:n_tokens]:
                continue
            n_ready = self._n_there(source, min(n_tokens, source.n_ready))
            if self._rings is not None and not self._is_in_ring(source, n_ready, n_tokens):
                continue
            n_coming = max(best.n_coming, n_tokens if source.is_live else n_ready)
            if n_ready > best.n_ready:
                best = Match(n_ready, source.placement, n_coming)
            else:
                best = best._replace(n_coming=n_coming)
        return best

    def start(
        self,
        owner: str,
        sequence: tuple[tuple[int, ...], tuple[int, ...]],
        placement: Placement,
        space: str = "",
    ) -> None:
        """Record that `owner` begins to overwrite a block. `sequence`: tokens and their `chain`."""
        self._serial += 1
        token_ids, runs = sequence
        source = PrefixSource(self._serial, space, token_ids, runs, placement, 0)
        self._live[owner] = source
        self.n_changes += 1
        self._stamp(source)
        self._enter(source, 0)

    def overwritten(self, placement: Placement) -> None:
        """Record that an owner unknown to the index overwrites a block."""
        self._serial += 1
        self.n_changes += 1
        self._stamp(PrefixSource(self._serial, "", (), (), placement, 0))

    def moved(self, owner: str, placement: Placement) -> None:
        """Record the larger block of `owner`, to which its keys and values are being copied."""
        source = self._live.get(owner)
        if source is not None:
            source.placement = placement
            self.n_changes += 1
            self._stamp(source)

    def advance(self, owner: str, n_ready: int | None, n_written: int = 0, *, is_whole: bool = False) -> None:
        """Record that the first `n_ready` tokens of `owner` have keys and values (None: of its answer, which
        are recorded at its end), and the number of tokens ever stored, drafts included. `is_whole`: True with
        the last step of its prompt."""
        source = self._live.get(owner)
        if source is None:
            return
        source.n_written = max(source.n_written, n_written)
        if n_ready is not None:
            source.n_ready = n_ready
        if is_whole:
            self.n_changes += 1
            self._note(source)

    def brought(self, owner: str, n_tokens: int) -> None:
        """Record that keys and values of the first `n_tokens` of `owner` were copied into its block; into a
        ring, only the window that the next token sees."""
        source = self._live.get(owner)
        if source is not None:
            source.n_ready = n_tokens
            source.ring_begin = max(0, n_tokens - self._rings.window) if self._rings else 0

    def report_to(self, listener: list[Computed]) -> None:
        """Append computed prompts and ended sequences to `listener`, which its reader empties."""
        self._listener = listener

    def holds(self, source: PrefixSource, placement: Placement, begin: int, end: int) -> bool:
        """True if positions [begin, end) of `source` are still in `placement`."""
        if source.n_ready < end or source.placement._replace(state=None) != placement._replace(state=None):
            return False
        panels = (placement.slot(position) // RUN_TOKENS for position in range(begin, end, RUN_TOKENS))
        return all(self._stamps[panel] == source.serial for panel in panels)

    def source(self, owner: str) -> PrefixSource | None:
        """The sequence of `owner` while it runs; None: it does not."""
        return self._live.get(owner)

    def placed(self, source: PrefixSource, n_tokens: int) -> Placement | None:
        """The block of a sequence; None: keys and values of its first `n_tokens` were overwritten."""
        n_there = self._n_there(source, -(-n_tokens // RUN_TOKENS) * RUN_TOKENS)
        return source.placement if n_there >= n_tokens else None

    def retire(self, owner: str, token_ids: tuple[int, ...]) -> PrefixSource | None:
        """Record that `owner` gives its block back with keys and values of `token_ids`, which others may copy
        until the block is overwritten. The index remembers at most as many ended tokens as there are slots,
        and forgets the sequences that ended longest ago."""
        source = self._live.pop(owner, None)
        if source is None:
            return None
        self.n_changes += 1
        n_known = min(len(source.chain), len(token_ids) // RUN_TOKENS)
        self._leave(source, n_known)
        source.is_live, source.n_ready, source.token_ids = False, len(token_ids), token_ids
        source.chain = chain(token_ids, source.chain[:n_known], source.space)
        self._enter(source, n_known)
        self._retired[source] = None
        self._n_retired_tokens += len(token_ids)
        self._note(source)
        while self._n_retired_tokens > self._n_slots:
            oldest = next(iter(self._retired))
            del self._retired[oldest]
            self._n_retired_tokens -= len(oldest.token_ids)
            self._leave(oldest, 0)
        return source

    def drop(self, owner: str) -> None:
        """Forget the running sequence of `owner`."""
        source = self._live.pop(owner, None)
        if source is not None:
            self.n_changes += 1
            source.n_ready = 0
            self._leave(source, 0)

    def forget_ended(self) -> None:
        """Forget all ended sequences."""
        self.n_changes += 1
        for source in self._retired:
            source.n_ready = 0
            self._leave(source, 0)
        self._retired.clear()
        self._n_retired_tokens = 0

    def clear(self) -> None:
        """Forget all sequences: their keys and values are lost."""
        self.n_changes += 1
        for source in (*self._live.values(), *self._retired):
            source.n_ready = 0
        for table in (self._by_chain, self._live, self._retired):
            table.clear()
        self._n_retired_tokens = 0

    def check(self, owner: str, placement: Placement, n_computed: int) -> None:
        """Raise PrefixError unless `owner` still has its block and at most `n_computed` tokens ready."""
        source = self._live[owner]
        n_there = self._n_there(source, source.n_ready)
        if (
            source.placement != placement
            or source.n_ready > n_computed
            or n_there <= source.n_ready - RUN_TOKENS
        ):
            raise PrefixError(
                f"{owner!r}: {counted(source.n_ready, 'token')} said to be at {source.placement},"
                f" {n_there} are; "
                f"{n_computed} computed at {placement}"
            )

    def _note(self, source: PrefixSource) -> None:
        if self._listener is not None and source.n_ready:
            self._listener.append(Computed(self, source))

    def _enter(self, source: PrefixSource, n_known: int) -> None:
        for run_hash in source.chain[n_known:]:
            self._by_chain[run_hash] = source

    def _leave(self, source: PrefixSource, n_kept: int) -> None:
        for run_hash in source.chain[n_kept:]:
            if self._by_chain.get(run_hash) is source:
                del self._by_chain[run_hash]

    def _stamp(self, source: PrefixSource) -> None:
        for begin, end in _pieces(source.placement, source.placement.n_slots):
            first, last = begin // RUN_TOKENS, -(-end // RUN_TOKENS)
            self._stamps[first:last] = [source.serial] * (last - first)
        if self._rings is not None and source.placement.ring is not None:
            first_slot, n_slots = source.placement.ring
            first = (first_slot - self._rings.first_slot) // RUN_TOKENS
            self._ring_stamps[first : first + n_slots // RUN_TOKENS] = [source.serial] * (
                n_slots // RUN_TOKENS
            )

    def _is_in_ring(self, source: PrefixSource, n_ready: int, n_tokens: int) -> bool:
        """True if the ring of `source` has the window of the token after its first `n_ready` and, if `source`
        still runs, will have the window of the token after its first `n_tokens`."""
        assert self._rings is not None
        ring = source.placement.ring
        if ring is None:
            return False
        first_slot, n_slots = ring
        lost = max(source.ring_begin, source.n_written - n_slots)  # positions before are not there
        wanted = n_tokens if source.is_live and n_ready < n_tokens else n_ready
        if max(0, wanted - self._rings.window) < lost:
            return False
        first = (first_slot - self._rings.first_slot) // RUN_TOKENS
        stamps = self._ring_stamps[first : first + n_slots // RUN_TOKENS]
        return all(stamp == source.serial for stamp in stamps)

    def _n_there(self, source: PrefixSource, n_tokens: int) -> int:
        """Number of first tokens, in whole runs, that have not been overwritten."""
        n_there = 0
        for begin, end in _pieces(source.placement, n_tokens // RUN_TOKENS * RUN_TOKENS):
            stamps = self._stamps[begin // RUN_TOKENS : end // RUN_TOKENS]
            if stamps.count(source.serial) == len(stamps):  # ten times as fast as one by one
                n_there += len(stamps) * RUN_TOKENS
                continue
            for stamp in stamps:
                if stamp != source.serial:
                    return n_there
                n_there += RUN_TOKENS
        return n_there


def copies_between(
    source: Placement, target: Placement, n_tokens: int, window: int = 0
) -> tuple[int, list[KvCopy]]:
    """List the copies that bring the first `n_tokens` from one block to another, and the number of tokens
    they bring. `window`: positions that ring layers see. The number is smaller than `n_tokens` where the
    blocks share slots in another order, so that a copy would destroy the source of a later copy; with rings
    it is then 0. Tokens that are in place already need no copy."""
    copies: list[KvCopy] = []
    done = 0
    for (begin, end), (target_begin, _) in zip(
        _cut(source, target, n_tokens), _cut(target, source, n_tokens), strict=True
    ):
        if any(begin < copy.target_slot + copy.n_slots and copy.target_slot < end for copy in copies):
            break
        if begin != target_begin:
            copies.append(KvCopy(begin, target_begin, end - begin))
        done += end - begin
    if source.ring is None or target.ring is None:
        return done, _joined(copies)
    if done < n_tokens:  # the source's ring may have gone on past what a token after fewer of them sees
        return 0, []
    in_rings = _ring_copies(source.ring, target.ring, done, window)
    return (0, []) if in_rings is None else (done, [*_joined(copies), *_joined(in_rings)])


def _ring_copies(
    source: tuple[int, int], target: tuple[int, int], n_tokens: int, window: int
) -> list[KvCopy] | None:
    """Copies of the ring panels that the token after the first `n_tokens` sees; None where one copy would
    destroy the source of a later one."""
    copies: list[KvCopy] = []
    begin = max(0, n_tokens - window) // RUN_TOKENS * RUN_TOKENS
    for position in range(begin, n_tokens, RUN_TOKENS):
        slot, place = (first + position % n_slots for first, n_slots in (source, target))
        if any(
            slot < copy.target_slot + RUN_TOKENS and copy.target_slot < slot + RUN_TOKENS for copy in copies
        ):
            return None
        if slot != place:
            copies.append(KvCopy(slot, place, RUN_TOKENS))
    return copies


def _cut(placement: Placement, other: Placement, n_tokens: int) -> list[tuple[int, int]]:
    """Slot ranges of a sequence's first tokens, cut into runs of KV_CHUNK if either placement is a table."""
    if placement.table is None and other.table is None:
        return [(placement.base, placement.base + n_tokens)]
    if placement.table is not None:
        return _pieces(placement, n_tokens)
    base = placement.base
    return [(base + start, base + min(start + KV_CHUNK, n_tokens)) for start in range(0, n_tokens, KV_CHUNK)]


def _pieces(placement: Placement, n_tokens: int) -> list[tuple[int, int]]:
    """Slot ranges that hold the first `n_tokens`, in order."""
    if placement.table is None:
        return [(placement.base, placement.base + n_tokens)]
    return [
        (slot, slot + min(KV_CHUNK, n_tokens - start))
        for slot, start in zip(placement.table, range(0, n_tokens, KV_CHUNK), strict=False)
    ]


def _joined(copies: list[KvCopy]) -> list[KvCopy]:
    """Merge neighbouring copies whose source and target ranges both continue."""
    joined: list[KvCopy] = []
    for copy in copies:
        if joined:
            source, target, n_slots = joined[-1]
            if (source + n_slots, target + n_slots) == (copy.source_slot, copy.target_slot):
                joined[-1] = KvCopy(source, target, n_slots + copy.n_slots)
                continue
        joined.append(copy)
    return joined

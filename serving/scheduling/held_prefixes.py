"""Beginnings of prompts that one engine holds, told to whoever routes requests: changes since it was told.

Held is a block whose keys and values can be taken over now: no slot of it was given to others since it was
computed, or this engine wrote it to the folder of `serve --prefix-cache`. In memory that is the same for
every pool, whether it places blocks in one run or by a table: `PrefixIndex` stamps panels of slots with who
wrote them last. Where layers keep rings, a sequence is held as far as its ring has what its next token sees;
where they keep states, up to its last kept state. Both are held at their ends, where a conversation goes on,
so that a prompt that leaves the sequence earlier may find less than was told.

Integers only; called on the engine's thread.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple, Protocol

from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.scheduling.prefixes import PrefixSource
from phasewise.serving.scheduling.scheduler import Scheduler

BLOCK_TOKENS = 4 * ALIGNMENT
"""Whole panels of keys. Shorter blocks tell more of short prompts and make reports longer."""
KEY_BYTES = 8


def block_keys(
    token_ids: Sequence[int], model_hash: str, space: str, before: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """A key for each whole block. before: the keys of the first blocks, where they are known."""
    keys = list(before)
    last = before[-1].to_bytes(KEY_BYTES, "big") if before else _digest(f"{model_hash}\0{space}".encode())
    begin = len(before) * BLOCK_TOKENS
    n_bytes = BLOCK_TOKENS * 8
    tokens = array("q", token_ids[begin : len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS]).tobytes()
    for start in range(0, len(tokens), n_bytes):
        last = _digest(last + tokens[start : start + n_bytes])
        keys.append(int.from_bytes(last, "big"))
    return tuple(keys)


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=KEY_BYTES).digest()


MOST_STORED_BLOCKS = 2048
"""Blocks on disk that are told: those of the sequences that were written last."""
MOST_KEYS = 4096
"""Keys that one report adds, or removes, at most: what is left follows with the next one."""


class HeldReport(NamedTuple):
    """Changes of what an engine holds, by key (`block_keys`)."""

    number: int
    """1 is the first of an engine's life; each follows the one before."""
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


class StoredBeginning(Protocol):
    """`serving.prefix_store.store.KeptBeginning`."""

    token_ids: tuple[int, ...]
    space: str
    n_tokens: int


class Stored(Protocol):
    """`serving.prefix_store.store.KeptBeginnings`."""

    n_changes: int

    def now(self) -> Sequence[StoredBeginning]: ...


class HeldPrefixes:
    """The prefixes held by the scheduler of one engine. stored: the prefixes written to its folder."""

    def __init__(self, scheduler: Scheduler, model_hash: str, stored: Stored | None = None) -> None:
        self._scheduler = scheduler
        self._stored = stored
        self._model_hash = model_hash
        self._keys: dict[PrefixSource | StoredBeginning, tuple[int, ...]] = {}
        """Keys of the blocks that are held of each sequence."""
        self._n_holders: Counter[int] = Counter()
        """By key: sequences that it is held of."""
        self._told: set[int] = set()
        self._to_tell: set[int] = set()
        """Keys that may have changed since they were told."""
        self._n_reports = 0
        self._seen = 0

    @property
    def has_changed(self) -> bool:
        """True if there may be something to report."""
        return self._n_changes != self._seen or bool(self._to_tell) or not self._n_reports

    def report(self) -> HeldReport | None:
        """The changes since the report before; None: there are none. The first one says that a life begins,
        whatever is held."""
        if not self.has_changed:
            return None
        self._seen = self._n_changes
        self._look()
        added = _some(key for key in self._to_tell if key in self._n_holders and key not in self._told)
        removed = _some(key for key in self._to_tell if key not in self._n_holders and key in self._told)
        self._told.difference_update(removed)
        self._told.update(added)
        is_whole = max(len(added), len(removed)) < MOST_KEYS
        self._to_tell = set() if is_whole else self._to_tell.difference(added, removed)
        if not added and not removed and self._n_reports:
            return None
        self._n_reports += 1
        return HeldReport(self._n_reports, added, removed)

    @property
    def _n_changes(self) -> int:
        return self._scheduler.n_prefix_changes + (0 if self._stored is None else self._stored.n_changes)

    def _look(self) -> None:
        """Note what is held now; a sequence that has not changed costs little."""
        before, self._keys = self._keys, {}
        for source, n_tokens in self._all():
            n_blocks, own = n_tokens // BLOCK_TOKENS, before.pop(source, ())
            if len(own) < n_blocks:
                tokens = source.token_ids[: n_blocks * BLOCK_TOKENS]
                longer = block_keys(tokens, self._model_hash, source.space, own)
                self._n_holders.update(longer[len(own) :])
                self._to_tell.update(longer[len(own) :])
                own = longer
            elif len(own) > n_blocks:
                self._forget(own[n_blocks:])
                own = own[:n_blocks]
            self._keys[source] = own
        for own in before.values():
            self._forget(own)

    def _forget(self, keys: tuple[int, ...]) -> None:
        self._to_tell.update(keys)
        for key in keys:
            self._n_holders[key] -= 1
            if not self._n_holders[key]:
                del self._n_holders[key]

    def _all(self) -> Iterator[tuple[PrefixSource | StoredBeginning, int]]:
        """Sequences held in memory and on disk, each with the number of its first tokens that are held."""
        yield from self._scheduler.held_prefixes()
        n_left = MOST_STORED_BLOCKS * BLOCK_TOKENS
        for beginning in () if self._stored is None else reversed(self._stored.now()):
            n_tokens = min(n_left, beginning.n_tokens)
            n_left -= n_tokens
            yield beginning, n_tokens


def _some(keys: Iterable[int]) -> tuple[int, ...]:
    """At most as many changes as a report has room for."""
    return tuple(islice(keys, MOST_KEYS))

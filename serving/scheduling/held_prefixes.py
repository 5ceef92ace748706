"""Prompt prefixes that one engine holds, reported as changes to the router.

A block of tokens is held while its keys and values can be reused: its slots were not written by another
sequence, or this engine wrote it to the folder of `serve --prefix-cache`. With ring layers a sequence counts
as held as far as its ring still has the window of the next token; with state layers, up to its last kept
state. A prompt that leaves the sequence earlier may therefore find less than was reported. Integers only;
called on the engine's thread.
"""

from __future__ import annotations

import threading
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.scheduling.prefixes import PrefixSource
from phasewise.serving.scheduling.scheduler import Scheduler

BLOCK_TOKENS = 4 * ALIGNMENT
"""Tokens in a block: whole panels of keys. Smaller blocks make reports longer."""
KEY_BYTES = 8


def block_keys(
    token_ids: Sequence[int], model_hash: str, space: str, before: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Hash keys of a token sequence's whole blocks. `before`: known keys of its first blocks."""
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
"""Most blocks on disk in a report: those of the sequences written last."""
MOST_KEYS = 4096
"""Most keys that one report adds, and most that it removes; the rest follows in the next report."""


class HeldReport(NamedTuple):
    """Changes of the blocks that an engine holds, by key (`block_keys`)."""

    number: int
    """Serial number of the report within the engine's life, from 1 on."""
    added: tuple[int, ...] = ()
    removed: tuple[int, ...] = ()


MOST_KEPT = 64
"""Most sequences that an engine remembers as written to the folder."""


@dataclass(slots=True, eq=False)
class KeptBeginning:
    """A sequence whose first `n_tokens` tokens can be read from the folder."""

    token_ids: tuple[int, ...]
    space: str
    n_tokens: int


class KeptBeginnings:
    """Sequences that this engine wrote to the folder. `n_stored`: number of first tokens that the folder has.
    `note` and `look_again` are called on the writer's thread."""

    def __init__(self, n_stored: Callable[[tuple[int, ...], str], int]) -> None:
        self._n_stored = n_stored
        self._kept: list[KeptBeginning] = []
        self._lock = threading.Lock()
        self.n_changes = 0

    def note(self, token_ids: tuple[int, ...], space: str) -> None:
        """Add a sequence whose records are all in the folder."""
        n_tokens = self._n_stored(token_ids, space)
        with self._lock:
            self._kept = [
                kept
                for kept in self._kept
                if kept.space != space or token_ids[: kept.n_tokens] != kept.token_ids[: kept.n_tokens]
            ]
            self._kept.append(KeptBeginning(token_ids, space, n_tokens))
            del self._kept[:-MOST_KEPT]
            self.n_changes += 1

    def look_again(self) -> None:
        """Count the readable tokens again, after records were removed from the folder."""
        for kept in self.now():
            n_tokens = self._n_stored(kept.token_ids, kept.space)
            if n_tokens != kept.n_tokens:
                kept.n_tokens = n_tokens
                self.n_changes += 1

    def now(self) -> list[KeptBeginning]:
        """All remembered sequences; may be called from any thread."""
        with self._lock:
            return list(self._kept)


class HeldPrefixes:
    """The prefixes that one engine holds. `stored`: prefixes in its prefix folder; None: no folder."""

    def __init__(self, scheduler: Scheduler, model_hash: str, stored: KeptBeginnings | None = None) -> None:
        self._scheduler = scheduler
        self._stored = stored
        self._model_hash = model_hash
        self._keys: dict[PrefixSource | KeptBeginning, tuple[int, ...]] = {}
        """Keys of the held blocks of each sequence."""
        self._n_holders: Counter[int] = Counter()
        """Number of sequences that hold the block of a key."""
        self._told: set[int] = set()
        self._to_tell: set[int] = set()
        """Keys that may have changed since the last report."""
        self._n_reports = 0
        self._seen = 0

    @property
    def has_changed(self) -> bool:
        """True if there may be changes to report."""
        return self._n_changes != self._seen or bool(self._to_tell) or not self._n_reports

    def report(self) -> HeldReport | None:
        """The changes since the last report; None: no changes. An engine's first report may be empty."""
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
        """Update the counts of held blocks from the sequences held now."""
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

    def _all(self) -> Iterator[tuple[PrefixSource | KeptBeginning, int]]:
        """Sequences held in memory and on disk, each with the number of its first tokens that are held."""
        yield from self._scheduler.held_prefixes()
        n_left = MOST_STORED_BLOCKS * BLOCK_TOKENS
        for beginning in () if self._stored is None else reversed(self._stored.now()):
            n_tokens = min(n_left, beginning.n_tokens)
            n_left -= n_tokens
            yield beginning, n_tokens


def _some(keys: Iterable[int]) -> tuple[int, ...]:
    """The first `MOST_KEYS` keys."""
    return tuple(islice(keys, MOST_KEYS))

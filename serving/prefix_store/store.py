"""The prefix store of one engine: finds prompt prefixes, reads them into KV blocks, and writes computed ones
in the background.

The reader thread fills pinned blocks record by record, each checked before use; nothing is written to a block
once `cancel` has returned. The writer thread copies computed rows at low priority, and keeps a copy only if
the rows were not overwritten meanwhile (`Computed.is_there`): no slot is held, and no step waits. If the
folder fails the writer rests, and the server goes on without it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from phasewise._words import counted
from phasewise.serving.errors import ServingError
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import Placement
from phasewise.serving.prefix_store.blocks import (
    BLOCK_TOKENS,
    BadRecord,
    BlockNames,
    PrefixBlock,
    RecordShape,
    copied,
    identity_digest,
    read_record,
    tails,
    through_states,
    to_last_state,
    write_record,
)
from phasewise.serving.prefix_store.folder import PrefixFolder
from phasewise.serving.scheduling.held_prefixes import KeptBeginnings
from phasewise.serving.scheduling.prefixes import Computed

if TYPE_CHECKING:
    from phasewise.cython_kernels._native import KvMemory

MOST_JOBS = 1024
"""Most sequences that wait to be written; the one waiting longest is dropped."""
REST_S = 30.0
"""Seconds for which the writer rests after the folder failed."""
CLOSE_S = 5.0
"""Most seconds of writing after the store is closed."""
_LOW = 10

log = logging.getLogger(__name__)


LEAST_BLOCKS = 4
"""Fewest blocks that a folder must have room for: a smaller one would evict what it has just written."""


@dataclass(frozen=True, slots=True)
class PrefixSettings:
    """Settings of the folder for prompt prefixes, a path on the host that computes."""

    folder: str
    limit_bytes: int = 8 << 30


class StoreCounts(NamedTuple):
    """Counters since the start, none of which ever falls, and the folder's known bytes."""

    hits: int = 0
    tokens_restored: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    evictions: int = 0
    writes_failed: int = 0
    bytes_kept: int = 0
    refused: dict[str, int] | None = None
    """Number of refused records by reason."""


def summed(counts: Sequence[StoreCounts]) -> StoreCounts | None:
    """Sum of the counters of several stores over one folder; None: there are none."""
    if not counts:
        return None
    refused = sum((Counter(count.refused) for count in counts), Counter[str]())
    numbers = {
        name: sum(getattr(count, name) for count in counts)
        for name in StoreCounts._fields
        if name not in ("refused", "bytes_kept")
    }
    return StoreCounts(**numbers, bytes_kept=max(count.bytes_kept for count in counts), refused=dict(refused))


@dataclass(slots=True, eq=False)
class Restored:
    """A request whose block is being filled from the store, with its first `n_tokens` tokens so far."""

    request_id: str
    token_ids: tuple[int, ...]
    space: str
    placement: Placement
    rows: KvMemory
    n_tokens: int = 0
    names: list[bytes] = field(default_factory=list)
    """Names of the records read into the block."""
    is_cancelled: bool = False


class _Job(NamedTuple):
    """A sequence to write. `token_s`: seconds to compute a prompt token."""

    computed: Computed
    rows: KvMemory
    token_s: float


class PrefixStore:
    """Prefix store over a folder. `identity`: digest of all that decides the bits of keys and values."""

    def __init__(self, identity: bytes, shape: RecordShape, folder: PrefixFolder) -> None:
        self.shape = shape
        self.folder = folder
        self._naming = BlockNames(folder.key, identity)
        self._on_restored: Callable[[], None] = lambda: None
        self.kept = KeptBeginnings(lambda token_ids, space: _end(self._blocks_in_folder(token_ids, space)))
        """Sequences that this engine wrote to the folder."""
        self._changed = threading.Condition()
        """Guards the queues below."""
        self._filling = threading.Lock()
        """Held while rows of one record are written into a block."""
        self._to_read: deque[Restored] = deque()
        self._reading: dict[str, Restored] = {}
        self._restored: deque[Restored] = deque()
        self._to_write: deque[_Job] = deque(maxlen=MOST_JOBS)
        self._closing_at: float | None = None
        self._counts = Counter[str]()
        self._refused = Counter[str]()
        self._rests_until = 0.0
        self._is_busy = False
        self._threads = [
            threading.Thread(target=self._read, name="phasewise-prefix-reader", daemon=True),
            threading.Thread(target=self._write, name="phasewise-prefix-writer", daemon=True),
        ]

    @classmethod
    def open(
        cls, settings: PrefixSettings, model: str, identity: Mapping[str, Any], shape: RecordShape
    ) -> PrefixStore:
        """A store for this identity and shape, which the caller starts. ServingError: the folder cannot be
        used."""
        if settings.limit_bytes < LEAST_BLOCKS * shape.most_bytes:
            least = -(-LEAST_BLOCKS * shape.most_bytes >> 20)
            raise ServingError(
                f"a prefix cache of {settings.limit_bytes} bytes is too small: a block of this model has "
                f"{shape.most_bytes}; prefix_cache_bytes = '{least}M' is the least"
            )
        folder = PrefixFolder.open(Path(settings.folder), settings.limit_bytes)
        folder.describe_identity(identity_digest(identity), model, identity)
        return cls(identity_digest(identity), shape, folder)

    def start(self) -> None:
        """Start the threads, which run on the caller's cores."""
        for thread in self._threads:
            thread.start()

    def watch(self, on_restored: Callable[[], None]) -> None:
        """Set the function that the reader's thread calls when `take_restored` has something."""
        self._on_restored = on_restored

    def close(self) -> None:
        """End the threads, and write what still waits for at most CLOSE_S. May be called twice."""
        with self._changed:
            self._closing_at = time.monotonic() + CLOSE_S
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        until, buffer = self._closing_at, memoryview(bytearray(self.shape.rows_bytes(BLOCK_TOKENS)))
        while self._to_write and self._write_behind(
            self._to_write.popleft(), buffer, lambda: time.monotonic() > until
        ):
            pass
        self._to_write.clear()
        self._threads = []

    # ---- on the engine's thread --------------------------------------------------------------------------

    def find(self, token_ids: tuple[int, ...], space: str) -> int:
        """The number of first tokens of a prompt that are stored; at most all but the last."""
        return _end(self._blocks_in_folder(token_ids[:-1], space))

    def restore(self, restored: Restored) -> None:
        """Queue a request whose prefix is to be read into its block."""
        with self._changed:
            self._reading[restored.request_id] = restored
            self._to_read.append(restored)
            self._changed.notify_all()

    def take_restored(self) -> list[Restored]:
        """Requests whose blocks were filled, as far as records could be read, since the last call."""
        if not self._restored:
            return []
        with self._changed:
            taken = [restored for restored in self._restored if not restored.is_cancelled]
            self._restored.clear()
            for restored in taken:
                self._reading.pop(restored.request_id, None)
            return taken

    def cancel(self, request_id: str) -> None:
        """Stop filling a request's block: nothing is written to it after this call."""
        if request_id not in self._reading:
            return
        with self._changed:
            reading = self._reading.pop(request_id, None)
        if reading is not None:
            with self._filling:
                reading.is_cancelled = True

    def believe(self, restored: Restored) -> None:
        """Count a restored prefix whose check succeeded: rows computed again were equal."""
        self._counts["hits"] += 1
        self._counts["tokens"] += restored.n_tokens

    def refuse(self, restored: Restored) -> None:
        """Remove the records of a restored prefix whose check failed: a row computed again differed."""
        log.warning(
            "a prefix of %s in %s was refused: a row that was computed again is another one",
            counted(restored.n_tokens, "token"),
            self.folder.path,
        )
        self._refused["row"] += 1
        for name in restored.names:
            self.folder.remove(name)

    def keep(self, computed: Computed, rows: KvMemory, token_s: float) -> None:
        """Queue a computed sequence for writing. `token_s`: seconds to compute a prompt token."""
        with self._changed:
            self._to_write.append(_Job(computed, rows, token_s))
            self._changed.notify_all()

    @property
    def is_writing(self) -> bool:
        """True while sequences wait to be written or are being written."""
        with self._changed:
            return bool(self._to_write) or self._is_busy

    @property
    def counts(self) -> StoreCounts:
        counts, folder = self._counts, self.folder
        return StoreCounts(
            counts["hits"],
            counts["tokens"],
            counts["read"],
            counts["written"],
            folder.n_evicted,
            counts["failed"],
            folder.n_bytes,
            dict(self._refused),
        )

    # ---- on the reader's thread --------------------------------------------------------------------------

    def _read(self) -> None:
        buffer = memoryview(bytearray(self.shape.most_bytes))
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._to_read or self._closing_at is not None)
                if self._closing_at is not None:
                    return
                restored = self._to_read.popleft()
            self._fill(restored, buffer)
            with self._changed:
                self._restored.append(restored)
            self._on_restored()

    def _fill(self, restored: Restored, buffer: memoryview) -> None:
        for block in self._blocks_in_folder(restored.token_ids[:-1], restored.space):
            try:
                n_bytes = self.folder.read_into(block.name, buffer)
                held = read_record(self._naming, self.shape, block, buffer[:n_bytes])
            except FileNotFoundError:
                return  # evicted meanwhile
            except (BadRecord, OSError) as error:
                self._not_believed(block, error)
                return
            self._counts["read"] += n_bytes
            with self._filling:
                if restored.is_cancelled or self._closing_at is not None:
                    return
                self._put(restored, block, held)
            restored.names.append(block.name)
            self.folder.touch(block.name)

    def _put(self, restored: Restored, block: PrefixBlock, held: memoryview) -> None:
        """Write a record's rows or state into the request's block. States end the usable prefix."""
        if block.is_state:
            assert restored.placement.state is not None
            restored.rows.write_state(restored.placement.state, 0, held)
            restored.n_tokens = block.end
            return
        n_slots = aligned(block.n_tokens)
        n_layer, slot = self.shape.slot_bytes * n_slots, restored.placement.slot(block.begin)
        for layer in range(self.shape.n_layers):
            restored.rows.write(layer, slot, n_slots, held[layer * n_layer : (layer + 1) * n_layer])
        if not self.shape.state_bytes:
            restored.n_tokens = block.end

    def _not_believed(self, block: PrefixBlock, error: BadRecord | OSError) -> None:
        reason = error.reason if isinstance(error, BadRecord) else "unreadable"
        self._refused[reason] += 1
        log.warning("a record of a prefix was refused, and what it holds is computed: %s", error)
        self.folder.remove(block.name)

    def _blocks_in_folder(self, usable: tuple[int, ...], space: str) -> list[PrefixBlock]:
        """The blocks of a prefix that the folder has; with states, those up to the last state. Found by
        bisection: a missing earlier block is noticed by the reader."""
        folder, naming = self.folder, self._naming
        blocks = naming.whole_blocks(usable, space)
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            if folder.find(blocks[middle - 1].name):
                low = middle
            else:
                high = middle - 1
        del blocks[low:]
        if self.shape.state_bytes:
            return to_last_state(naming, blocks, usable, space, folder.find)
        n_full = low * BLOCK_TOKENS
        parent = blocks[-1].name if blocks else naming.root(space)
        for end in tails(n_full, len(usable)):
            tail = naming.after(parent, n_full, usable[n_full:end])
            if folder.find(tail.name):
                return [*blocks, tail]
        return blocks

    # ---- on the writer's thread --------------------------------------------------------------------------

    def _write(self) -> None:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)
        with suppress(OSError):
            self.folder.count()
        buffer = memoryview(bytearray(self.shape.rows_bytes(BLOCK_TOKENS)))
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.wait_for(lambda: self._to_write or self._closing_at is not None)
                if self._closing_at is not None:
                    return
                job = self._to_write.popleft()
                self._is_busy = True
            if not self._write_behind(job, buffer, lambda: self._closing_at is not None):
                self._to_write.appendleft(job)

    def _write_behind(self, job: _Job, buffer: memoryview, is_over: Callable[[], bool]) -> bool:
        """Write the blocks that the folder lacks. False: `is_over` became true before the end."""
        folder, naming = self.folder, self._naming
        if time.monotonic() < self._rests_until:
            self._counts["failed"] += 1
            return True
        computed, n_evicted = job.computed, folder.n_evicted
        try:
            for block, seconds in self._worth_keeping(computed, job.token_s):
                if is_over():
                    return False
                if folder.find(block.name):
                    folder.touch(block.name)
                    continue
                held = copied(computed, block, self.shape, job.rows, buffer)
                if held is None and block.is_state:
                    continue
                if held is None:
                    return True
                self._counts["written"] += folder.write(
                    block.name, write_record(naming, block, seconds, held)
                )
            self.kept.note(self._to_keep(computed), computed.space)
        except OSError as error:
            self._counts["failed"] += 1
            self._rests_until = time.monotonic() + REST_S
            log.warning("the prefix cache cannot be written, and rests for %.0f s: %s", REST_S, error)
        if folder.n_evicted != n_evicted:
            self.kept.look_again()
        return True

    def _to_keep(self, computed: Computed) -> tuple[int, ...]:
        """The tokens worth writing: not a prompt's last one, which is computed, except with states."""
        return computed.token_ids if self.shape.state_bytes else computed.token_ids[:-1]

    def _worth_keeping(self, computed: Computed, token_s: float) -> Iterator[tuple[PrefixBlock, float]]:
        """The blocks to write, each with the seconds that it saves. With states, a state saves the time since
        the state before it, and the blocks that lead to it are worth as much."""
        if not self.shape.state_bytes:
            for block in self._naming.all_blocks(self._to_keep(computed), computed.space):
                yield block, token_s * block.n_tokens
            return
        ends, before = [state.n_tokens for state in computed.states if state.is_there()], 0
        for block in through_states(self._naming, computed.token_ids, computed.space, ends):
            yield block, token_s * (block.end - before) if block.is_state else 0.0
            before = block.end if block.is_state else before


def _end(blocks: Sequence[PrefixBlock]) -> int:
    """Number of tokens in these blocks."""
    return blocks[-1].end if blocks else 0

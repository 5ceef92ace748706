"""Blocks of a prompt prefix: their names, and the format of their records.

A block is at most `BLOCK_TOKENS` positions, whole panels, after a known prefix. Its name is a keyed digest of
the name before it and its tokens; the first block's, of the identity and the cache space. So equal names mean
equal keys and values, and a name reveals nothing to those without the key. A record is a header, the tokens,
the rows as sent between processes (`KvMemory`), and a keyed digest of it all. For models with states the
state after a block is a record of its own, with opaque bytes in place of tokens and rows.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from phasewise._words import counted
from phasewise.serving.batch import KV_CHUNK
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import ALIGNMENT
from phasewise.serving.scheduling.prefixes import Computed

if TYPE_CHECKING:
    from phasewise.cython_kernels._native import KvMemory

BLOCK_TOKENS = KV_CHUNK
NAME_BYTES = 32
VERSION = 1

_HEADER = struct.Struct("<8sIIQQd32s32s32s")
"""Magic, version, tokens, first position, bytes of a state, seconds saved, identity, parent name, name."""
_MAGIC = b"PWPREFIX"
HEADER_BYTES = _HEADER.size
TAG_BYTES = 32
_MOST_SECONDS = 1e4

Bytes = bytes | bytearray | memoryview


class BadRecord(Exception):
    """The record cannot be used. `reason`: one word for a counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PrefixBlock(NamedTuple):
    """Positions [begin, end) of a sequence and their tokens; without tokens: the state at `end`."""

    name: bytes
    parent: bytes
    begin: int
    end: int
    token_ids: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return self.end - self.begin

    @property
    def is_state(self) -> bool:
        return self.n_tokens == 0


class RecordHead(NamedTuple):
    """The fields of a record's header that decide its worth for eviction."""

    begin: int
    n_tokens: int
    seconds: float
    """Measured time to compute the block."""
    identity: bytes
    parent: bytes
    name: bytes


@dataclass(frozen=True, slots=True)
class RecordShape:
    """Sizes of records. `state_bytes`: bytes of a state; 0: the model has none."""

    n_layers: int
    slot_bytes: int
    """Bytes of one position of one layer."""
    state_bytes: int = 0

    def rows_bytes(self, n_tokens: int) -> int:
        """Bytes of the keys and values of `n_tokens` positions in all layers, in whole panels."""
        return self.n_layers * self.slot_bytes * aligned(n_tokens)

    def record_bytes(self, n_tokens: int) -> int:
        """Bytes of a whole record; `n_tokens` 0: of a state's record."""
        held = self.rows_bytes(n_tokens) if n_tokens else self.state_bytes
        return HEADER_BYTES + 4 * n_tokens + held + TAG_BYTES

    @property
    def most_bytes(self) -> int:
        return max(self.record_bytes(BLOCK_TOKENS), self.record_bytes(0))


def identity_digest(identity: Mapping[str, Any]) -> bytes:
    """SHA-256 (32 bytes) of the components of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).digest()


@dataclass(frozen=True, slots=True)
class BlockNames:
    """Makes block names of one identity. `key`: secret key, so that names reveal nothing. `identity`: 32-byte
    digest of all that decides the bits of keys and values."""

    key: bytes
    identity: bytes

    def root(self, space: str) -> bytes:
        """Name before the first block, for prompts of one cache space."""
        return self._digest(b"root", self.identity, space.encode())

    def whole_blocks(self, token_ids: Sequence[int], space: str) -> list[PrefixBlock]:
        """The full blocks of a sequence, in order."""
        blocks: list[PrefixBlock] = []
        name = self.root(space)
        for begin in range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
            blocks.append(self.after(name, begin, tuple(token_ids[begin : begin + BLOCK_TOKENS])))
            name = blocks[-1].name
        return blocks

    def all_blocks(self, token_ids: Sequence[int], space: str) -> list[PrefixBlock]:
        """The blocks of all whole panels of a sequence: full blocks, and at most one shorter block."""
        blocks = self.whole_blocks(token_ids, space)
        n_full = len(blocks) * BLOCK_TOKENS
        for end in tails(n_full, len(token_ids))[:1]:
            parent = blocks[-1].name if blocks else self.root(space)
            blocks.append(self.after(parent, n_full, tuple(token_ids[n_full:end])))
        return blocks

    def after(self, parent: bytes, begin: int, token_ids: tuple[int, ...]) -> PrefixBlock:
        """The block of `token_ids` after the block named `parent`."""
        name = self._digest(b"block", parent, _packed(token_ids))
        return PrefixBlock(name, parent, begin, begin + len(token_ids), token_ids)

    def state_after(self, parent: bytes, end: int) -> PrefixBlock:
        """The state after the block named `parent`, which ends at `end`."""
        return PrefixBlock(self._digest(b"state", parent), parent, end, end, ())

    def _digest(self, *parts: bytes) -> bytes:
        digest = hashlib.blake2b(key=self.key, digest_size=NAME_BYTES)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little") + part)
        return digest.digest()


def tails(n_begin: int, n_tokens: int) -> list[int]:
    """Possible ends of a shorter block after position `n_begin`, the longest first."""
    last = min(n_tokens, n_begin + BLOCK_TOKENS - 1) // ALIGNMENT * ALIGNMENT
    return list(range(last, n_begin, -ALIGNMENT))


def through_states(
    naming: BlockNames, token_ids: Sequence[int], space: str, ends: Iterable[int]
) -> list[PrefixBlock]:
    """The blocks up to the states after these numbers of tokens, and the states, in order."""
    blocks: list[PrefixBlock] = []
    whole, name = naming.whole_blocks(token_ids, space), naming.root(space)
    n_whole = 0
    for end in sorted(ends):
        for block in whole[n_whole : end // BLOCK_TOKENS]:
            blocks.append(block)
            name = block.name
        n_whole = end // BLOCK_TOKENS
        before, begin = name, n_whole * BLOCK_TOKENS
        if begin < end:
            blocks.append(naming.after(name, begin, tuple(token_ids[begin:end])))
            before = blocks[-1].name
        blocks.append(naming.state_after(before, end))
    return blocks


def to_last_state(
    naming: BlockNames,
    whole: Sequence[PrefixBlock],
    token_ids: Sequence[int],
    space: str,
    is_kept: Callable[[bytes], bool],
) -> list[PrefixBlock]:
    """The blocks that lead to the last stored state of a prefix, and that state. `whole`: the prefix's stored
    full blocks. A state inside a block is searched only behind the last two full blocks."""
    for n_whole in range(len(whole), -1, -1):
        before, begin = list(whole[:n_whole]), n_whole * BLOCK_TOKENS
        name = before[-1].name if before else naming.root(space)
        last = min(len(token_ids), begin + BLOCK_TOKENS - 1) if n_whole >= len(whole) - 1 else begin
        for end in range(last, begin, -1):
            tail = naming.after(name, begin, tuple(token_ids[begin:end]))
            state = naming.state_after(tail.name, end)
            if is_kept(state.name):
                return [*before, tail, state]
        state = naming.state_after(name, begin)
        if before and is_kept(state.name):
            return [*before, state]
    return []


def write_record(naming: BlockNames, block: PrefixBlock, seconds: float, held: Bytes) -> list[Bytes]:
    """Parts of a record, in order. `held`: the block's rows, or the state."""
    header = _HEADER.pack(
        _MAGIC,
        VERSION,
        block.n_tokens,
        block.begin,
        len(held) if block.is_state else 0,
        seconds,
        naming.identity,
        block.parent,
        block.name,
    )
    parts: list[Bytes] = [header, _packed(block.token_ids), held]
    return [*parts, _tag(naming.key, parts)]


def read_record(naming: BlockNames, shape: RecordShape, block: PrefixBlock, record: memoryview) -> memoryview:
    """The rows of a block, or its state, from its record. BadRecord: the record does not match."""
    n_tokens = block.n_tokens
    if len(record) != shape.record_bytes(n_tokens):
        raise BadRecord(
            "size", f"it has {counted(len(record), 'byte')}: no record of {counted(n_tokens, 'token')}"
        )
    if not hmac.compare_digest(_tag(naming.key, [record[:-TAG_BYTES]]), bytes(record[-TAG_BYTES:])):
        raise BadRecord("digest", "its digest is not that of its bytes")
    magic, version, tokens, begin, n_state, _, identity, parent, name = _HEADER.unpack_from(record)
    if magic != _MAGIC or version != VERSION:
        raise BadRecord("version", f"a record of version {version}; this phasewise reads {VERSION}")
    told = (tokens, begin, identity, parent, name)
    if told != (n_tokens, block.begin, naming.identity, block.parent, block.name):
        raise BadRecord("name", "it is the record of another block")
    first = HEADER_BYTES + 4 * n_tokens
    if record[HEADER_BYTES:first] != _packed(block.token_ids):
        raise BadRecord("name", "it is the record of other tokens")
    if n_state != (shape.state_bytes if block.is_state else 0):
        raise BadRecord("size", f"a state of {counted(n_state, 'byte')} is not there")
    return record[first:-TAG_BYTES]


def read_head(header: bytes) -> RecordHead | None:
    """The head of a record, whose digest is not checked: only for eviction. None: it is no record."""
    if len(header) != HEADER_BYTES:
        return None
    magic, version, n_tokens, begin, n_state, seconds, identity, parent, name = _HEADER.unpack(header)
    if magic != _MAGIC or version != VERSION or n_tokens > BLOCK_TOKENS or (n_tokens == 0) != (n_state > 0):
        return None
    worth = min(max(seconds, 0.0), _MOST_SECONDS) if math.isfinite(seconds) else 0.0
    return RecordHead(begin, n_tokens, worth, identity, parent, name)


def _packed(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)


def _tag(key: bytes, parts: Sequence[Bytes]) -> bytes:
    tag = hmac.new(key, digestmod="sha256")
    for part in parts:
        tag.update(part)
    return tag.digest()


def copied(
    computed: Computed, block: PrefixBlock, shape: RecordShape, rows: KvMemory, buffer: memoryview
) -> Bytes | None:
    """Copy a block's rows into `buffer`, or its state. None: they were overwritten before or meanwhile."""
    if block.is_state:
        return _copied_state(computed, block.end, shape, rows)
    if not computed.is_there(block.begin, block.end):
        return None
    n_slots = aligned(block.n_tokens)
    n_layer, slot = shape.slot_bytes * n_slots, computed.placement.slot(block.begin)
    for layer in range(shape.n_layers):
        rows.read(layer, slot, n_slots, buffer[layer * n_layer : (layer + 1) * n_layer])
    return buffer[: shape.n_layers * n_layer] if computed.is_there(block.begin, block.end) else None


def _copied_state(computed: Computed, end: int, shape: RecordShape, rows: KvMemory) -> Bytes | None:
    copies = [state for state in computed.states if state.n_tokens == end]
    if not copies or not copies[0].is_there():
        return None
    state = bytearray(shape.state_bytes)
    rows.read_state(copies[0].place, 0, state)
    return state if copies[0].is_there() else None

"""A pack: one beginning of prompts, computed once and shipped as a file.

A header of fixed size, a description in JSON, the tokens, and the records of all blocks one after another
(`blocks`). The description says what decides the bits of the keys and values, by name, so that a pack that
cannot be used is refused by what differs. A pack comes from outside: every length is bounded before a byte is
read for it, and the size of the file must be what they make.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise._json import read_json
from phasewise.serving.errors import ServingError
from phasewise.serving.prefix_store.blocks import (
    BLOCK_TOKENS,
    BadRecord,
    BlockNames,
    PrefixBlock,
    RecordShape,
    read_record,
    tails,
    through_states,
)

_HEADER = struct.Struct("<8sIIQ32s")
"""Magic, version, bytes of the description, tokens, digest of both."""
_MAGIC = b"PWPXPACK"
_VERSION = 1
_MOST_DESCRIBED = 1 << 16
MOST_TOKENS = 1 << 20
_MOST_LAYERS = 1 << 12
_MOST_SLOT_BYTES = 1 << 24
_MOST_STATE_BYTES = 1 << 32
PACK_KEY = b"phasewise prefix pack"
"""Digests of packs are for damage: anybody may make a pack, and who loads one believes its maker."""
PACK_SPACE = ""


class PackError(ServingError):
    """A pack that cannot be used: the file, what is wrong, what to do."""


@dataclass(frozen=True, slots=True)
class PackFacts:
    """The description of a pack. identity: what decides its bits, by name."""

    model: str
    identity: Mapping[str, Any]
    shape: RecordShape
    token_ids: tuple[int, ...]

    @property
    def naming(self) -> BlockNames:
        return BlockNames(PACK_KEY, identity_digest(self.identity))

    @property
    def blocks(self) -> list[PrefixBlock]:
        """Full ones, then the rest; with states all tokens, and the state after them."""
        if self.shape.state_bytes:
            return through_states(self.naming, self.token_ids, PACK_SPACE, [len(self.token_ids)])
        return blocks_of(self.naming, self.token_ids, PACK_SPACE)


def identity_digest(identity: Mapping[str, Any]) -> bytes:
    """32 bytes for the components of an identity."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, separators=(",", ":")).encode()).digest()


def blocks_of(naming: BlockNames, token_ids: Sequence[int], space: str) -> list[PrefixBlock]:
    """The blocks of all whole panels of a sequence: full ones, and one that is not."""
    blocks = naming.whole_blocks(token_ids, space)
    n_full = len(blocks) * BLOCK_TOKENS
    for end in tails(n_full, len(token_ids))[:1]:
        parent = blocks[-1].name if blocks else naming.root(space)
        blocks.append(naming.after(parent, n_full, tuple(token_ids[n_full:end])))
    return blocks


def pack_head(facts: PackFacts) -> bytes:
    """The part of a pack before its records."""
    described = {
        "model": facts.model,
        "identity": dict(facts.identity),
        "layers": facts.shape.n_layers,
        "slot_bytes": facts.shape.slot_bytes,
    }
    if facts.shape.state_bytes:
        described["state_bytes"] = facts.shape.state_bytes
    text = json.dumps(described).encode()
    tokens = struct.pack(f"<{len(facts.token_ids)}i", *facts.token_ids)
    digest = hashlib.sha256(text + tokens).digest()
    return _HEADER.pack(_MAGIC, _VERSION, len(text), len(facts.token_ids), digest) + text + tokens


@dataclass(slots=True)
class Pack:
    """An open pack whose description is checked. Records are read, and checked, one at a time."""

    path: Path
    facts: PackFacts
    blocks: list[PrefixBlock]
    _descriptor: int
    _first: int
    """The place of the first record."""

    @classmethod
    def open(cls, path: Path) -> Pack:
        """PackError for what is no pack."""
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise PackError(f"the prefix pack {path} cannot be read: {error.strerror}") from error
        try:
            there = os.fstat(descriptor)
            if not stat.S_ISREG(there.st_mode):
                raise PackError(f"the prefix pack {path} is no regular file")
            facts, first = _facts(path, descriptor)
            blocks = facts.blocks
            n_bytes = first + sum(facts.shape.record_bytes(block.n_tokens) for block in blocks)
            if there.st_size != n_bytes:
                raise PackError(
                    f"the prefix pack {path} has {there.st_size} bytes where {n_bytes} belong: "
                    "it is cut short or damaged; copy it again"
                )
            return cls(path, facts, blocks, descriptor, first)
        except BaseException:
            os.close(descriptor)
            raise

    def refuse_other(self, identity: Mapping[str, Any], shape: RecordShape) -> None:
        """PackError unless its keys and values have the bits that this server would compute."""
        theirs = self.facts.identity
        names = sorted(name for name in {*theirs, *identity} if theirs.get(name) != identity.get(name))
        if not names and self.facts.shape == shape:
            return
        differs = names[0] if names else "shape"
        own, other = identity.get(differs), theirs.get(differs)
        told = f" ({_short(other)}; here {_short(own)})" if names else ""
        raise PackError(
            f"the prefix pack {self.path} is of another {differs.replace('_', ' ')}{told}: "
            "make it again with `phasewise prefix pack` and this server's model and options"
        )

    def check(self) -> None:
        """PackError unless every record is as it was written."""
        buffer = memoryview(bytearray(self.facts.shape.most_bytes))
        naming = self.facts.naming
        for number, block in enumerate(self.blocks):
            try:
                read_record(naming, self.facts.shape, block, buffer[: self.read_into(number, buffer)])
            except (BadRecord, OSError) as error:
                raise PackError(f"the prefix pack {self.path} is damaged, block {number}: {error}") from error

    def n_stored(self, token_ids: Sequence[int]) -> int:
        """The number of these tokens that its first blocks hold; with states all of its own, or none."""
        end = 0
        if self.facts.shape.state_bytes:
            own = self.facts.token_ids
            return len(own) if tuple(token_ids[: len(own)]) == own else 0
        for block in self.blocks:
            if tuple(token_ids[block.begin : block.end]) != block.token_ids:
                break
            end = block.end
        return end

    def read_into(self, number: int, buffer: memoryview) -> int:
        """Bytes of a record, which `buffer` has then. OSError."""
        offset = self._first + sum(
            self.facts.shape.record_bytes(block.n_tokens) for block in self.blocks[:number]
        )
        n_bytes = self.facts.shape.record_bytes(self.blocks[number].n_tokens)
        return os.preadv(self._descriptor, [buffer[:n_bytes]], offset)

    def close(self) -> None:
        os.close(self._descriptor)


def _facts(path: Path, descriptor: int) -> tuple[PackFacts, int]:
    header = os.pread(descriptor, _HEADER.size, 0)
    if len(header) != _HEADER.size or not header.startswith(_MAGIC):
        raise PackError(f"{path} is no prefix pack: `phasewise prefix pack` makes one")
    _, version, n_described, n_tokens, digest = _HEADER.unpack(header)
    if version != _VERSION:
        raise PackError(f"the prefix pack {path} is of version {version}; this phasewise reads {_VERSION}")
    if n_described > _MOST_DESCRIBED or not 0 < n_tokens <= MOST_TOKENS:
        raise PackError(f"the prefix pack {path} is damaged: lengths of {n_described} and {n_tokens}")
    body = os.pread(descriptor, n_described + 4 * n_tokens, _HEADER.size)
    if len(body) != n_described + 4 * n_tokens or hashlib.sha256(body).digest() != digest:
        raise PackError(f"the prefix pack {path} is damaged: its description is not as it was written")
    try:
        told = read_json(body[:n_described])
        shape = RecordShape(told["layers"], told["slot_bytes"], told.get("state_bytes", 0))
        model, identity = told["model"], told["identity"]
        is_good = (
            isinstance(model, str)
            and isinstance(identity, dict)
            and type(shape.n_layers) is int
            and type(shape.slot_bytes) is int
            and 0 < shape.n_layers <= _MOST_LAYERS
            and 0 < shape.slot_bytes <= _MOST_SLOT_BYTES
            and type(shape.state_bytes) is int
            and 0 <= shape.state_bytes <= _MOST_STATE_BYTES
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        is_good = False
    if not is_good:
        raise PackError(f"the prefix pack {path} is damaged: its description cannot be understood")
    token_ids = struct.unpack(f"<{n_tokens}i", body[n_described:])
    return PackFacts(model, identity, shape, token_ids), _HEADER.size + len(body)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 32 else f"{text[:12]}..."

"""A folder of records that servers of one host share, each a file that appears whole or not at all.

A file has its block's name and mode 0600, in a folder of mode 0700. It is written under another name and then
moved, so that a killed server leaves only a file that nobody reads and a later server removes. Nothing is
locked. The folder's key, on which names and digests depend, is a file of its own.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from phasewise._words import counted
from phasewise.serving.errors import ServingError
from phasewise.serving.prefix_store.blocks import HEADER_BYTES, NAME_BYTES, Bytes, RecordHead, read_head

KEY_FILE = "key"
KEY_BYTES = 32
SUFFIX = ".kv"
IDENTITY_SUFFIX = ".json"
_BESIDE = ".new-"
_LEFT_BEHIND_S = 600.0
"""Seconds after which an unfinished file is considered abandoned."""
_SCANS = 32
"""The folder is scanned again after this fraction of its limit was written, since other servers write too."""

_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


@dataclass(slots=True)
class PrefixFolder:
    """One server's view of a folder. `find` is thread-safe; `write` and `make_room` are for one thread."""

    path: Path
    key: bytes
    limit_bytes: int
    n_evicted: int = 0
    _n_bytes: int | None = None
    """Bytes at the last scan plus those written since; None: never scanned."""
    _n_unseen: int = 0
    _heads: dict[bytes, RecordHead] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, limit_bytes: int) -> PrefixFolder:
        """Open a folder, or create it. ServingError, in one line: this user cannot use the folder."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            there = path.stat()
            if there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ServingError(
                    f"the prefix cache {path} may be written by others: chmod go-w it, or name another folder"
                )
            return cls(path, _key_of(path), limit_bytes)
        except OSError as error:
            raise ServingError(f"the prefix cache {path} cannot be used: {error.strerror}") from error

    @property
    def n_bytes(self) -> int:
        """Bytes of the folder's records, as far as this server knows."""
        return self._n_bytes or 0

    def find(self, name: bytes) -> bool:
        """True if the folder has a readable record of this name."""
        return os.access(self._place(name), os.R_OK)

    def read_into(self, name: bytes, buffer: memoryview) -> int:
        """Read a record into `buffer`; return its size, or one more than the buffer's. Raises OSError."""
        descriptor = os.open(self._place(name), _READ)
        with os.fdopen(descriptor, "rb", buffering=0) as file:
            there = os.fstat(descriptor)
            if not stat.S_ISREG(there.st_mode) or there.st_size > len(buffer):
                return len(buffer) + 1
            n_read = 0
            while n_read < there.st_size:
                n_more = file.readinto(buffer[n_read : there.st_size])
                if not n_more:
                    break
                n_read += n_more
            return n_read

    def write(self, name: bytes, parts: Sequence[Bytes]) -> int:
        """Write a record, and return its size. OSError: there is no room; nothing is left behind."""
        n_bytes = sum(map(len, parts))
        self.make_room(n_bytes)
        beside = self.path / f"{_BESIDE}{os.getpid()}-{secrets.token_hex(4)}"
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb", buffering=0) as file:
                for part in parts:
                    view = memoryview(part)
                    while view:
                        view = view[file.write(view) :]
            os.rename(beside, self._place(name))
        except OSError:
            with suppress(OSError):
                os.unlink(beside)
            raise
        self._n_bytes = self.n_bytes + n_bytes
        self._n_unseen += n_bytes
        return n_bytes

    def touch(self, name: bytes) -> None:
        """Mark a record as just used."""
        with suppress(OSError):
            os.utime(self._place(name), follow_symlinks=False)

    def count(self) -> None:
        """Scan the folder, so that `n_bytes` is known before anything is written."""
        self._n_bytes, self._n_unseen = sum(block.n_bytes for _, block in self.kept()), 0

    def remove(self, name: bytes) -> None:
        """Remove a record that cannot be used."""
        with suppress(OSError):
            os.unlink(self._place(name))

    def make_room(self, n_bytes: int) -> None:
        """Evict the records of least worth until `n_bytes` more fit. OSError: `n_bytes` exceeds the limit."""
        step = self.limit_bytes // _SCANS
        if self._n_bytes is None or self._n_unseen >= step or self._n_bytes + n_bytes > self.limit_bytes:
            blocks = dict(self.kept())
            self._n_bytes, self._n_unseen = sum(block.n_bytes for block in blocks.values()), 0
            if self._n_bytes + n_bytes > self.limit_bytes:
                # A little more than now, so that not every block looks through the folder.
                for name in to_leave(blocks, max(0, self.limit_bytes - max(n_bytes, 2 * step))):
                    self.remove(name)
                    self._n_bytes -= blocks[name].n_bytes
                    self.n_evicted += 1
        if n_bytes > self.limit_bytes:
            raise OSError(errno.ENOSPC, f"a block of {counted(n_bytes, 'byte')} exceeds the folder's limit")

    def kept(self) -> Iterator[tuple[bytes, KeptBlock]]:
        """Yield the folder's blocks by name, and remove abandoned files."""
        now, heads = time.time(), dict[bytes, RecordHead]()
        for entry in os.scandir(self.path):
            with suppress(OSError):
                there = entry.stat(follow_symlinks=False)
                if entry.name.startswith(_BESIDE) and now - there.st_mtime > _LEFT_BEHIND_S:
                    os.unlink(entry.path)
                name = _name_of(entry.name)
                if name is None or not stat.S_ISREG(there.st_mode):
                    continue
                head = self._heads.get(name) or self.head(name)
                if head is None:
                    yield name, KeptBlock(b"", 1, there.st_size, 0.0, now - there.st_mtime)
                    continue
                heads[name] = head
                yield (
                    name,
                    KeptBlock(head.parent, head.begin, there.st_size, head.seconds, now - there.st_mtime),
                )
        self._heads = heads

    def head(self, name: bytes) -> RecordHead | None:
        """The unchecked head of a record; None: it is no record. Raises OSError."""
        descriptor = os.open(self._place(name), _READ)
        try:
            return read_head(os.read(descriptor, HEADER_BYTES))
        finally:
            os.close(descriptor)

    def describe_identity(self, digest: bytes, model: str, identity: Mapping[str, Any]) -> None:
        """Write the components of an identity to a file, for listings of the folder."""
        place = self.path / f"{digest.hex()}{IDENTITY_SUFFIX}"
        with suppress(OSError):
            if not os.path.lexists(place):
                _write_once(place, json.dumps({"model": model, "identity": dict(identity)}).encode())

    def _place(self, name: bytes) -> str:
        return f"{self.path}/{name.hex()}{SUFFIX}"


def _name_of(file_name: str) -> bytes | None:
    if len(file_name) != 2 * NAME_BYTES + len(SUFFIX) or not file_name.endswith(SUFFIX):
        return None
    try:
        return bytes.fromhex(file_name[: -len(SUFFIX)])
    except ValueError:
        return None


def _key_of(path: Path) -> bytes:
    """The folder's key, created by the first server. ServingError: the key file is damaged."""
    place = path / KEY_FILE
    for _ in range(2):
        try:
            descriptor = os.open(place, _READ)
        except FileNotFoundError:
            _write_once(place, secrets.token_bytes(KEY_BYTES))
            continue
        with os.fdopen(descriptor, "rb") as file:
            key = file.read(KEY_BYTES + 1)
        if len(key) == KEY_BYTES:
            return key
        break
    raise ServingError(f"{place} is no key of a prefix cache: remove the folder's files, or name another one")


def _write_once(place: Path, content: bytes) -> None:
    """Create a file with all its content at once; an existing file, even a broken link, stays."""
    beside = place.with_name(f"{_BESIDE}{os.getpid()}-{secrets.token_hex(4)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        with suppress(FileExistsError):
            os.link(beside, place)
    finally:
        os.unlink(beside)


YOUNG_S = 600.0
"""Age in seconds at which a block is worth half of a new one."""


class KeptBlock(NamedTuple):
    """A block in a folder. `parent`: name before it. `seconds`: time to compute it. `age_s`: time since
    use."""

    parent: bytes
    begin: int
    n_bytes: int
    seconds: float
    age_s: float


def worth(block: KeptBlock) -> float:
    """Computing seconds saved per byte, reduced by age."""
    return block.seconds / max(1, block.n_bytes) / (1 + max(0.0, block.age_s) / YOUNG_S)


def order_of_leaving(blocks: Mapping[bytes, KeptBlock]) -> list[bytes]:
    """Block names in order of eviction: orphans (their prefix is gone) first, then by least worth, each block
    after the blocks that follow it."""
    deepest_first = sorted(blocks, key=lambda name: blocks[name].begin, reverse=True)
    value = {name: worth(block) for name, block in blocks.items()}
    for name in deepest_first:
        parent = blocks[name].parent
        if parent in value:
            value[parent] = max(value[parent], value[name])
    reached: dict[bytes, bool] = {}
    for name in reversed(deepest_first):
        block = blocks[name]
        reached[name] = block.begin == 0 or reached.get(block.parent, False)
    return sorted(deepest_first, key=lambda name: (reached[name], value[name], -blocks[name].begin))


def to_leave(blocks: Mapping[bytes, KeptBlock], most_bytes: int) -> Iterable[bytes]:
    """Names of the blocks to evict so that the others have at most `most_bytes`."""
    n_bytes = sum(block.n_bytes for block in blocks.values())
    for name in order_of_leaving(blocks):
        if n_bytes <= most_bytes:
            return
        n_bytes -= blocks[name].n_bytes
        yield name

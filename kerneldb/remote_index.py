"""The index of a remote: its bundles of rows, each of one kind of core.

    phasewise-index.json        {"file": "phasewise remote", "version": 1, "serial": 7, "bundles": [...]}
    phasewise-index.json.sig    a signature over the index, by `ssh-keygen -Y sign -n phasewise`
    bundles/SHA256.jsonl        what `db export` prints of one kind of core, named by its content

A bundle's name follows from its digest, so that no text of an index becomes a path. Indexes merge by the
union of their bundles; the serial only grows, by which an older index that is shown again is noticed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from phasewise._json import read_json
from phasewise._words import counted
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.fields import Characters, CheckedRecord, Line, Whole

NAME = "phasewise-index.json"
FILE = "phasewise remote"
VERSION = 1

MAX_INDEX_BYTES = 4 * 2**20
MAX_BUNDLES = 10_000
MAX_BUNDLE_BYTES = 512 * 2**20
MAX_SERIAL = 2**53


class RemoteError(KernelDbError):
    """A remote cannot be read, written or trusted. Nothing that it holds has changed the database."""


@dataclass(frozen=True, order=True)
class Bundle(CheckedRecord):
    """A file of rows of one kind of core in a remote, named by the digest of its bytes."""

    core: Line
    """Core signature."""
    sha256: Annotated[str, Characters(64, "64 hex digits", re.compile(r"[0-9a-f]{64}"))]
    bytes: Annotated[int, Whole(0, MAX_BUNDLE_BYTES)]
    rows: Annotated[int, Whole(0, MAX_SERIAL)]

    @property
    def path(self) -> str:
        """The bundle's path relative to the remote."""
        return f"bundles/{self.sha256}.jsonl"


@dataclass(frozen=True)
class RemoteIndex:
    """The bundles of a remote."""

    serial: int = 0
    bundles: tuple[Bundle, ...] = ()

    def with_bundles(self, more: Iterable[Bundle]) -> RemoteIndex:
        """Make the next index, with these bundles too; the same one if none is new. RemoteError: too many."""
        bundles = tuple(sorted({*self.bundles, *more}))
        if bundles != self.bundles and (self.serial >= MAX_SERIAL or len(bundles) > MAX_BUNDLES):
            raise RemoteError(
                f"the index has serial {self.serial} and {counted(len(bundles), 'bundle')}, and can have no "
                f"more than serial {MAX_SERIAL} and {MAX_BUNDLES} bundles: begin a new remote"
            )
        return self if bundles == self.bundles else RemoteIndex(self.serial + 1, bundles)

    def to_bytes(self) -> bytes:
        """Write the index as the bytes of a file."""
        fields = {"file": FILE, "version": VERSION, "serial": self.serial}
        bundles = [asdict(bundle) for bundle in self.bundles]
        return (json.dumps({**fields, "bundles": bundles}, indent=1, sort_keys=True) + "\n").encode()


def read_index(content: bytes, name: str) -> RemoteIndex:
    """Read an index that `to_bytes` wrote. RemoteError, in one line, for anything else."""
    try:
        return _index(read_json(content.decode("utf-8")))
    except (ValueError, KeyError, TypeError) as error:
        raise RemoteError(f"the index of {name} is not one: {error!s:.120}") from None


def _index(fields: Any) -> RemoteIndex:
    if not isinstance(fields, dict) or fields.get("file") != FILE:
        raise ValueError("it is of another kind")
    if fields.get("version") != VERSION:
        raise ValueError(f"it has version {fields.get('version')!r:.20}, this phasewise reads {VERSION}")
    bundles = fields["bundles"]
    if not isinstance(bundles, list) or len(bundles) > MAX_BUNDLES:
        raise ValueError(f"its bundles must be a list of at most {MAX_BUNDLES}")
    Whole(0, MAX_SERIAL)("serial", fields["serial"])
    return RemoteIndex(fields["serial"], tuple(sorted(Bundle(**bundle) for bundle in bundles)))

"""`phasewise db push` and `pull`: what was learnt, to and from a remote, in bundles by kind of core.

What is pulled is believed only with a pinned digest or a signature of the index. All of it is checked before
the first row is added; then rows are imported, unverified, as from a file.
"""

from __future__ import annotations

import getpass
import hashlib
import json
import math
import os
import platform
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from phasewise._files import read_file, write_file
from phasewise._places import user_folder
from phasewise._words import counted
from phasewise.kerneldb.fields import flattened
from phasewise.kerneldb.location import locate
from phasewise.kerneldb.portable import Taken, export_lines, groups_of, import_rows, read_export
from phasewise.kerneldb.records import StoredRow
from phasewise.kerneldb.remote_index import (
    MAX_BUNDLE_BYTES,
    MAX_INDEX_BYTES,
    NAME,
    Bundle,
    RemoteError,
    RemoteIndex,
    read_index,
)
from phasewise.kerneldb.store import Store, open_store
from phasewise.workflows.database.remote_files import (
    MAX_SIGNATURE_BYTES,
    SIGNATURE_SUFFIX,
    RemoteFiles,
    check_index,
    sign,
)
from phasewise.workflows.database.settings import Leaving, Trust
from phasewise.workflows.database.sharing import (
    SharedPlans,
    core_signature_here,
    existing_store,
    no_rows_of,
    wanted_machines,
)
from phasewise.workflows.report import Report, silent

LEAST_CHARS = 3
"""Least length of a private word: a shorter one is part of too many other words."""


def words_of_owner() -> frozenset[str]:
    """Words that identify the user or the host (names, the home folder), in lower case."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = ""
    home = os.environ.get("HOME") or ""
    host = platform.node()
    words = {user, home, Path(home).name, host, host.split(".")[0], os.environ.get("HOSTNAME") or ""}
    return frozenset(word.lower() for word in words if len(word) >= LEAST_CHARS)


class PrivateWords:
    """Filter that leaves out rows whose names hold a word of their owner, or a path."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._words = words_of_owner()
        self._left_out = 0

    def without(self, group: Iterable[StoredRow]) -> list[StoredRow]:
        """The rows that may leave this host."""
        rows = [*group]
        kept = [row for row in rows if not self._is_private(row)]
        self._left_out += len(rows) - len(kept)
        return kept

    def _is_private(self, row: StoredRow) -> bool:
        fields = flattened(row)
        return any(
            fields[name].startswith(("/", "~", "."))
            or any(word in fields[name].lower() for word in self._words)
            for name in row.kind.private
        )

    def close(self) -> None:
        """Report the number of rows that were left out."""
        if self._left_out:
            self._report(
                f"{counted(self._left_out, 'row')} stayed here: the name of a model or kernel holds this "
                "host's, this user's or a path"
            )


@dataclass(frozen=True)
class Preview:
    """The bundles that would leave, and every field of their rows, e.g. `plan.model_key`."""

    bundles: list[Bundle]
    fields: tuple[str, ...]


@dataclass
class Pushed:
    """The bundles of a push, those `new` to the remote, and the remote's index from now on."""

    bundles: list[Bundle] = field(default_factory=list)
    new: list[Bundle] = field(default_factory=list)
    index: RemoteIndex = field(default_factory=RemoteIndex)
    digest: str = ""
    """The digest of the index, which a puller pins."""


def push(
    remote: str,
    db: str | None,
    leaving: Leaving,
    trust: Trust,
    key: Path | None = None,
    report: Report = silent,
) -> Pushed:
    """Add bundles of this database to a remote, and to its index; sign the index with `key`.

    Raises RemoteError, also for an existing index that is not trusted: who signs vouches for the whole index.
    """
    files = RemoteFiles(remote)
    with TemporaryDirectory(prefix="phasewise-") as folder, existing_store(db, report) as store:
        bundles = _write_bundles(store, leaving, Path(folder), report)
        with files.locked(report):
            before = _read_index(files, trust if key or trust.is_given else None) or RemoteIndex()
            index = before.with_bundles(bundles)
            pushed = Pushed(bundles, [bundle for bundle in bundles if bundle not in before.bundles], index)
            for bundle in before.bundles:
                if not files.has(bundle):
                    repair = (
                        "it is put there anew" if bundle in bundles else "push it from where its rows are"
                    )
                    report(f"{files.name}/{bundle.path} is missing or damaged: {repair}")
            for bundle in bundles:
                files.add(bundle, Path(folder) / bundle.sha256)
            content = index.to_bytes()
            pushed.digest = hashlib.sha256(content).hexdigest()
            if key is not None:
                files.write(f"{NAME}{SIGNATURE_SUFFIX}", sign(content, key))
            files.write(NAME, content)
    return pushed


def preview(
    db: str | None, leaving: Leaving, write: Callable[[Iterator[str]], None], report: Report
) -> Preview:
    """Write every line that `push` would send, bundle by bundle."""
    fields: set[str] = set()
    with TemporaryDirectory(prefix="phasewise-") as folder, existing_store(db, report) as store:
        bundles = _write_bundles(store, leaving, Path(folder), report)
        for bundle in bundles:
            with (Path(folder) / bundle.sha256).open(encoding="ascii") as lines:
                write(_noting_fields(lines, fields))
    return Preview(bundles, tuple(sorted(fields)))


def _noting_fields(lines: Iterable[str], fields: set[str]) -> Iterator[str]:
    for line in lines:
        fields.update(_paths_in(json.loads(line)))
        yield line


def _paths_in(value: object, path: str = "") -> Iterator[str]:
    """Paths of the fields of a JSON value: a nested field after a dot, a list's items under one path."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _paths_in(inner, f"{path}.{name}" if path else name)
    else:
        yield path


def _write_bundles(store: Store, leaving: Leaving, folder: Path, report: Report) -> list[Bundle]:
    """Write one file for each kind of core, named by the file's digest."""
    wanted, shared, private = wanted_machines(leaving), SharedPlans(report), PrivateWords(report)
    cores = sorted({machine.core_sig for machine in store.machines() if wanted(machine)})
    if leaving.signature and not cores:
        raise RemoteError(no_rows_of(leaving.signature))
    bundles = []
    for core in cores:
        groups = groups_of(
            store,
            lambda machine, core=core: machine.core_sig == core and wanted(machine),  # type: ignore[misc]
            leaving.also,
            shared.as_shared,
        )
        bundle = _write_bundle(core, export_lines(map(private.without, groups)), folder)
        if bundle.rows:
            bundles.append(bundle)
    shared.close()
    private.close()
    return bundles


def _write_bundle(core: str, lines: Iterator[str], folder: Path) -> Bundle:
    digest, n_bytes, n_lines, file = hashlib.sha256(), 0, 0, folder / "begun"
    with file.open("wb") as stream:
        for line in lines:
            content = line.encode()
            digest.update(content)
            n_bytes, n_lines = n_bytes + len(content), n_lines + 1
            stream.write(content)
            if n_bytes > MAX_BUNDLE_BYTES:
                raise RemoteError(
                    f"the rows of {core:.60} are more than the {MAX_BUNDLE_BYTES >> 20} MiB of a bundle: "
                    "`phasewise db gc --keep 16` makes them fewer"
                )
    file.rename(folder / digest.hexdigest())
    return Bundle(core, digest.hexdigest(), n_bytes, n_lines - 2)


@dataclass(frozen=True)
class Pulled:
    """The bundles of a pull, and the outcome of their rows."""

    bundles: tuple[Bundle, ...]
    taken: Taken


@dataclass(frozen=True)
class PullLimits:
    """Limits of a pull: seconds of reading, and bytes of one bundle; larger bundles are left out.

    only_news: stop after the index where this database has pulled the same index before.
    """

    seconds: float = math.inf
    bundle_bytes: int = MAX_BUNDLE_BYTES
    only_news: bool = False


NO_LIMITS = PullLimits()


def pull(
    remote: str,
    db: str | None,
    trust: Trust,
    *,
    every_core: bool = False,
    limits: PullLimits = NO_LIMITS,
    report: Report = silent,
) -> Pulled:
    """Import a remote's bundles for this host's cores, or for all. RemoteError, before anything is added."""
    if not trust.is_given:
        raise RemoteError(
            "a remote is believed by --digest, which its owner tells you, or by --allowed-signers, a file of "
            "their public keys"
        )
    files = RemoteFiles(remote, limits.seconds)
    index = _read_index(files, trust)
    if index is None:
        raise RemoteError(f"{files.name} is no remote: it has no {NAME}")
    seen = _Serials(files.identity)
    if trust.digest is None:
        seen.check(index.serial, files.name)
    core = None if every_core else core_signature_here()
    bundles = tuple(bundle for bundle in index.bundles if core in (None, bundle.core))
    into = _Serials(f"{files.identity} {locate(db).name} {hashlib.sha256(index.to_bytes()).hexdigest()}")
    if limits.only_news and into.is_known() and not locate(db).is_absent:
        return Pulled((), Taken(0, 0))
    if left := [bundle for bundle in bundles if bundle.bytes > limits.bundle_bytes]:
        report(
            f"{files.name}: {counted(len(left), 'bundle')} left to `phasewise db pull`: too large for a start"
        )
        bundles = tuple(bundle for bundle in bundles if bundle not in left)
    with TemporaryDirectory(prefix="phasewise-") as folder:
        fetched = [Path(folder) / bundle.sha256 for bundle in bundles]
        for bundle, file in zip(bundles, fetched, strict=True):
            with file.open("w+b") as stream:
                files.fetch(bundle, stream)
                _check_rows(bundle, stream, files.name)
        taken = _import(fetched, db, files.name, report) if fetched else Taken(0, 0)
    seen.keep(index.serial, report)
    if limits.only_news:
        into.keep(index.serial, report)
    return Pulled(bundles, taken)


def _import(fetched: Sequence[Path], db: str | None, name: str, report: Report) -> Taken:
    read = added = 0
    with open_store(db, report) as store:
        for file in fetched:
            with file.open("rb") as stream:
                taken = import_rows(store, _rows(stream, name))
            read, added = read + taken.read, added + taken.added
    return Taken(read, added)


def _check_rows(bundle: Bundle, stream: BinaryIO, name: str) -> None:
    """Raise RemoteError unless all rows are of the bundle's cores: it is taken whole or not at all."""
    count = 0
    for row in _rows(stream, name):
        count += 1
        if row.origin.machine.core_sig != bundle.core:
            raise RemoteError(f"{name}/{bundle.path} holds a row of other cores than its index says")
    if count != bundle.rows:
        raise RemoteError(f"{name}/{bundle.path} holds {counted(count, 'row')}, its index says {bundle.rows}")


def _rows(stream: BinaryIO, name: str) -> Iterator[StoredRow]:
    def refuse(line: int, reason: str) -> None:
        raise RemoteError(f"{name}: line {line} of a bundle is refused: {reason}")

    stream.seek(0)
    return read_export(stream, name, refuse)


def _read_index(files: RemoteFiles, trust: Trust | None) -> RemoteIndex | None:
    """Read the remote's index; None where there is none yet. Raises RemoteError for an untrusted index."""
    content = files.read(NAME, MAX_INDEX_BYTES)
    if content is None:
        return None
    if trust is not None:
        if not trust.is_given:
            raise RemoteError(
                f"{files.name} has an index already: who signs it vouches for all of it, so name whom to "
                "believe with --allowed-signers or --digest"
            )
        signature = files.read(f"{NAME}{SIGNATURE_SUFFIX}", MAX_SIGNATURE_BYTES)
        check_index(trust, content, signature, files.name)
    return read_index(content, files.name)


MOST_SERIALS_BYTES = 4 << 20


class _Serials:
    """The newest pulled serial of each remote: an older index is a replay, or a remote gone back."""

    def __init__(self, remote: str) -> None:
        self._file = user_folder("state") / "remotes.json"
        self._key = hashlib.sha256(remote.encode()).hexdigest()[:32]

    def is_known(self) -> bool:
        """True if this index was pulled before."""
        return self._key in self._read()

    def check(self, serial: int, name: str) -> None:
        newest = self._read()[self._key]
        if serial < newest:
            raise RemoteError(
                f"the index of {name} is older (serial {serial}) than one that was pulled before ({newest}): "
                "it is shown again, or was set back; --digest takes it as it is"
            )

    def keep(self, serial: int, report: Report) -> None:
        serials = self._read()
        serials[self._key] = max(serial, serials[self._key])
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_file(self._file, json.dumps(serials, indent=1))
        except OSError as error:
            report(f"{self._file} cannot be written ({error.strerror}): an older index would not be noticed")

    def _read(self) -> defaultdict[str, int]:
        try:
            stored = json.loads(read_file(self._file, MOST_SERIALS_BYTES))
        except (OSError, ValueError):
            stored = {}
        entries = stored.items() if isinstance(stored, dict) else ()
        return defaultdict(
            int, {key: serial for key, serial in entries if type(serial) is int and re.fullmatch(r"\w+", key)}
        )

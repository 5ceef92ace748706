"""Files and batches of a server, in SQLite: what a restart must not lose. Every call is a transaction.

Promises: a line is answered once, whatever ends the process and when. A file or batch is seen by its owner
alone. All files and answers together take no more than `most_bytes`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasewise._files import open_regular
from phasewise._words import counted
from phasewise.serving.batches.lines import Json
from phasewise.serving.errors import ServingError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s INTEGER NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, n_bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, created_s INTEGER NOT NULL, is_over INTEGER NOT NULL,
    input_id TEXT NOT NULL, fields TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    batch_id TEXT NOT NULL, number INTEGER NOT NULL, is_good INTEGER NOT NULL, line BLOB NOT NULL,
    PRIMARY KEY (batch_id, number)) WITHOUT ROWID;
"""
_VERSION = 1
CANCELLABLE = ("validating", "in_progress")
"""Statuses of a batch that has not ended and is not being cancelled."""
UNFINISHED = (*CANCELLABLE, "cancelling")
MOST_UNFINISHED = 64
"""Batches of one owner that are not over."""


class BatchStoreError(ServingError):
    """The store cannot do it. `kind`: which answer that is: `missing`, `in_use`, `full`, `too_many`,
    `elsewhere`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class StoredFile:
    """A file of an owner's."""

    id: str
    created_s: int
    filename: str
    purpose: str
    n_bytes: int


@dataclass(frozen=True)
class StoredBatch:
    """A batch. `fields`: its JSON object, as OpenAI's API shows it, but for `request_counts`."""

    id: str
    owner: str
    input_id: str
    fields: Json
    n_completed: int
    n_failed: int


class BatchStore:
    """One folder: `batches.sqlite` and a file for each file. Any thread may call, one at a time gets in."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """BatchStoreError where another process uses the folder; OSError where it cannot be used."""
        self._folder = folder
        self._most_bytes = most_bytes
        self._lock = threading.RLock()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._claim = open_regular(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._claim)
            message = f"another server has its batches in {folder}: give each server its own --batch-dir"
            raise BatchStoreError("elsewhere", message) from None
        path = folder / "batches.sqlite"
        os.close(open_regular(path, os.O_RDWR | os.O_CREAT, 0o600))
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            self.close()
            raise BatchStoreError("elsewhere", f"{path} is of another version of phasewise")
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version={_VERSION}")
        self._drop_strays()
        self._n_taken = self._count_bytes()

    def close(self) -> None:
        with self._lock:
            self._db.close()
            os.close(self._claim)

    # ---- files -------------------------------------------------------------------------------------------

    def begin_file(self) -> NewFile:
        """A file to be written piece by piece; then `keep_file` it, or `drop` it. OSError: it cannot be."""
        return NewFile(self)

    def keep_file(self, file: NewFile, owner: str, filename: str, purpose: str) -> StoredFile:
        """It is whole. BatchStoreError where the disk is full; it is dropped then."""
        try:
            file.finish()
            with self._transaction() as db:
                row = (file.id, owner, int(time.time()), filename, purpose, file.n_bytes)
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        except BaseException:
            file.drop()
            raise
        return self.file(owner, file.id)

    def file(self, owner: str, file_id: str) -> StoredFile:
        """BatchStoreError where there is none of this owner's."""
        files = self._files("id = ? AND owner = ?", (file_id, owner))
        if not files:
            raise BatchStoreError("missing", f"there is no file {file_id[:80]!r} of yours here")
        return files[0]

    def files(self, owner: str) -> list[StoredFile]:
        """The newest first."""
        return self._files("owner = ?", (owner,))

    def path_of(self, file_id: str) -> Path:
        return self._folder / file_id

    def delete_file(self, owner: str, file_id: str) -> None:
        """BatchStoreError where there is none, or a batch that is not over reads it."""
        with self._transaction() as db:
            file = self.file(owner, file_id)
            query = "SELECT id FROM batches WHERE input_id = ? AND NOT is_over"
            for (batch_id,) in db.execute(query, (file_id,)):
                raise BatchStoreError("in_use", f"batch {batch_id} reads this file: cancel the batch first")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path_of(file_id).unlink(missing_ok=True)
        self.give_back(file.n_bytes)

    def take(self, n_bytes: int) -> None:
        """Count so many bytes more. BatchStoreError where they are too many."""
        with self._lock:
            if self._n_taken + n_bytes > self._most_bytes:
                raise BatchStoreError(
                    "full",
                    f"files of batches take {self._n_taken} of {self._most_bytes} bytes, and {n_bytes} more "
                    "do not fit: delete files, or raise --batch-bytes",
                )
            self._n_taken += n_bytes

    def give_back(self, n_bytes: int) -> None:
        """Count so many bytes less."""
        with self._lock:
            self._n_taken -= n_bytes

    def _count_bytes(self) -> int:
        """The bytes of all files, and of answers that are in no file yet."""
        with self._transaction() as db:
            (files,) = db.execute("SELECT coalesce(sum(n_bytes), 0) FROM files").fetchone()
            (answers,) = db.execute("SELECT coalesce(sum(length(line)), 0) FROM answers").fetchone()
        return int(files) + int(answers)

    # ---- batches -----------------------------------------------------------------------------------------

    def add_batch(self, owner: str, input_id: str, fields: Json) -> StoredBatch:
        """BatchStoreError where its input is no file of this owner's, or too many are not over."""
        batch_id = f"batch_{secrets.token_hex(12)}"
        with self._transaction() as db:
            self.file(owner, input_id)
            query = "SELECT count(*) FROM batches WHERE owner = ? AND NOT is_over"
            (n_unfinished,) = db.execute(query, (owner,)).fetchone()
            if n_unfinished >= MOST_UNFINISHED:
                message = f"{counted(n_unfinished, 'batch')} of yours are not over, and no more may be"
                raise BatchStoreError("too_many", message)
            fields = {"id": batch_id, **fields}
            row = (batch_id, owner, int(time.time()), False, input_id, json.dumps(fields))
            db.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", row)
        return StoredBatch(batch_id, owner, input_id, fields, 0, 0)

    def batch(self, owner: str, batch_id: str) -> StoredBatch:
        """BatchStoreError where there is none of this owner's."""
        batches = self._batches("id = ? AND owner = ?", (batch_id, owner))
        if not batches:
            raise BatchStoreError("missing", f"there is no batch {batch_id[:80]!r} of yours here")
        return batches[0]

    def batches(self, owner: str) -> list[StoredBatch]:
        """The newest first."""
        return self._batches("owner = ?", (owner,))

    def unfinished(self) -> list[StoredBatch]:
        """Those that are not over, of all owners, the oldest first."""
        return self._batches("NOT is_over", ())[::-1]

    def update(
        self, batch: StoredBatch, *, among: tuple[str, ...], is_over: bool = False, **changed: Any
    ) -> StoredBatch:
        """Change fields of a batch whose status is one of `among` by now; else leave it. Returns it as it is.

        A cancel and the runner change a status at the same time: neither may undo the other's.
        is_over: nothing of it changes any more.
        """
        with self._transaction() as db:
            now = self.batch(batch.owner, batch.id)
            if now.fields["status"] not in among:
                return now
            fields = {**now.fields, **changed}
            query = "UPDATE batches SET fields = ?, is_over = is_over OR ? WHERE id = ?"
            db.execute(query, (json.dumps(fields), is_over, batch.id))
            return self.batch(batch.owner, batch.id)

    def answer(self, batch_id: str, number: int, line: bytes, *, is_good: bool) -> None:
        """Keep the answer to a line. The first one stays; of a batch that is over by now, none is kept."""
        self.take(len(line))
        query = (
            "INSERT OR IGNORE INTO answers SELECT ?, ?, ?, ? "
            "WHERE EXISTS (SELECT 1 FROM batches WHERE id = ? AND NOT is_over)"
        )
        try:
            with self._transaction() as db:
                n_new = db.execute(query, (batch_id, number, is_good, line, batch_id)).rowcount
        except BaseException:
            n_new = 0
            raise
        finally:
            if not n_new:
                self.give_back(len(line))

    def answered(self, batch_id: str) -> set[int]:
        """The numbers of the lines that have an answer."""
        with self._transaction() as db:
            rows = db.execute("SELECT number FROM answers WHERE batch_id = ?", (batch_id,))
            return {number for (number,) in rows}

    def finish(self, batch: StoredBatch, status: str) -> StoredBatch:
        """Write the answers to an output and an error file, in the order of the lines, and end the batch.

        status: of its end; a batch that is being cancelled ends as `cancelled` whatever it is.
        A process that ends in the middle leaves files that nobody knows, which the next start removes.
        """
        files: list[NewFile] = []
        try:
            return self._finish(batch, status, files)
        except BaseException:
            for file in files:
                file.drop()
            raise

    def _finish(self, batch: StoredBatch, status: str, files: list[NewFile]) -> StoredBatch:
        """`finish`. files: gets those that it begins."""
        counts = {"n_completed": batch.n_completed, "n_failed": batch.n_failed}
        ids: dict[str, str | None] = {}
        now_s = int(time.time())
        with self._transaction() as db:
            if self.batch(batch.owner, batch.id).fields["status"] == "cancelling":
                status = "cancelled"
            for is_good, name in ((True, "output_file_id"), (False, "error_file_id")):
                query = "SELECT line FROM answers WHERE batch_id = ? AND is_good = ? ORDER BY number"
                rows = db.execute(query, (batch.id, is_good)).fetchall()
                counts["n_completed" if is_good else "n_failed"] = len(rows)
                ids[name] = None
                if not rows:
                    continue
                file = NewFile(self, is_counted=False)
                files.append(file)
                for (line,) in rows:
                    file.write(line + b"\n")
                file.finish()
                ids[name] = file.id
                filename = f"{batch.id}_{name.removesuffix('_file_id')}.jsonl"
                row = (file.id, batch.owner, int(time.time()), filename, "batch_output", file.n_bytes)
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
            db.execute("DELETE FROM answers WHERE batch_id = ?", (batch.id,))
            instants = {"finalizing_at": now_s, f"{status}_at": now_s}
            ended = self.update(
                batch, among=UNFINISHED, is_over=True, status=status, **instants, **ids, **counts
            )
        self.give_back(-counts["n_completed"] - counts["n_failed"])  # the ends of lines are taken too
        return ended

    # ---- the database ------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Transactions within one another are one. BatchStoreError where the disk is full."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                self._db.rollback()
                if isinstance(error, sqlite3.OperationalError | OSError):
                    raise disk_refuses(self._folder, error) from None
                raise

    def _files(self, where: str, values: tuple[str, ...]) -> list[StoredFile]:
        query = (
            f"SELECT id, created_s, filename, purpose, n_bytes FROM files WHERE {where} ORDER BY rowid DESC"
        )
        with self._transaction() as db:
            return [StoredFile(*row) for row in db.execute(query, values)]

    def _batches(self, where: str, values: tuple[str, ...]) -> list[StoredBatch]:
        query = f"SELECT id, owner, input_id, fields FROM batches WHERE {where} ORDER BY rowid DESC"
        with self._transaction() as db:
            return [self._batch_of(*row) for row in db.execute(query, values).fetchall()]

    def _batch_of(self, batch_id: str, owner: str, input_id: str, written: str) -> StoredBatch:
        fields = json.loads(written)
        if "n_completed" in fields:
            counts = fields.pop("n_completed"), fields.pop("n_failed")
        else:
            query = "SELECT coalesce(sum(is_good), 0), count(*) FROM answers WHERE batch_id = ?"
            n_good, n_all = self._db.execute(query, (batch_id,)).fetchone()
            counts = n_good, n_all - n_good
        return StoredBatch(batch_id, owner, input_id, fields, *counts)

    def _drop_strays(self) -> None:
        """Files whose writing was cut off."""
        with self._transaction() as db:
            file_ids = {name for (name,) in db.execute("SELECT id FROM files")}
        for path in self._folder.glob("file-*"):
            if path.name not in file_ids:
                path.unlink(missing_ok=True)


def disk_refuses(folder: Path, error: Exception) -> BatchStoreError:
    """The error of a disk that is full, or has gone."""
    return BatchStoreError("full", f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}")


class NewFile:
    """A file on its way to the disk. OSError and BatchStoreError where there is no room.

    It may be dropped while another thread writes a piece.
    """

    def __init__(self, store: BatchStore, *, is_counted: bool = True) -> None:
        """is_counted: False for answers that are counted already."""
        self.id = f"file-{secrets.token_hex(12)}"
        self.n_bytes = self.n_taken = 0
        self._store = store
        self._is_counted = is_counted
        self._lock = threading.Lock()
        self._path = store.path_of(self.id)
        self._file = open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb")  # noqa: SIM115

    def write(self, part: bytes) -> None:
        with self._lock:
            if self._file.closed:
                return
            if self._is_counted:
                self._store.take(len(part))
                self.n_taken += len(part)
            self.n_bytes += len(part)
            try:
                self._file.write(part)
            except OSError as error:
                raise disk_refuses(self._path.parent, error) from None

    def finish(self) -> None:
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        except OSError as error:
            raise disk_refuses(self._path.parent, error) from None

    def drop(self) -> None:
        with self._lock:
            with suppress(OSError):  # what is still to be written does not fit
                self._file.close()
            self._path.unlink(missing_ok=True)
            self._store.give_back(self.n_taken)

"""Files and batches of a server in SQLite: what must survive a restart. Every call is one transaction. Each
line of a batch is answered once, even if the process is killed. Only its owner sees a file or batch. All
files, answers and rows take at most `most_bytes`. Memory holds at most a page of a list and one answer of an
ending batch."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
import sys
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
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner);
CREATE INDEX IF NOT EXISTS batches_of_owner ON batches (owner);
CREATE INDEX IF NOT EXISTS batches_by_age ON batches (is_over, created_s);
CREATE INDEX IF NOT EXISTS answers_by_kind ON answers (batch_id, is_good);
"""
_VERSION = 1
CANCELLABLE = ("validating", "in_progress")
"""Statuses of a batch that has neither ended nor is being cancelled."""
UNFINISHED = (*CANCELLABLE, "cancelling")
MOST_UNFINISHED = 64
"""Most unfinished batches of one owner."""
KEPT_DAYS = 60
"""Days from a batch's creation to the deletion of its record: its window is at most 30 days."""
ENDS_AS = "ends_as"
"""Field of a batch whose answers are being written to files: the status it will end with."""
_ROW_BYTES = 512
"""Bytes that a row counts beside its texts."""
_BATCH_BYTES = f"length(fields) + {_ROW_BYTES}"
_DROPPED_AT_ONCE = 500
_FILE_COLUMNS = "id, created_s, filename, purpose, n_bytes"


class BatchStoreError(ServingError):
    """The store refuses a call. `kind` names the reason: `missing`, `in_use`, `full`, `too_many`,
    `unfinished`, `stopped`, `elsewhere`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True)
class StoredFile:
    """A file of one owner."""

    id: str
    created_s: int
    filename: str
    purpose: str
    n_bytes: int


@dataclass(frozen=True)
class Page:
    """Part of a list: `limit` entries after the entry with id `after`, newest first unless ascending."""

    limit: int
    after: str | None = None
    is_ascending: bool = False


@dataclass(frozen=True)
class StoredBatch:
    """A batch. `fields`: OpenAI's JSON object without `request_counts`, with the runner's own fields."""

    id: str
    owner: str
    input_id: str
    fields: Json
    n_completed: int
    n_failed: int


class BatchStore:
    """Store in one folder: `batches.sqlite`, and one file on disk for each file. Thread-safe."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        """Raises BatchStoreError if another process uses the folder, OSError if the folder cannot be used."""
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
        self._n_taken = 0
        self._drop_strays()
        self._n_taken = self._count_bytes()
        self._expire()

    def close(self) -> None:
        with self._lock:
            self._db.close()
            os.close(self._claim)

    # ---- files -------------------------------------------------------------------------------------------

    def begin_file(self) -> NewFile:
        """A new file to write in pieces, then `keep_file` or `drop`. OSError: it cannot be created."""
        return NewFile(self)

    def keep_file(self, file: NewFile, owner: str, filename: str, purpose: str) -> StoredFile:
        """Add a written file to the store. BatchStoreError: disk or store is full; the file is dropped."""
        try:
            file.finish()
            with self._transaction() as db:
                self.take(_ROW_BYTES)
                row = (file.id, owner, int(time.time()), filename, purpose, file.n_bytes)
                db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
        except BaseException:
            file.drop()
            raise
        return self.file(owner, file.id)

    def file(self, owner: str, file_id: str) -> StoredFile:
        """A file by id. BatchStoreError: the owner has none of this id."""
        query = f"SELECT {_FILE_COLUMNS} FROM files WHERE id = ? AND owner = ?"
        with self._transaction() as db:
            row = db.execute(query, (file_id, owner)).fetchone()
        if row is None:
            raise BatchStoreError("missing", f"there is no file {file_id[:80]!r} of yours here")
        return StoredFile(*row)

    def files(self, owner: str, page: Page, purpose: str | None = None) -> tuple[list[StoredFile], bool]:
        """A page of the owner's files, and if more follow. BatchStoreError: `after` is not among them."""
        further, values = ("", (owner,)) if purpose is None else (" AND purpose = ?", (owner, purpose))
        with self._transaction():
            rows, has_more = self._page("files", _FILE_COLUMNS, further, values, page)
        return [StoredFile(*row) for row in rows], has_more

    def path_of(self, file_id: str) -> Path:
        return self._folder / file_id

    def delete_file(self, owner: str, file_id: str) -> None:
        """Delete a file. BatchStoreError: the owner has none of this id, or an unfinished batch reads it."""
        with self._transaction() as db:
            file = self.file(owner, file_id)
            query = "SELECT id FROM batches WHERE input_id = ? AND is_over = 0"
            for (batch_id,) in db.execute(query, (file_id,)):
                raise BatchStoreError("in_use", f"batch {batch_id} reads this file: cancel the batch first")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))
        self.path_of(file_id).unlink(missing_ok=True)
        self.give_back(file.n_bytes + _ROW_BYTES)

    def take(self, n_bytes: int) -> None:
        """Count `n_bytes` as used. BatchStoreError: the store would exceed its limit."""
        with self._lock:
            if self._n_taken + n_bytes > self._most_bytes:
                raise BatchStoreError(
                    "full",
                    f"files and batches take {self._n_taken} of {self._most_bytes} bytes, and {n_bytes} more "
                    "do not fit: delete some, or raise --batch-bytes",
                )
            self._n_taken += n_bytes

    def give_back(self, n_bytes: int) -> None:
        """Count `n_bytes` as no longer used."""
        with self._lock:
            self._n_taken -= n_bytes

    def _count_bytes(self) -> int:
        """Bytes of all files, all rows, and all answers that are in no file yet."""
        with self._transaction() as db:
            (files,) = db.execute(f"SELECT coalesce(sum(n_bytes + {_ROW_BYTES}), 0) FROM files").fetchone()
            (batches,) = db.execute(f"SELECT coalesce(sum({_BATCH_BYTES}), 0) FROM batches").fetchone()
            (answers,) = db.execute("SELECT coalesce(sum(length(line)), 0) FROM answers").fetchone()
        return int(files) + int(batches) + int(answers)

    # ---- batches -----------------------------------------------------------------------------------------

    def add_batch(self, owner: str, input_id: str, fields: Json) -> StoredBatch:
        """Create a batch. BatchStoreError: no file `input_id`, or too many unfinished batches."""
        batch_id = f"batch_{secrets.token_hex(12)}"
        self._expire()
        with self._transaction() as db:
            self.file(owner, input_id)
            query = "SELECT count(*) FROM batches WHERE owner = ? AND is_over = 0"
            (n_unfinished,) = db.execute(query, (owner,)).fetchone()
            if n_unfinished >= MOST_UNFINISHED:
                message = f"{counted(n_unfinished, 'batch')} of yours are not over, and no more may be"
                raise BatchStoreError("too_many", message)
            fields = {"id": batch_id, **fields}
            told = json.dumps(fields)
            self.take(len(told) + _ROW_BYTES)
            row = (batch_id, owner, int(time.time()), False, input_id, told)
            db.execute("INSERT INTO batches VALUES (?, ?, ?, ?, ?, ?)", row)
        return StoredBatch(batch_id, owner, input_id, fields, 0, 0)

    def batch(self, owner: str, batch_id: str) -> StoredBatch:
        """A batch by id. BatchStoreError: the owner has none of this id."""
        batches = self._batches("id = ? AND owner = ?", (batch_id, owner))
        if not batches:
            raise BatchStoreError("missing", f"there is no batch {batch_id[:80]!r} of yours here")
        return batches[0]

    def batches(self, owner: str, page: Page) -> tuple[list[StoredBatch], bool]:
        """A page of the owner's batches, and if more follow. BatchStoreError: `after` is not among them."""
        with self._transaction():
            rows, has_more = self._page("batches", "id, owner, input_id, fields", "", (owner,), page)
            return [self._batch_of(*row) for row in rows], has_more

    def delete_batch(self, owner: str, batch_id: str) -> None:
        """Delete a batch's record, not its files. BatchStoreError: not the owner's, or unfinished."""
        with self._transaction() as db:
            self.batch(owner, batch_id)
            if not self._drop_batches("id = ? AND is_over = 1", (batch_id,), db):
                raise BatchStoreError("unfinished", f"batch {batch_id} is not over: cancel it first")

    def _expire(self) -> None:
        """Delete records of finished batches older than KEPT_DAYS."""
        with self._transaction() as db:
            began_before_s = int(time.time()) - KEPT_DAYS * 86_400
            self._drop_batches("is_over = 1 AND created_s < ?", (began_before_s,), db)

    def _drop_batches(self, where: str, values: tuple[str | int, ...], db: sqlite3.Connection) -> int:
        """Delete batch records within a transaction, and return their number."""
        query = f"SELECT count(*), coalesce(sum({_BATCH_BYTES}), 0) FROM batches WHERE {where}"
        n_batches, n_bytes = db.execute(query, values).fetchone()
        if n_batches:
            db.execute(f"DELETE FROM batches WHERE {where}", values)
            self.give_back(int(n_bytes))
        return int(n_batches)

    def unfinished(self) -> list[StoredBatch]:
        """Unfinished batches of all owners, the oldest first."""
        return self._batches("is_over = 0", ())[::-1]

    def update(
        self, batch: StoredBatch, *, among: tuple[str, ...], is_over: bool = False, **changed: Any
    ) -> StoredBatch:
        """Change fields of a batch if its present status is one of `among`, and return the batch as it is
        then. A cancel and the runner may change a status at the same time: neither undoes the other's.
        `is_over`: True: nothing of the batch changes any more."""
        with self._transaction() as db:
            now = self.batch(batch.owner, batch.id)
            if now.fields["status"] not in among:
                return now
            self._change(batch.id, changed, db)
            db.execute("UPDATE batches SET is_over = is_over OR ? WHERE id = ?", (is_over, batch.id))
            return self.batch(batch.owner, batch.id)

    def _change(self, batch_id: str, changed: Json, db: sqlite3.Connection) -> None:
        """Change fields of a batch within a transaction, even over the limit of bytes: a batch must end."""
        (before,) = db.execute("SELECT fields FROM batches WHERE id = ?", (batch_id,)).fetchone()
        after = json.dumps({**json.loads(before), **changed})
        db.execute("UPDATE batches SET fields = ? WHERE id = ?", (after, batch_id))
        self.give_back(len(before) - len(after))

    def answer(self, batch_id: str, number: int, line: bytes, *, is_good: bool) -> None:
        """Store the answer to a line. An earlier answer to the line stays; answers to a batch that is over,
        or whose files are being written, are dropped."""
        self.take(len(line))
        query = (
            "INSERT OR IGNORE INTO answers SELECT ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM batches "
            f"WHERE id = ? AND is_over = 0 AND json_extract(fields, '$.{ENDS_AS}') IS NULL)"
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
        """Numbers of the batch's lines that have an answer."""
        with self._transaction() as db:
            rows = db.execute("SELECT number FROM answers WHERE batch_id = ?", (batch_id,))
            return {number for (number,) in rows}

    def finish(
        self, batch: StoredBatch, status: str, stop: threading.Event | None = None, **changed: Any
    ) -> StoredBatch:
        """Write the answers to an output file and an error file, in line order, and end the batch. `status`:
        final status; a batch being cancelled ends as `cancelled`, and an end begun before keeps its status.
        `stop`: event set by another thread; BatchStoreError once it is. If the process ends meanwhile the
        next start removes the partial files."""
        stop = stop or threading.Event()
        with self._transaction() as db:
            now = self.batch(batch.owner, batch.id)
            if now.fields["status"] not in (*UNFINISHED, "finalizing"):
                return now
            is_cancelled = now.fields["status"] == "cancelling"
            status = now.fields.get(ENDS_AS) or ("cancelled" if is_cancelled else status)
            begun: Json = {ENDS_AS: status, "finalizing_at": int(time.time()), **changed}
            self._change(batch.id, begun if is_cancelled else {**begun, "status": "finalizing"}, db)
        files = {True: NewFile(self, is_counted=False), False: NewFile(self, is_counted=False)}
        try:
            counts = self._write_answers(batch.id, files, stop)
            for is_good, n_lines in counts.items():
                if n_lines:
                    files[is_good].finish()
                else:
                    files[is_good].drop()
            ended = self._end(now, status, files, counts)
        except BaseException:
            for file in files.values():
                file.drop()
            raise
        self._drop_answers(batch.id, stop)
        return ended

    def _write_answers(
        self, batch_id: str, files: dict[bool, NewFile], stop: threading.Event
    ) -> dict[bool, int]:
        """Write each answer to the file of its kind; return the numbers of lines. Other calls may
        interleave."""
        counts, number = {True: 0, False: 0}, -1
        query = (
            "SELECT number, is_good, line FROM answers WHERE batch_id = ? AND number > ? "
            "ORDER BY number LIMIT 1"
        )
        while True:
            with self._transaction() as db:
                row = db.execute(query, (batch_id, number)).fetchone()
            if row is None:
                return counts
            if stop.is_set():
                raise BatchStoreError("stopped", f"batch {batch_id} ends at the next start")
            number, is_good = row[0], bool(row[1])
            files[is_good].write(row[2] + b"\n")
            counts[is_good] += 1

    def _end(
        self, batch: StoredBatch, status: str, files: dict[bool, NewFile], counts: dict[bool, int]
    ) -> StoredBatch:
        """Add the finished files to the store, and mark the batch as over."""
        now_s = int(time.time())
        ids: dict[str, str | None] = {}
        with self._transaction() as db:
            for is_good, name in ((True, "output"), (False, "error")):
                file = files[is_good]
                ids[f"{name}_file_id"] = file.id if counts[is_good] else None
                if counts[is_good]:
                    filename = f"{batch.id}_{name}.jsonl"
                    row = (file.id, batch.owner, now_s, filename, "batch_output", file.n_bytes)
                    db.execute("INSERT INTO files VALUES (?, ?, ?, ?, ?, ?)", row)
                    # Their bytes are taken already, the ends of their lines apart.
                    self.give_back(-counts[is_good] - _ROW_BYTES)
            told = {"status": status, f"{status}_at": now_s, **ids}
            n_lines = {"n_completed": counts[True], "n_failed": counts[False]}
            self._change(batch.id, {**told, **n_lines}, db)
            db.execute("UPDATE batches SET is_over = 1 WHERE id = ?", (batch.id,))
            return self.batch(batch.owner, batch.id)

    def _drop_answers(self, batch_id: str, stop: threading.Event) -> None:
        """Delete the stored answers of a finished batch, which are in its files now."""
        query = (
            "DELETE FROM answers WHERE batch_id = ?1 AND number IN "
            f"(SELECT number FROM answers WHERE batch_id = ?1 LIMIT {_DROPPED_AT_ONCE})"
        )
        n_dropped = _DROPPED_AT_ONCE
        while n_dropped == _DROPPED_AT_ONCE and not stop.is_set():
            with self._transaction() as db:
                n_dropped = db.execute(query, (batch_id,)).rowcount

    # ---- the database ------------------------------------------------------------------------------------

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a transaction; a nested one joins the outer one. BatchStoreError: the disk is full."""
        with self._lock:
            if self._db.in_transaction:
                yield self._db
                return
            n_taken = self._n_taken
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException as error:
                self._db.rollback()
                self._n_taken = n_taken
                if isinstance(error, sqlite3.OperationalError | OSError):
                    raise disk_refuses(self._folder, error) from None
                raise

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

    def _page(
        self, table: str, columns: str, further: str, values: tuple[str, ...], page: Page
    ) -> tuple[list[Any], bool]:
        """A page of an owner's rows, and if more follow. `values`: the owner, then values of `further`."""
        order, sign, since = ("ASC", ">", 0) if page.is_ascending else ("DESC", "<", sys.maxsize)
        if page.after is not None:
            query = f"SELECT rowid FROM {table} WHERE owner = ?{further} AND id = ?"
            row = self._db.execute(query, (*values, page.after)).fetchone()
            if row is None:
                raise BatchStoreError("missing", f"there is nothing called {page.after[:80]!r} to list after")
            (since,) = row
        query = (
            f"SELECT {columns} FROM {table} WHERE owner = ?{further} AND rowid {sign} ? "
            f"ORDER BY rowid {order} LIMIT ?"
        )
        rows = self._db.execute(query, (*values, since, page.limit + 1)).fetchall()
        return rows[: page.limit], len(rows) > page.limit

    def _drop_strays(self) -> None:
        """Delete files whose writing was cut off, and answers that are in files already."""
        with self._transaction() as db:
            query = (
                "SELECT DISTINCT batch_id FROM answers "
                "WHERE batch_id NOT IN (SELECT id FROM batches WHERE is_over = 0)"
            )
            for (batch_id,) in db.execute(query).fetchall():
                self._drop_answers(batch_id, threading.Event())
            file_ids = {name for (name,) in db.execute("SELECT id FROM files")}
        for path in self._folder.glob("file-*"):
            if path.name not in file_ids:
                path.unlink(missing_ok=True)


def disk_refuses(folder: Path, error: Exception) -> BatchStoreError:
    """The error for a disk that is full or gone."""
    return BatchStoreError("full", f"{folder} cannot be written: {getattr(error, 'strerror', None) or error}")


class NewFile:
    """A file being written. OSError or BatchStoreError: no room. `drop` is allowed during `write`."""

    def __init__(self, store: BatchStore, *, is_counted: bool = True) -> None:
        """`is_counted`: False for answers whose bytes the store has counted already."""
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

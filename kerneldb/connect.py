"""Connections to a database: SQLite's files and their traps, engines, and one clear line per failure."""

from __future__ import annotations

import json
import os
import secrets
import sqlite3
import stat
import textwrap
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, ExceptionContext, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool, StaticPool

from phasewise._files import open_file
from phasewise.kerneldb.errors import (
    BusyDatabaseError,
    DamagedDatabaseError,
    DatabaseFullError,
    DatabaseNameError,
    ForeignDatabaseError,
    KernelDbError,
    ReadOnlyDatabaseError,
)
from phasewise.kerneldb.location import MEMORY_URL, Location

BUSY_TIMEOUT_S = 15.0
"""Seconds to wait for another writer's lock, which is held for milliseconds, or seconds to upgrade."""

LEAST_ROOM_BYTES = 64 << 10
"""Free bytes that opening a database for writing needs: SQLite adds 32 KiB and a log."""

_SQLITE_MAGIC = b"SQLite format 3\0"
COPY_SUFFIX = ".before-upgrade"
_OWN_FILES = ("-journal", "-wal", "-shm")
_WRITES = "sqlite_writes"
_STEPS = "sqlite_steps"

MAX_STATEMENT_STEPS = 4_000_000_000
"""Most steps of SQLite's virtual machine, which takes some 100 million a second, for one statement: enough to
group and sort ten million rows. A damaged or hostile file can ask for any number of steps."""
MOST_VALUE_BYTES = 64 << 20
"""Bytes of the largest row or text that SQLite may make; its own limit is a gigabyte."""
_STEPS_BETWEEN_LOOKS = 1_000_000

STATEMENT_TIMEOUT_S = 120
"""Seconds that a PostgreSQL server works on one statement at most, unless the database's URL sets a limit."""
_NO_JIT = "-c jit=off"
"""Option by which PostgreSQL compiles no query: `queries.keys_by_seeking` took 5 s to compile, 1 to run."""
_CONNECT_TIMEOUT_S = 15
_LIBPQ_DRIVERS = ("postgresql", "postgresql+psycopg", "postgresql+psycopg2")

_QUERY_CANCELED = "57014"
"""SQLSTATE of PostgreSQL for a statement that was cancelled or ran out of time."""

MAX_REASON_CHARS = 160
"""Most characters of a driver's message that are shown: SQLite may quote the whole definition of a table."""


def _json_or_none(text: str) -> Any:
    """Parse JSON; a damaged value becomes None, which no record accepts: its row is refused by name."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError, TypeError):
        return None


_JSON: dict[str, Any] = {"json_deserializer": _json_or_none}


def engine_for(location: Location, read_only: bool) -> Engine:
    """Make an engine for the location; it opens nothing yet."""
    if location.file is None:
        return (
            _memory_engine()
            if location.url == MEMORY_URL
            else _server_engine(location.url or "", location.name)
        )
    uri = f"file:{quote(str(location.file))}{_read_only_parameters(location.file) if read_only else ''}"

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            uri, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )

    engine = create_engine("sqlite://", creator=connect, poolclass=QueuePool, **_JSON)
    return _with_sqlite_habits(engine)


def _read_only_parameters(file: Path) -> str:
    """URL parameters of a read-only connection: a file without a write-ahead log has no writer, and is opened
    as immutable so that SQLite need not create files beside it."""
    log_exists = os.path.lexists(f"{file}-wal")
    return "?mode=ro" if log_exists else "?mode=ro&immutable=1"


def _memory_engine() -> Engine:
    """Make an engine that keeps one connection: the in-memory database ends with its connection."""
    options = {"isolation_level": None, "check_same_thread": False}
    engine = create_engine(MEMORY_URL, poolclass=StaticPool, connect_args=options, **_JSON)
    return _with_sqlite_habits(engine)


def server_limits(url: str) -> dict[str, Any]:
    """Arguments for a PostgreSQL driver that bound the time of a statement and of an attempt to connect, and
    turn compiling of queries off. Options in the URL itself win. Empty for other kinds of servers and
    drivers."""
    parsed = make_url(url)
    if parsed.drivername not in _LIBPQ_DRIVERS:
        return {}
    asked = parsed.query.get("options", "")
    options = [asked] if isinstance(asked, str) else list(asked)
    limits: dict[str, Any] = {
        "options": " ".join([f"-c statement_timeout={STATEMENT_TIMEOUT_S}s", _NO_JIT, *options]).strip()
    }
    if "connect_timeout" not in parsed.query:
        limits["connect_timeout"] = _CONNECT_TIMEOUT_S
    return limits


def _server_engine(url: str, name: str) -> Engine:
    try:
        return create_engine(url, **_JSON, pool_pre_ping=True, connect_args=server_limits(url))
    except NoSuchModuleError as error:
        raise DatabaseNameError(f"database {name} is of an unknown kind: {error}") from None
    except ArgumentError:
        raise DatabaseNameError(
            f"{name} is not a database URL: write e.g. postgresql://user@host/name"
        ) from None
    except ImportError as error:
        raise DatabaseNameError(
            f"database {name} needs a driver (for PostgreSQL: pip install 'phasewise[postgres]'): {error}"
        ) from None


def _with_sqlite_habits(engine: Engine) -> Engine:
    """Set up each connection: foreign keys, real transactions, non-UTF-8 text left to the row's checks."""

    @event.listens_for(engine, "connect")
    def set_up(dbapi: Any, _: ConnectionPoolEntry) -> None:
        dbapi.text_factory = _decode
        for pragma in ("foreign_keys = ON", "synchronous = NORMAL", "trusted_schema = OFF"):
            dbapi.execute(f"PRAGMA {pragma}")
        dbapi.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_VALUE_BYTES)

    _limit_steps(engine)

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


class _StepLimit:
    """Progress handler that ends a statement after too many steps. SQLite calls it, so that Python sees
    Ctrl-C during a long statement."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self) -> int:
        self.steps += _STEPS_BETWEEN_LOOKS
        return int(self.steps > MAX_STATEMENT_STEPS)


def _limit_steps(engine: Engine) -> None:
    @event.listens_for(engine, "connect")
    def set_up(dbapi: sqlite3.Connection, entry: ConnectionPoolEntry) -> None:
        entry.info[_STEPS] = limit = _StepLimit()
        dbapi.set_progress_handler(limit, _STEPS_BETWEEN_LOOKS)

    @event.listens_for(engine, "before_cursor_execute")
    def begin(connection: Connection, *_: object) -> None:
        connection.info[_STEPS].steps = 0

    @event.listens_for(engine, "handle_error")
    def tell_apart(context: ExceptionContext) -> None:
        """Raise KeyboardInterrupt where Ctrl-C, and not the limit of steps, interrupted a statement."""
        error = context.original_exception
        if getattr(error, "sqlite_errorname", "") != "SQLITE_INTERRUPT" or context.connection is None:
            return
        if context.connection.info[_STEPS].steps <= MAX_STATEMENT_STEPS:
            raise KeyboardInterrupt from error


def for_writing(engine: Engine) -> Engine:
    """Copy the engine with transactions that begin with SQLite's write lock: they wait, never deadlock."""
    return engine.execution_options(**{_WRITES: True})


def use_write_ahead_log(engine: Engine) -> None:
    """Switch the file to a write-ahead log, by which readers and one writer work side by side. The file
    stores the switch, so it is needed once; it needs the file for itself and does not wait for it, hence the
    loop. A file system without shared memory keeps the rollback journal, which is slower and as safe."""
    deadline = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        with engine.connect() as connection:
            dbapi = connection.connection.driver_connection
            assert isinstance(dbapi, sqlite3.Connection)
            try:
                dbapi.execute("PRAGMA journal_mode = WAL").fetchall()
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorname != "SQLITE_BUSY" or time.monotonic() > deadline:
                    raise
        time.sleep(0.02)


def check_file(file: Path) -> bool:
    """True if an existing database file can be written as well as read; ForeignDatabaseError for what cannot
    be a database. The content of a file that this process has open is not read: closing any descriptor of a
    file drops all POSIX locks of the process on it, SQLite's too, and another process may then remove the
    write-ahead log."""
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ForeignDatabaseError(f"database {file} is not a file")
        check_beside(file)
        head = b"" if _is_open_here(status) else _head(file)
    except OSError as error:
        raise KernelDbError(f"database {file} cannot be read: {error.strerror}") from None
    if head and head != _SQLITE_MAGIC:
        raise ForeignDatabaseError(f"{file} is not a database; name another with --db, or move it away")
    return os.access(file, os.W_OK) and os.access(file.parent, os.W_OK | os.X_OK)


def check_beside(file: Path) -> None:
    """Refuse a pipe or a device in place of one of SQLite's own files, which SQLite would wait for."""
    for ending in _OWN_FILES:
        own = Path(f"{file}{ending}")
        if os.path.lexists(own) and not own.is_file():
            raise ForeignDatabaseError(f"database {file} cannot be opened: {own} is not a file; move it away")


def has_room(file: Path) -> bool:
    """True if the file system has room for opening the database file for writing, or does not say."""
    try:
        system = os.statvfs(file)
    except OSError:
        return True
    return system.f_bavail * system.f_frsize >= LEAST_ROOM_BYTES


def _head(file: Path) -> bytes:
    with open_file(file) as stream:
        return stream.read(len(_SQLITE_MAGIC))


def _is_open_here(file: os.stat_result) -> bool:
    """True if this process has the file open; False where the system does not list descriptors."""
    try:
        descriptors = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return False
    for descriptor in descriptors:
        try:
            if os.path.samestat(os.fstat(descriptor), file):
                return True
        except OSError:  # the one that listed them
            continue
    return False


def make_room(location: Location) -> None:
    """Check that a new database file can be created. Only the default file's directory is created too."""
    assert location.file is not None
    folder = location.file.parent
    try:
        if location.is_default:
            folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KernelDbError(
            f"the directory {folder} for the database cannot be created ({error.strerror}): "
            "name another database with --db"
        ) from None
    check_beside(location.file)
    if not os.path.isdir(folder):
        raise KernelDbError(f"database {location.file} cannot be created: there is no directory {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ReadOnlyDatabaseError(f"database {location.file} cannot be created: {folder} is not writable")


def copy_beside(file: Path) -> Path:
    """Copy what is committed into one file beside the database, of the same mode, replacing the copy that the
    last upgrade made. The caller holds the write lock. KernelDbError where the copy cannot be made."""
    copy = file.with_name(file.name + COPY_SUFFIX)
    temporary = file.with_name(f".phasewise-{secrets.token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        _copy_whole(file, temporary)
        there = os.stat(file)
        if (there.st_uid, there.st_gid) != (os.geteuid(), os.getegid()):
            with suppress(PermissionError):
                os.chown(temporary, there.st_uid, there.st_gid)
        os.chmod(temporary, there.st_mode & 0o777)
        os.replace(temporary, copy)
    except (OSError, sqlite3.Error) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise KernelDbError(
            f"database {file} has to be upgraded, and cannot be copied to {copy} before ({why}): "
            "make room, or name another database with --db"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
    return copy


def _copy_whole(source: Path, target: Path) -> None:
    """Copy by SQLite, which knows what of the write-ahead log is committed, and sync the copy to disk."""
    uri = f"{source.as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def clear_errors(name: str) -> Iterator[None]:
    """Turn what a driver raises about the database `name` into a KernelDbError of one line."""
    try:
        yield
    except DBAPIError as error:
        raise _translate(name, error.orig) from error
    except sqlite3.Error as error:
        raise _translate(name, error) from error
    except UnicodeDecodeError as error:
        # Python could not even read SQLite's message, which quotes the damaged schema.
        raise DamagedDatabaseError(_damaged(name, "its schema is not text")) from error


def _damaged(name: str, text: str) -> str:
    return f"database {name} is damaged ({text}): restore a copy, or move it away"


def _translate(name: str, error: BaseException | None) -> KernelDbError:
    code = getattr(error, "sqlite_errorname", "")
    text = textwrap.shorten(str(error), MAX_REASON_CHARS, placeholder=" ...")
    if code.startswith("SQLITE_NOTADB"):
        return ForeignDatabaseError(f"{name} is not a database; name another with --db, or move it away")
    if code.startswith("SQLITE_CORRUPT") or "no such table" in text or "no such column" in text:
        return DamagedDatabaseError(_damaged(name, text))
    if code.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return BusyDatabaseError(
            f"database {name} has been locked by another process for {BUSY_TIMEOUT_S:.0f} s"
        )
    if code.startswith("SQLITE_FULL"):
        return DatabaseFullError(
            f"database {name} cannot grow: the disk is full; nothing of this write was kept"
        )
    if code.startswith("SQLITE_CANTOPEN"):
        return KernelDbError(
            f"database {name} cannot be opened: check your rights on it and on its directory "
            "(one that was not closed cleanly has to be opened once by a user who may write it)"
        )
    if code.startswith("SQLITE_INTERRUPT"):
        return DamagedDatabaseError(
            f"database {name} makes SQLite work without end: it is far too large, or not made by phasewise"
        )
    if getattr(error, "sqlstate", "") == _QUERY_CANCELED:
        return DamagedDatabaseError(
            f"database {name}: the server ended a statement that took too long ({text}): it is far too "
            "large, or not made by phasewise; ?options=-c%20statement_timeout=10min in the URL allows more"
        )
    if code.startswith("SQLITE_READONLY"):
        return ReadOnlyDatabaseError(f"database {name} is read-only")
    return KernelDbError(f"database {name}: {text}")


def _decode(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")

"""Tables of another library in our database, reached with the same locking habits as our own.

Optuna keeps its studies beside our tables, under its own names and its own Alembic history (ours has a table
of another name, see `schema.VERSION_TABLE`). Its engine gets from here what several processes need to write
to one SQLite file: the same waiting for a lock, and the lock taken when a transaction begins, since reading
first and writing later would let two processes claim the same row. Code that only reads runs within
`only_reading` and waits for no lock.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from sqlalchemy import Connection, Engine, event
from sqlalchemy.pool import QueuePool

from phasewise.kerneldb.connect import BUSY_TIMEOUT_S, server_limits
from phasewise.kerneldb.location import Location


def engine_arguments(location: Location) -> tuple[str, dict[str, Any]]:
    """URL and arguments of SQLAlchemy's `create_engine`. The database must exist: open the store first."""
    if location.file is None:
        url = location.url or ""
        return url, {"pool_pre_ping": True, "connect_args": server_limits(url)}
    file = str(location.file)

    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            file, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
        )
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    # Not the file's own URL: a guest may give a meaning to characters in it.
    return "sqlite://", {"creator": connect, "poolclass": QueuePool}


_is_reading: ContextVar[bool] = ContextVar("_is_reading", default=False)


@contextmanager
def only_reading() -> Iterator[None]:
    """Let transactions within this context begin without SQLite's write lock: they only read."""
    token = _is_reading.set(True)
    try:
        yield
    finally:
        _is_reading.reset(token)


def lock_when_beginning(engine: Engine) -> None:
    """Let a guest's transactions begin with SQLite's write lock, except within `only_reading`."""
    if engine.dialect.name == "sqlite":

        @event.listens_for(engine, "begin")
        def begin(connection: Connection) -> None:
            connection.exec_driver_sql("BEGIN" if _is_reading.get() else "BEGIN IMMEDIATE")

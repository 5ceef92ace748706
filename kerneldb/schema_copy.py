"""A copy of a SQLite database beside it, made before its schema is upgraded."""

from __future__ import annotations

import os
import secrets
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

from phasewise.kerneldb.errors import KernelDbError

SUFFIX = ".before-upgrade"


def copy_beside(file: Path) -> Path:
    """The copy: what is committed, as one whole file with the database's mode. There is one of each database,
    of its last upgrade. KernelDbError where it cannot be made. The caller holds the write lock.
    """
    copy = file.with_name(file.name + SUFFIX)
    temporary = file.with_name(f".phasewise-{secrets.token_hex(8)}")
    try:
        os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        _copy(file, temporary)
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


def _copy(source: Path, target: Path) -> None:
    """By SQLite, which knows what of the write-ahead log is committed."""
    uri = f"{source.as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as old, closing(sqlite3.connect(target)) as new:
        old.backup(new)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

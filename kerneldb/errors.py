"""Errors of the tuning database: each is one clear line for the user, and exit code 1."""

from __future__ import annotations

from typing import ClassVar


class KernelDbError(Exception):
    """The tuning database cannot do what was asked. The message names the database and what to do."""

    exit_code: ClassVar[int] = 1


class RecordError(KernelDbError, ValueError):
    """A value outside the bounds of its record. The message names the field, the value and the bounds."""


class DatabaseNameError(KernelDbError):
    """The name of a database is no file and no URL, or is a URL of a kind for which there is no driver."""


class DatabaseTooNewError(KernelDbError):
    """The database has a schema revision that this program does not know."""


class DatabaseTooOldError(KernelDbError):
    """The database has an older schema and cannot be changed, or is on a server, which only `db upgrade`
    upgrades since other hosts use it."""


class ForeignDatabaseError(KernelDbError):
    """The file or server holds no database, or one that another program made."""


class DamagedDatabaseError(KernelDbError):
    """The database file is corrupt, or lacks tables that its schema revision promises."""


class ReadOnlyDatabaseError(KernelDbError):
    """The database can be read but not changed, and a change was needed."""


class BusyDatabaseError(KernelDbError):
    """Another process is writing to the database and did not finish in time."""


class DatabaseFullError(KernelDbError):
    """The disk, the quota or the file's size limit leaves the database no room."""


class ExportFileError(KernelDbError):
    """The file holds no schedules, comes from a newer program, or has more rows than a file may hold."""

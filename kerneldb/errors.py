"""Errors of the tuning database: each is one clear line for the user, and exit code 1."""

from __future__ import annotations

from typing import ClassVar


class KernelDbError(Exception):
    """The tuning database cannot do what was asked. The message names the database and what to do."""

    exit_code: ClassVar[int] = 1


class RecordError(KernelDbError, ValueError):
    """A value outside the bounds of its record. The message names the field, the value and the bounds."""


class DatabaseNameError(KernelDbError):
    """No file, no URL, or a URL of a kind for which there is no driver."""


class DatabaseTooNewError(KernelDbError):
    """The schema is of a revision that this program does not know."""


class DatabaseTooOldError(KernelDbError):
    """It cannot be changed, or is on a server that other hosts use: those are upgraded by `db upgrade`."""


class ForeignDatabaseError(KernelDbError):
    """Not a database, or one that another program made."""


class DamagedDatabaseError(KernelDbError):
    """The file is corrupt, or lacks tables that its revision promises."""


class ReadOnlyDatabaseError(KernelDbError):
    """The database can be read but not changed, and a change was needed."""


class BusyDatabaseError(KernelDbError):
    """Another process is writing and did not finish in time."""


class DatabaseFullError(KernelDbError):
    """The disk, the quota or the file's size limit is used up."""


class ExportFileError(KernelDbError):
    """Not a file of schedules, one from a newer program, or more rows than a file may hold."""

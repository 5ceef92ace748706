"""The lock by which one phasewise process of a user measures at a time.

A process takes a *turn* before it times anything, and has the machine to itself until the turn ends. A run
takes one turn for all its timings; turns within a turn are part of it. The turn is a POSIX lock on a byte of
one file of this user, so it ends with its process."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path

from phasewise.tuner.errors import TunerError

LOCK_NAME = f"phasewise-measuring-{os.getuid()}.lock"
TELL_AFTER_S = 1.0
"""Seconds below which a wait is not reported."""

POLL_S = 0.1
"""Seconds between two attempts; an attempt takes microseconds, which disturb no measurement."""
MOST_COMMAND_CHARS = 100

_TURN = 0
"""The byte of the file that a measuring process locks."""

_FLOCK = struct.Struct("@hhqqi")
"""`struct flock` of Linux: type, whence, start, length, pid."""


class CannotLockError(TunerError):
    """The lock's file cannot be used by this user, so nothing can be measured."""


class MeasurementLock:
    """A lock that never waits, for searches that time nothing; `FileLock` is the real one. Times are in
    seconds from the call; `math.inf` waits for ever."""

    def turn(self, seconds: float = math.inf) -> AbstractContextManager[bool]:
        """A turn on the machine. Yields True if no other process measures until its end, False if one still
        did after `seconds`."""
        return nullcontext(True)


class FileLock(MeasurementLock):
    """The lock of all processes that open the same file; one object per process and file. `report`: told, in
    one line each, for which process this one waits, and afterwards how long it waited. CannotLockError where
    the file cannot be used."""

    def __init__(self, path: Path, report: Callable[[str], None] = lambda line: None) -> None:
        # Closing any other descriptor of the file would end all locks, so this one stays open.
        self._file = _opened(path)
        self.report = report
        self._is_held = False

    @contextmanager
    def turn(self, seconds: float = math.inf) -> Iterator[bool]:
        if self._is_held:
            yield True
            return
        self._is_held = self._wait(time.monotonic() + seconds)
        try:
            yield self._is_held
        finally:
            self._is_held = False
            self._release()

    def holder(self) -> int | None:
        """The other process that has the turn; None if there is none, or it is in another PID namespace."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _TURN, 1, 0)
        kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
        return int(pid) if kind != fcntl.F_UNLCK and pid > 0 else None

    def _wait(self, deadline_s: float) -> bool:
        if self._try():
            return True
        notice = _Notice(self.report, self.holder, deadline_s)
        is_ours = self._poll(notice)
        notice.end(is_ours)
        return is_ours

    def _poll(self, notice: _Notice) -> bool:
        while not self._try():
            left_s = notice.deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            notice.tell_if_due()
            time.sleep(min(POLL_S, left_s))
        return True

    def _try(self) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _TURN)
        except (BlockingIOError, PermissionError):  # POSIX leaves it open which of the two
            return False
        return True

    def _release(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _TURN)


def _opened(path: Path) -> int:
    """A descriptor of the file, created if missing. Links and special files are refused, since everybody may
    create files in a directory for temporary files."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    why = "it is no file"
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)
    else:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    raise CannotLockError(f"the lock {path} cannot be used ({why}): remove it, or name another TMPDIR")


class _Notice:
    """The reports of one wait: the awaited process after TELL_AFTER_S, and the duration at the end."""

    def __init__(
        self, report: Callable[[str], None], holder: Callable[[], int | None], deadline_s: float
    ) -> None:
        self.deadline_s = deadline_s
        self._report = report
        self._holder = holder
        self._began_s = time.monotonic()
        self._is_told = False

    def tell_if_due(self) -> None:
        now_s = time.monotonic()
        if self._is_told or now_s < self._began_s + TELL_AFTER_S:
            return
        self._is_told = True
        most = "" if self.deadline_s == math.inf else f", for {self.deadline_s - now_s:.0f} s at most"
        self._report(f"waiting for {_described(self._holder())}, which measures on this machine{most} ...")

    def end(self, is_ours: bool) -> None:
        if self._is_told:
            waited_s = time.monotonic() - self._began_s
            ended = "" if is_ours else "; it still measures"
            self._report(f"waited {waited_s:.1f} s for the other phasewise{ended}")


def _described(pid: int | None) -> str:
    """A process's number and command line, without path and interpreter."""
    if pid is None:
        return "another phasewise"
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        words = []
    first = next((place for place, word in enumerate(words) if Path(word).name == "phasewise"), None)
    command = " ".join(["phasewise", *words[first + 1 :]] if first is not None else words)
    printable = "".join(letter if letter.isprintable() else " " for letter in command)
    return f"process {pid}" + (f" ({printable[:MOST_COMMAND_CHARS]})" if printable.strip() else "")


def lock_path() -> Path:
    """The path of this user's lock file, in the directory for temporary files."""
    return Path(tempfile.gettempdir()) / LOCK_NAME


def user_lock(report: Callable[[str], None] = lambda line: None) -> FileLock:
    """The lock that all phasewise processes of this user share; `report` is told of waits."""
    lock = _user_lock()
    lock.report = report
    return lock


@cache
def _user_lock() -> FileLock:
    return FileLock(lock_path())

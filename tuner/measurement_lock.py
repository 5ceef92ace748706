"""The lock by which one phasewise process of a user measures at a time, while no other one computes.

A process asks for a *turn* before it times anything, and has the machine to itself until the turn ends. A
process that computes between its turns does so inside `working`, which is shared: all of them compute at
the same time, and stop when one of them waits for a turn. What two processes share is also divided by
*claims*: a process leaves alone what another one has claimed.

Everything is a POSIX lock on a byte of one file of this user, so it ends with the process that holds it. A
process that waits sleeps in the kernel: it takes no CPU time from the process that measures.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import signal
import stat
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path

from phasewise.tuner.errors import TunerError

LOCK_NAME = f"phasewise-measuring-{os.getuid()}.lock"
TELL_AFTER_S = 1.0
"""A wait that is shorter than this is not reported."""

RING_AGAIN_S = 0.01
LONGEST_ALARM_S = 1e6
POLL_S = 0.1
"""Seconds between two attempts of a thread that cannot have an alarm: any but the main one."""

PAUSE_S = 0.02
MOST_COMMAND_CHARS = 100

_TURN, _WANTED, _FIRST_CLAIM = range(3)
"""Bytes of the file: _TURN is held alone to measure and shared to compute, _WANTED while waiting for it."""

_FLOCK = struct.Struct("@hhqqi")
"""`struct flock` of Linux: type, whence, start, length, pid."""


class CannotLockError(TunerError):
    """The lock's file is not one that this user can use, so nothing can be measured."""


class MeasurementLock:
    """A measuring process's lock against the others of this user on this machine, where there are none, as
    for a search that times nothing; see `FileLock`.

    Times are in seconds from the call; `math.inf` waits for as long as it takes.
    """

    def turn(self, seconds: float = math.inf) -> AbstractContextManager[bool]:
        """Wait for the machine. Yields True if no other process measures or computes until the end, False if
        one still did after this time.
        """
        return nullcontext(True)

    def working(self, seconds: float = math.inf) -> AbstractContextManager[None]:
        """Compute, but not while another process has a turn. It waits no longer than this in total."""
        return nullcontext()

    def let_pass(self) -> None:
        """Inside `working`: if another process waits for a turn, wait until that turn has ended."""

    def rest(self, seconds: float) -> None:
        """Sleep, and let other processes have turns meanwhile."""
        time.sleep(seconds)

    def claim(self, name: str) -> AbstractContextManager[bool]:
        """Yields True if `name` is this process's until the end, False if another process has claimed it."""
        return nullcontext(True)

    def wait_for(self, name: str, seconds: float = math.inf) -> None:
        """Sleep until no process claims `name`, and let other processes have turns meanwhile."""
        time.sleep(min(seconds, PAUSE_S))


class FileLock(MeasurementLock):
    """The lock of all processes that open the same file. One object for a process and a file.

    report: told in one line for which process this one waits, and afterwards how long it has waited.
    Raises CannotLockError where the file cannot be used.
    """

    def __init__(self, path: Path, report: Callable[[str], None] = lambda line: None) -> None:
        # Closing any other descriptor of the file would end all locks, so this one stays open.
        self._file = _opened(path)
        self.report = report
        self._working_until_s: float | None = None

    @contextmanager
    def turn(self, seconds: float = math.inf) -> Iterator[bool]:
        self._release(_TURN)
        try:
            yield self._take_turn(time.monotonic() + seconds)
        finally:
            self._release(_TURN)
            self._go_on()

    @contextmanager
    def working(self, seconds: float = math.inf) -> Iterator[None]:
        self._working_until_s = time.monotonic() + seconds
        try:
            self._go_on()
            yield
        finally:
            self._working_until_s = None
            self._release(_TURN)

    def let_pass(self) -> None:
        if self._working_until_s is not None and self._is_wanted():
            self._release(_TURN)
            self._go_on()

    def rest(self, seconds: float) -> None:
        self._release(_TURN)
        time.sleep(seconds)
        self._go_on()

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        byte = _byte_of(name)
        is_ours = self._try(byte, fcntl.LOCK_EX)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._release(byte)

    def wait_for(self, name: str, seconds: float = math.inf) -> None:
        self._release(_TURN)
        if self._wait(_byte_of(name), fcntl.LOCK_SH, time.monotonic() + seconds):
            self._release(_byte_of(name))
        self._go_on()

    def holder(self) -> int | None:
        """The process that has the turn, or one of those that compute; None: no other process does."""
        return self._holder_of(_TURN)

    def _take_turn(self, deadline_s: float) -> bool:
        if not self._wait(_WANTED, fcntl.LOCK_SH, deadline_s):
            return False
        try:
            return self._wait(_TURN, fcntl.LOCK_EX, deadline_s)
        finally:
            self._release(_WANTED)

    def _go_on(self) -> None:
        """Compute again, after every process that waits for a turn has had it."""
        if self._working_until_s is None:
            return
        if self._wait(_WANTED, fcntl.LOCK_EX, self._working_until_s):
            self._release(_WANTED)
        self._wait(_TURN, fcntl.LOCK_SH, self._working_until_s)

    def _is_wanted(self) -> bool:
        if self._try(_WANTED, fcntl.LOCK_EX):
            self._release(_WANTED)
            return False
        return True

    def _wait(self, byte: int, kind: int, deadline_s: float) -> bool:
        if self._try(byte, kind):
            return True
        notice = _Notice(self.report, lambda: self._holder_of(byte), deadline_s)
        if threading.current_thread() is threading.main_thread():
            is_ours = self._sleep_until_given(byte, kind, notice)
        else:
            is_ours = self._poll(byte, kind, notice)
        notice.end(is_ours)
        return is_ours

    def _sleep_until_given(self, byte: int, kind: int, notice: _Notice) -> bool:
        try:
            with _alarm(notice):
                fcntl.lockf(self._file, kind, 1, byte)
        except _TimeIsUpError:
            self._release(byte)  # it may have been given in the last moment
            return False
        return True

    def _poll(self, byte: int, kind: int, notice: _Notice) -> bool:
        while not self._try(byte, kind):
            left_s = notice.deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            notice.tell_if_due()
            time.sleep(min(POLL_S, left_s))
        return True

    def _try(self, byte: int, kind: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX leaves it open which of the two
            return False
        return True

    def _release(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)

    def _holder_of(self, byte: int) -> int | None:
        """A process that holds this byte; None if no other does, or one in another PID namespace."""
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        kind, *_, pid = _FLOCK.unpack(fcntl.fcntl(self._file, fcntl.F_GETLK, asked))
        return int(pid) if kind != fcntl.F_UNLCK and pid > 0 else None


def _opened(path: Path) -> int:
    """A descriptor of the file, which is made where there is none.

    Everybody may make files in a directory for temporary ones, so links and whatever is no file are refused.
    """
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


def _byte_of(name: str) -> int:
    """The byte of the file that stands for a claim of this name."""
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return _FIRST_CLAIM + int.from_bytes(digest, "big")


class _TimeIsUpError(Exception):
    """Raised out of a wait for a lock, by the alarm."""


class _Notice:
    """The notice of one wait: for which process, once it has lasted TELL_AFTER_S, and how long it was."""

    def __init__(
        self, report: Callable[[str], None], holder: Callable[[], int | None], deadline_s: float
    ) -> None:
        self.deadline_s = deadline_s
        self._report = report
        self._holder = holder
        self._began_s = time.monotonic()
        self._is_told = False

    @property
    def due_s(self) -> float:
        """The instant, by `time.monotonic`, at which the wait is to be reported."""
        return math.inf if self._is_told else self._began_s + TELL_AFTER_S

    def tell_if_due(self) -> None:
        now_s = time.monotonic()
        if now_s < self.due_s:
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
    """A process by its number and command line, without its path and interpreter."""
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


@contextmanager
def _alarm(notice: _Notice) -> Iterator[None]:
    """Report a wait in the block after a while, and end it with _TimeIsUpError at the deadline."""
    is_waiting = True

    def set_timer() -> None:
        # It rings again and again: a single alarm that rings just before the wait begins would end nothing.
        left_s = min(notice.due_s, notice.deadline_s) - time.monotonic()
        left_s = min(LONGEST_ALARM_S, max(RING_AGAIN_S, left_s))
        signal.setitimer(signal.ITIMER_REAL, left_s, RING_AGAIN_S)

    def ring(*_: object) -> None:
        now_s = time.monotonic()
        if now_s >= notice.deadline_s and is_waiting:
            raise _TimeIsUpError
        if now_s >= notice.due_s:
            notice.tell_if_due()
            set_timer()

    before = signal.signal(signal.SIGALRM, ring)
    set_timer()
    try:
        yield
    finally:
        is_waiting = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def lock_path() -> Path:
    """The lock file of this user, in the directory for temporary files."""
    return Path(tempfile.gettempdir()) / LOCK_NAME


def user_lock(report: Callable[[str], None] = lambda line: None) -> FileLock:
    """The lock that all phasewise processes of this user share; waits are told to `report`."""
    lock = _user_lock()
    lock.report = report
    return lock


@cache
def _user_lock() -> FileLock:
    return FileLock(lock_path())

"""Processes that measure on one machine: one at a time, and nobody works meanwhile.

Two that share a study would time each other. So what is timed has a turn, and a process that has work between
its turns (`Company.working`) works only while nobody has one: all work at the same time, then one after
another has its turn, since whoever waits for one goes before whoever wants to work on. What two processes
share is also divided by claims: what one has claimed, another leaves to it.

All of it are locks on bytes of one file of this user, which end with the process that holds them. Who waits
for one sleeps until the kernel gives it: whoever is timed pays for no look of theirs.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import math
import os
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from phasewise.cli.present import note

LOCK_NAME = f"phasewise-measuring-{os.getuid()}.lock"
TELL_AFTER_S = 5.0
RING_AGAIN_S = 0.01
LONGEST_ALARM_S = 1e6

_TURN, _WANTED, _FIRST_CLAIM = range(3)
"""Bytes of the file. The turn is held alone to measure, together to work; wanted is held to wait for it."""


class _TimeIsUpError(Exception):
    """Out of a wait for a lock."""


class CannotLockError(Exception):
    """The file of the locks is not one that this user can use, and so nothing can be measured."""

    exit_code = 1


class Company:
    """This process among others that measure here. One object per process and file, for the main thread."""

    def __init__(self, path: Path) -> None:
        # Closing any other descriptor of the file would end all locks, so this one stays open.
        self._file = _opened(path)
        self._working_until_s: float | None = None

    @contextmanager
    def turn(self, deadline_s: float) -> Iterator[bool]:
        """Wait until nobody else measures or works, until `deadline_s` (`time.monotonic`).

        True: so it is until the end. False: somebody still does.
        """
        self._release(_TURN)
        try:
            yield self._take_turn(deadline_s)
        finally:
            self._release(_TURN)
            self._go_on()

    @contextmanager
    def working(self, deadline_s: float) -> Iterator[None]:
        """What is done inside, turns apart, waits for the turns of others, until `deadline_s`."""
        self._working_until_s = deadline_s
        try:
            self._go_on()
            yield
        finally:
            self._working_until_s = None
            self._release(_TURN)

    def let_pass(self) -> None:
        """Amid long work: whoever waits for a turn has it now."""
        if self._working_until_s is not None and self._is_wanted():
            self._release(_TURN)
            self._go_on()

    def rest(self, seconds: float) -> None:
        """Sleep, in nobody's way."""
        self._release(_TURN)
        time.sleep(seconds)
        self._go_on()

    @contextmanager
    def claim(self, name: str) -> Iterator[bool]:
        """Whether `name` is this process's until the end; False: it is another's."""
        byte = _byte_of(name)
        is_ours = self._try(byte, fcntl.LOCK_EX)
        try:
            yield is_ours
        finally:
            if is_ours:
                self._release(byte)

    def wait_for(self, name: str, deadline_s: float) -> None:
        """Sleep, in nobody's way, until nobody has claimed this."""
        self._release(_TURN)
        if self._wait(_byte_of(name), fcntl.LOCK_SH, deadline_s):
            self._release(_byte_of(name))
        self._go_on()

    def _take_turn(self, deadline_s: float) -> bool:
        if not self._wait(_WANTED, fcntl.LOCK_SH, deadline_s):
            return False
        try:
            return self._wait(_TURN, fcntl.LOCK_EX, deadline_s)
        finally:
            self._release(_WANTED)

    def _go_on(self) -> None:
        """Work again, behind all who wait for a turn."""
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
        try:
            with _alarm(deadline_s):
                fcntl.lockf(self._file, kind, 1, byte)
        except _TimeIsUpError:
            self._release(byte)  # It may have come in the last moment.
            return False
        return True

    def _try(self, byte: int, kind: int) -> bool:
        try:
            fcntl.lockf(self._file, kind | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):  # POSIX leaves it open which of the two
            return False
        return True

    def _release(self, byte: int) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, byte)


def _opened(path: Path) -> int:
    """A descriptor of the file, made where there is none. CannotLockError where its place is taken: anybody
    may make files in a directory for temporary ones, links to other files included."""
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
    """Of the file, for what may be claimed."""
    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return _FIRST_CLAIM + int.from_bytes(digest, "big")


@contextmanager
def _alarm(deadline_s: float) -> Iterator[None]:
    """What waits inside is told after a while, and ends with _TimeIsUpError at the deadline."""
    tell_s, is_waiting = time.monotonic() + TELL_AFTER_S, True

    def set_timer() -> None:
        # Again and again from then on: one that rings just before the wait begins would end nothing.
        left_s = min(tell_s, deadline_s) - time.monotonic()
        left_s = min(LONGEST_ALARM_S, max(RING_AGAIN_S, left_s))
        signal.setitimer(signal.ITIMER_REAL, left_s, RING_AGAIN_S)

    def ring(*_: object) -> None:
        nonlocal tell_s
        now_s = time.monotonic()
        if now_s >= deadline_s and is_waiting:
            raise _TimeIsUpError
        if now_s >= tell_s:
            note("another phasewise measures on this machine: waiting for it ...")
            tell_s = math.inf
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
    """In the directory for temporary files."""
    return Path(tempfile.gettempdir()) / LOCK_NAME


@cache
def company() -> Company:
    """This process's place among the others of this user."""
    return Company(lock_path())

"""Only one phasewise at a time measures on a machine: two that share a study would time each other.

A lock on a file of this user; a process that dies lets go of it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phasewise.cli.present import note

LOCK_NAME = f"phasewise-measuring-{os.getuid()}.lock"
POLL_S = 0.05
TELL_AFTER_S = 5.0


def lock_path() -> Path:
    """In the directory for temporary files."""
    return Path(tempfile.gettempdir()) / LOCK_NAME


@contextmanager
def measuring_alone(deadline_s: float) -> Iterator[bool]:
    """Wait for other processes of this user that measure, until `deadline_s` (`time.monotonic`).

    True: nobody else measures. False: somebody still does.
    """
    descriptor = os.open(lock_path(), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        yield _locked(descriptor, deadline_s)
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a child that outlives us may still have the file open
        os.close(descriptor)


def _locked(descriptor: int, deadline_s: float) -> bool:
    started_s, is_told = time.monotonic(), False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            now_s = time.monotonic()
            if now_s >= deadline_s:
                return False
        if now_s - started_s > TELL_AFTER_S and not is_told:
            note("another phasewise measures on this machine: waiting for it ...")
            is_told = True
        time.sleep(POLL_S)

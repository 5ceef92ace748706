"""Background work on a thread with low priority, for long work beside answers.

Priority and core affinity belong to a thread on Linux, and niceness cannot be lowered again without
privileges: temporary background work therefore gets a thread of its own. A kernel that schedules by sessions
(autogroup, outside of containers and services) weighs niceness within a session only: there the thread's
cores keep it out of the way.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Have the kernel kill this process, even a stopped one, when the thread that started it ends. A parent
    that ended before this call is not noticed: compare `os.getppid()` with the id that the parent passed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Discard file descriptor 2 meanwhile, to which libraries write past Python."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


NICENESS = 10
"""Niceness of background threads: other work gets nine tenths of a shared core."""

Run = Callable[..., Any]
"""Call a function with these arguments on the background thread, and return or raise its result."""


@contextlib.contextmanager
def behind_others(cores: Collection[int] = ()) -> Iterator[Run]:
    """Run calls on a low-priority thread. `cores`: cores that the thread keeps to; empty: the caller's."""
    with ThreadPoolExecutor(1, "phasewise-behind", _give_way, (cores,)) as thread:

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            return thread.submit(function, *arguments).result()

        yield run


def keep_to(cores: Collection[int]) -> None:
    """Restrict the calling thread, and threads that it starts, to `cores`; refusals are ignored."""
    with contextlib.suppress(OSError):  # a plan whose cores are not there is refused where it is read
        if cores:
            os.sched_setaffinity(0, cores)


def _give_way(cores: Collection[int]) -> None:
    keep_to(cores)
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)

"""A thread that gives way to all other work of this host, for what takes long while others answer.

Priority and cores are a thread's own on Linux, and niceness is not lowered again without privileges: so work
that is to give way for a while has a thread of its own, and the process is as it was when that has ended.
A kernel that divides time by sessions first (autogroup, outside of containers and services) weighs niceness
within a session alone: there the thread's cores are what keeps it out of the way.
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
    """The kernel kills this process, also where it is stopped, when the thread that started it ends. A parent
    that had ended before is not noticed: compare `os.getppid()` with what it told of itself."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


NICENESS = 10
"""A core that others want as well is theirs to nine tenths."""

Run = Callable[..., Any]
"""Call a function with these arguments on the thread, and give what it returns or raises."""


@contextlib.contextmanager
def behind_others(cores: Collection[int] = ()) -> Iterator[Run]:
    """A thread for a while. cores: those that it keeps to; none: it may run where this one may."""
    with ThreadPoolExecutor(1, "phasewise-behind", _give_way, (cores,)) as thread:

        def run(function: Callable[..., Any], *arguments: Any) -> Any:
            return thread.submit(function, *arguments).result()

        yield run


def keep_to(cores: Collection[int]) -> None:
    """The calling thread, and those that it starts, run on these alone; where that cannot be, as before."""
    with contextlib.suppress(OSError):  # a plan whose cores are not there is refused where it is read
        if cores:
            os.sched_setaffinity(0, cores)


def _give_way(cores: Collection[int]) -> None:
    keep_to(cores)
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)

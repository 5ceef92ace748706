"""Ranks as what they are in use: processes that map one piece of shared memory and nothing else in common."""

from __future__ import annotations

import mmap
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

BOUND_S = 60.0
"""Far beyond what any test takes: a process that is not done by then hangs."""


@contextmanager
def shared_memory(size: int) -> Iterator[mmap.mmap]:
    """Zeroed, mapped anew by no one: children inherit it."""
    descriptor = os.memfd_create("phasewise-test")
    os.ftruncate(descriptor, size)
    yield mmap.mmap(descriptor, size)  # views of it may live on
    os.close(descriptor)


@dataclass(frozen=True)
class Ranks:
    """Processes that run and were not waited for yet."""

    pids: list[int]

    def kill(self, rank: int) -> None:
        os.kill(self.pids[rank], 9)

    def ended(self) -> list[int]:
        """Exit codes by rank (a signal's number is negative). One that hangs is killed, and counts as -9."""
        end = time.monotonic() + BOUND_S
        return [_exit_code(pid, end) for pid in self.pids]


def start(n_ranks: int, work: Callable[[int], object]) -> Ranks:
    """`work(rank)` in a process each; what it raises is printed, and makes its exit code 1."""
    return Ranks([_forked(work, rank) for rank in range(n_ranks)])


def run(n_ranks: int, work: Callable[[int], object]) -> None:
    codes = start(n_ranks, work).ended()
    assert codes == [0] * n_ranks, f"exit codes of the ranks: {codes}"


def assert_killed_leaves_nobody_waiting(victim: int, work: Callable[[int], object], pause_s: float) -> None:
    """Of three ranks one is killed after a pause; the others end by themselves."""
    ranks = start(3, work)
    time.sleep(pause_s)
    ranks.kill(victim)
    codes = ranks.ended()

    assert codes.pop(victim) == -signal.SIGKILL
    assert codes == [0, 0]


def _forked(work: Callable[[int], object], rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work(rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _exit_code(pid: int, end: float) -> int:
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, 9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

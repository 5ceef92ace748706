"""The process that runs a function which has not been checked yet.

Commands are JSON, one a line on stdin; each is answered by one line on stdout. `check` calls the function in
a child of its own, which may end in any way; `time` calls it here, and a fault ends the process.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from phasewise.cython_kernels._native import (
    SLOT_OUTCOMES,
    SLOT_VERDICT_BYTES,
    slot_check,
    slot_recheck,
    slot_time,
    slot_verdict,
)
from phasewise.cython_kernels.errors import KernelError
from phasewise.cython_kernels.user_slots.library import address_of

WAITS = 4
"""Seconds of waiting allowed for each second of processor time of a check, on a machine that is busy."""


def main() -> int:
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = COMMANDS[asked.pop("do")](**asked)
        except (KernelError, ValueError, MemoryError) as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


def _check(
    slot: str, library: str, symbol: str, seed: int, every_float: bool, seconds: int
) -> dict[str, Any]:
    """The verdict that a child has left, however it ended."""
    with mmap.mmap(-1, max(SLOT_VERDICT_BYTES, mmap.PAGESIZE)) as verdict:
        pid = os.fork()
        if pid == 0:
            _run_and_end(verdict, library, symbol, slot, seed, every_float, seconds)
        is_late = not _ends_within(pid, WAITS * seconds)
        outcome, way, n, index, number, digest = slot_verdict(verdict)
    if is_late:
        outcome = "is_late"
    return {"outcome": outcome, "way": way, "n": n, "index": index, "signal": number, "digest": digest}


def _run_and_end(
    verdict: mmap.mmap, library: str, symbol: str, slot: str, seed: int, every_float: bool, seconds: int
) -> None:
    """Check the function in the child process. The verdict says `faults` until the check is over."""
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        memory = np.frombuffer(verdict, np.uint8)
        memory[:SLOT_VERDICT_BYTES] = 0
        memory[0] = SLOT_OUTCOMES.index("faults")  # before the first call
        slot_check(slot, address_of(library, symbol), seed, every_float, seconds, memory)
    finally:
        os._exit(0)


def _ends_within(pid: int, seconds: float) -> bool:
    descriptor = os.pidfd_open(pid)
    try:
        ended = bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return ended


def _recheck(slot: str, library: str, symbol: str, seed: int) -> dict[str, Any]:
    outcome, _, _, _, _, digest = slot_recheck(slot, address_of(library, symbol), seed)
    return {"outcome": outcome, "digest": digest}


def _time(
    slot: str, library: str | None, symbol: str, lengths: list[int], loops: int, calls: int
) -> dict[str, Any]:
    """Time the function on rows of these lengths. library: None for the built-in function."""
    address = 0 if library is None else address_of(library, symbol)
    return {"loop_ns": slot_time(slot, address, np.array(lengths, np.int64), loops, calls)}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {"check": _check, "recheck": _recheck, "time": _time}

if __name__ == "__main__":
    sys.exit(main())

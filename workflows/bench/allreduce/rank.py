"""One rank of an all-reduce comparison: a process on a core of its own, over memory that all ranks map.

Run as `python -m phasewise.workflows.bench.allreduce.rank DESCRIPTOR RANK RANKS CPU MOST_FLOATS`. It answers
a line of JSON with a line of JSON, as every other system of the comparison does:

    {"system": "ring", "floats": 1024, "times": 50}  ->  {"ns": [1210, 1190, ...]}

`system` is a kind of all-reduce, or "copy": the plain copy of a message of that size, by all ranks at the
same time. Before each of the `times` the rank writes its message and waits for all ranks; that is not timed.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import _native

COPY = "copy"
PAGE_BYTES = 4096
WAIT_S = 30.0
"""Longest wait for the other ranks, far longer than any turn."""


def shared_bytes(ranks: int, most_floats: int) -> int:
    """Bytes of a group, and for every rank a message and a place to copy it to."""
    return _group_span(ranks) + 2 * ranks * _message_span(most_floats)


def _group_span(ranks: int) -> int:
    return _whole_pages(_native.group_bytes(ranks))


def _message_span(floats: int) -> int:
    return _whole_pages(4 * floats)


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


class Rank:
    """One rank's view of the shared memory."""

    def __init__(self, descriptor: int, rank: int, ranks: int, most_floats: int) -> None:
        memory = mmap.mmap(descriptor, shared_bytes(ranks, most_floats))
        self._group = _native.Group(memory, ranks)
        self._rank = rank
        begin, span = _group_span(ranks), _message_span(most_floats)
        self._rows: npt.NDArray[np.float32] = np.frombuffer(
            memory, np.float32, count=2 * ranks * span // 4, offset=begin
        ).reshape(2, ranks, span // 4)
        self._message = np.full(most_floats, 1 / 3, np.float32)
        self._rows[:, rank] = 0  # first touch by the rank itself places its pages on its NUMA node

    def time(self, system: str, floats: int, times: int) -> list[int]:
        """Nanoseconds of each of `times` turns of this rank."""
        ns = np.zeros(times, np.int64)
        buffers, message = list(self._rows[0, :, :floats]), self._message[:floats]
        if system == COPY:
            target = self._rows[1, self._rank, :floats]
            self._group.time_copies(self._rank, buffers, message, target, ns, WAIT_S)
        else:
            self._group.time_all_reduces(self._rank, buffers, message, system, ns, WAIT_S)
        taken: list[int] = ns.tolist()
        return taken


def main() -> None:
    descriptor, rank, ranks, cpu, most_floats = map(int, sys.argv[1:])
    os.sched_setaffinity(0, {cpu})
    here = Rank(descriptor, rank, ranks, most_floats)
    print(json.dumps({"ready": rank}), flush=True)
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        print(json.dumps({"ns": here.time(**request)}), flush=True)


if __name__ == "__main__":
    main()

"""Counters of the processor by thread, from Linux's perf_event_open: cycles, instructions, misses, stalls.

A thread is counted while it runs, on whatever core, in user mode alone, which an unprivileged process may ask
for. Where there are more events than a core has counters, the kernel takes turns; counts are extrapolated.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeAlias

PROC = Path("/proc")
MOST_PARANOID = 2
"""Highest level of kernel.perf_event_paranoid at which a process may count its own events."""

HARDWARE, SOFTWARE, CACHE, RAW = 0, 1, 3, 4
"""Types of events, as the kernel numbers them."""

_SYSCALLS = {"x86_64": 298, "aarch64": 241}
"""Number of the system call perf_event_open, by architecture."""

_DATA_TLB, _LAST_LEVEL, _READ_MISS = 3, 2, 1 << 16
_INTELS_STALLS = 0x040004A3
"""CYCLE_ACTIVITY.STALLS_TOTAL of Intel's cores since Sandy Bridge: event A3, mask 04, at least 4."""

_ATTRIBUTE = struct.Struct("=IIQQQQQIIQ")
"""perf_event_attr, first version: type, size, event, period, sample type, read format, flags, and zeros."""
_WITH_TIMES, _USER_MODE_ALONE, _CLOSE_ON_EXEC = 0b11, 0b11 << 5, 8
_READING = struct.Struct("=QQQ")

EventCode: TypeAlias = tuple[int, int]
"""The type of an event and its number."""


def event_codes(vendor: str | None) -> Mapping[str, Sequence[EventCode]]:
    """Codes to try for each event, the best first.

    Elsewhere than on Intel's cores the kernel's general cache-misses are those of a nearer cache.
    """
    is_intel = vendor == "GenuineIntel"
    return {
        "cycles": [(HARDWARE, 0)],
        "instructions": [(HARDWARE, 1)],
        "llc_misses": [(HARDWARE, 3) if is_intel else (CACHE, _LAST_LEVEL | _READ_MISS)],
        "dtlb_misses": [(CACHE, _DATA_TLB | _READ_MISS)],
        "stalls": [(HARDWARE, 8), *([(RAW, _INTELS_STALLS)] if is_intel else [])],
    }


@dataclass(frozen=True)
class Reading:
    """A counter's value, the time for which it was wanted, and the part of it for which it counted."""

    count: int
    wanted_ns: int
    counted_ns: int


class KernelCounter:
    """A counter by a descriptor of perf_event_open."""

    def __init__(self, thread: int, event: EventCode) -> None:
        number = _SYSCALLS.get(os.uname().machine)
        if number is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        kind, code = event
        size = _ATTRIBUTE.size
        fields = _ATTRIBUTE.pack(kind, size, code, 0, 0, _WITH_TIMES, _USER_MODE_ALONE, 0, 0, 0)
        call = ctypes.CDLL(None, use_errno=True).syscall
        call.restype = ctypes.c_long
        call.argtypes = [ctypes.c_long, ctypes.c_char_p, *[ctypes.c_long] * 3, ctypes.c_ulong]
        descriptor: int = call(number, fields, thread, -1, -1, _CLOSE_ON_EXEC)
        if descriptor < 0:
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))
        self._descriptor = descriptor

    def read(self) -> Reading:
        return Reading(*_READING.unpack(os.read(self._descriptor, _READING.size)))

    def close(self) -> None:
        os.close(self._descriptor)


OpenCounter: TypeAlias = Callable[[int, EventCode], KernelCounter]
"""Opens the counter of a thread; OSError with the kernel's errno."""


@dataclass(frozen=True)
class CounterTotals:
    """Counts of all threads together between two readings; None: the event is not counted here."""

    cycles: float
    instructions: float
    llc_misses: float | None
    dtlb_misses: float | None
    stalls: float | None
    """Cycles in which no instruction was completed."""

    @property
    def instructions_per_cycle(self) -> float:
        return self.instructions / self.cycles if self.cycles else 0.0

    @property
    def llc_misses_pki(self) -> float | None:
        """Misses of the last-level cache, per thousand instructions."""
        return self._per_thousand(self.llc_misses)

    @property
    def dtlb_misses_pki(self) -> float | None:
        """Misses of the data TLB, per thousand instructions."""
        return self._per_thousand(self.dtlb_misses)

    @property
    def stalled_share(self) -> float | None:
        """The share of the cycles in which no instruction went on."""
        return None if self.stalls is None or not self.cycles else self.stalls / self.cycles

    def _per_thousand(self, count: float | None) -> float | None:
        return None if count is None or not self.instructions else 1000 * count / self.instructions


class ProcessorCounters:
    """Counters of threads, from when this is made.

    absence: why nothing is counted, in a line; None where cycles and instructions are.
    """

    def __init__(
        self, threads: Iterable[int], vendor: str | None, open_counter: OpenCounter = KernelCounter
    ) -> None:
        self.absence: str | None = None
        self._counters: dict[str, list[KernelCounter]] = {}
        self._last: dict[str, list[Reading]] = {}
        threads = list(threads)
        for event, codes in event_codes(vendor).items():
            try:
                self._counters[event] = _opened(threads, codes, open_counter)
            except OSError as error:
                if event in ("cycles", "instructions"):
                    self.close()
                    self.absence = why_not(error)
                    return
        self.lap()

    def lap(self) -> CounterTotals | None:
        """Counts of all threads since the last call; None where nothing is counted."""
        if self.absence is not None:
            return None
        now = {event: [counter.read() for counter in own] for event, own in self._counters.items()}
        totals = {
            event: sum(map(_counted, self._last.get(event, readings), readings))
            for event, readings in now.items()
        }
        self._last = now
        return CounterTotals(
            totals["cycles"],
            totals["instructions"],
            totals.get("llc_misses"),
            totals.get("dtlb_misses"),
            totals.get("stalls"),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for counter in (counter for own in self._counters.values() for counter in own):
            counter.close()
        self._counters.clear()


def _opened(
    threads: Sequence[int], codes: Sequence[EventCode], open_counter: OpenCounter
) -> list[KernelCounter]:
    """Counters of each thread for the first code that the kernel takes.

    A thread that has ended meanwhile has none.
    """
    refused = OSError(errno.ENOENT, os.strerror(errno.ENOENT))
    for code in codes:
        counters: list[KernelCounter] = []
        try:
            for thread in threads:
                with suppress(ProcessLookupError):
                    counters.append(open_counter(thread, code))
        except OSError as error:
            for counter in counters:
                counter.close()
            refused = error
        else:
            return counters
    raise refused


def _counted(before: Reading, after: Reading) -> float:
    """The count between two readings, extrapolated to the time in which it was wanted."""
    counted_ns = after.counted_ns - before.counted_ns
    if counted_ns <= 0:
        return 0.0
    return (after.count - before.count) * (after.wanted_ns - before.wanted_ns) / counted_ns


def why_not(error: OSError, proc: Path = PROC) -> str:
    """The reason for which the kernel refused counters, with what would change it."""
    match error.errno:
        case errno.ENOENT | errno.EOPNOTSUPP | errno.ENODEV:
            return "this machine shows no counters of its processor, as most virtual machines"
        case errno.EACCES | errno.EPERM:
            level = _paranoia(proc)
            if level is not None and level > MOST_PARANOID:
                return (
                    f"kernel.perf_event_paranoid is {level}, which keeps counters from users: "
                    f"sudo sysctl kernel.perf_event_paranoid={MOST_PARANOID}"
                )
            return "perf_event_open is refused here; in a container: --cap-add PERFMON"
        case errno.ENOSYS:
            return "this kernel has no perf_event_open"
        case _:
            return f"perf_event_open: {os.strerror(error.errno or errno.EIO)}"


def _paranoia(proc: Path) -> int | None:
    try:
        return int((proc / "sys/kernel/perf_event_paranoid").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def threads_under(pid: int, proc: Path = PROC) -> list[int]:
    """The threads of a process and of all that it started; those that end meanwhile are left out."""
    threads: list[int] = []
    with suppress(OSError):
        for task in sorted((proc / str(pid) / "task").iterdir()):
            threads.append(int(task.name))
            with suppress(OSError):
                for child in (task / "children").read_text(encoding="ascii").split():
                    threads += threads_under(int(child), proc)
    return threads

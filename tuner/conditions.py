"""The other load of the machine while something was timed: steal, other processes, the clock's frequency.

Each condition is the difference of two readings of /proc, before and after. What a platform does not tell is
left out. Ticks are 10 ms, so a span of a tenth of a second is known to a tenth."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

SLOW_PACE = 0.8
"""Share of a core's best pace below which a timing counts as disturbed."""

DISTURBED_SHARE = 0.05
"""Least share of the cores' time, for steal and other processes together, of a disturbed timing."""

_STEAL, _IDLE, _IOWAIT = 7, 3, 4  # columns of a cpu line in proc_stat(5)
_CPU_MHZ = re.compile(r"^processor\s*: (\d+)$(?:\n.+)*?\ncpu MHz\s*: ([\d.]+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class CpuTicks:
    """Sums over some CPUs since boot, in clock ticks."""

    total: int
    idle: int
    steal: int


@dataclass(frozen=True, slots=True)
class Look:
    """Readings of /proc at one instant: ticks of the CPUs, own CPU time, frequency."""

    ticks: CpuTicks
    own_s: float
    """CPU time of this process and of its children, which may be ranks, in seconds."""
    mhz: float | None = None


@dataclass(frozen=True, slots=True)
class Conditions:
    """The load of the machine between two readings, as shares of the observed CPUs' time."""

    steal: float
    """Share of the CPUs' time that the hypervisor gave to other guests."""
    others: float
    """Share of the CPUs' time that other processes of this machine took."""
    mhz: float | None
    pace: float | None = None
    """Pace of the slowest core as a share of its fastest reading (`yardstick`); None: not measured."""

    def fields(self) -> dict[str, float]:
        """The conditions by name, as the database keeps them."""
        shares = {"steal": round(self.steal, 4), "others": round(self.others, 4)}
        if self.mhz is not None:
            shares["mhz"] = round(self.mhz, 1)
        if self.pace is not None:
            shares["pace"] = round(self.pace, 3)
        return shares


def parse_ticks(stat: str, cpus: Sequence[int]) -> CpuTicks:
    """CPU ticks from the text of /proc/stat, summed over `cpus`. Guest time, columns 8 and 9, is in user time
    already."""
    wanted = {f"cpu{cpu}" for cpu in cpus}
    rows = [line.split() for line in stat.splitlines()]
    ticks = [[int(field) for field in row[1:9]] for row in rows if row and row[0] in wanted]
    return CpuTicks(
        total=sum(map(sum, ticks)),
        idle=sum(row[_IDLE] + row[_IOWAIT] for row in ticks),
        steal=sum(row[_STEAL] for row in ticks),
    )


def parse_mhz(cpuinfo: str, cpus: Sequence[int]) -> float | None:
    """The mean `cpu MHz` of these CPUs in the text of /proc/cpuinfo; None where it is missing, as on Arm."""
    mhz_by_cpu = {int(cpu): float(mhz) for cpu, mhz in _CPU_MHZ.findall(cpuinfo)}
    chosen = [mhz_by_cpu[cpu] for cpu in cpus if cpu in mhz_by_cpu]
    return sum(chosen) / len(chosen) if chosen else None


def between(before: Look, after: Look, ticks_a_second: int) -> Conditions:
    """The load between two readings; undisturbed if no time has passed."""
    total = after.ticks.total - before.ticks.total
    if total <= 0:
        return Conditions(0.0, 0.0, after.mhz)
    steal = after.ticks.steal - before.ticks.steal
    busy = total - (after.ticks.idle - before.ticks.idle) - steal
    others = busy - (after.own_s - before.own_s) * ticks_a_second
    return Conditions(steal / total, max(0.0, others / total), after.mhz)


class Watch:
    """Readings of the machine's load; each `lap` returns the conditions since the last reading."""

    def __init__(self, cpus: Sequence[int], proc: Path = Path("/proc")) -> None:
        self._cpus = tuple(cpus)
        self._proc = proc
        self._last = self._look()

    def begin(self) -> None:
        """Start a lap now."""
        self._last = self._look()

    def lap(self) -> Conditions:
        now = replace(self._look(), mhz=parse_mhz((self._proc / "cpuinfo").read_text(), self._cpus))
        before, self._last = self._last, now
        return between(before, now, os.sysconf("SC_CLK_TCK"))

    def _look(self) -> Look:
        """A reading without the frequency, which takes longest and is read at the end of a lap only."""
        ticks = parse_ticks((self._proc / "stat").read_text(), self._cpus)
        own_s = time.process_time() + children_s(self._proc, os.sysconf("SC_CLK_TCK"))
        return Look(ticks, own_s)


def children_s(proc: Path, ticks_a_second: int) -> float:
    """CPU time in seconds of this process's living children; 0 where the kernel does not list children."""
    ticks = 0
    for listed in proc.glob("self/task/*/children"):
        for child in _text(listed).split():
            # After the name, which may hold spaces: state is field 3, utime and stime are 14 and 15.
            fields = _text(proc / child / "stat").rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:13]))
    return ticks / ticks_a_second


def _text(file: Path) -> str:
    """The text of a file; empty for a task or a child that has just ended."""
    try:
        return file.read_text()
    except OSError:
        return ""


def is_disturbed(conditions: Mapping[str, float]) -> bool:
    """True if processes or guests took a noticeable share of the cores, or the yardstick was slow. Takes
    `Conditions.fields`."""
    taken = conditions.get("steal", 0.0) + conditions.get("others", 0.0)
    return taken > DISTURBED_SHARE or conditions.get("pace", 1.0) < SLOW_PACE


def mean_conditions(laps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean of each condition, by name, over the laps that have it."""
    names = dict.fromkeys(name for lap in laps for name in lap)
    return {name: fmean(lap[name] for lap in laps if name in lap) for name in names}

"""Reports changes of a cpuset or a CPU quota to commands that keep the plans of their start.

(`serve` makes other plans then: `serving.engine.core_watch`.) A thread whose own core is gone runs elsewhere,
which its ranks tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from phasewise._words import number, plural
from phasewise.topology.cpusets import cpus_of
from phasewise.topology.process_limits import cgroup_cpuset, cgroup_quota
from phasewise.tuner.plans import list_cores
from phasewise.workflows.report import Report

T = TypeVar("T")

Limits = tuple[int | None, float | None]
"""Number of CPUs in the affinity mask, and CPUs' worth of time by the quota; None: no limit."""


def cgroup_limits() -> Limits:
    """The limits of this process's cgroup, which no pinning of its threads changes."""
    return cgroup_cpuset(Path("/")), cgroup_quota(Path("/"))


class KeptCores:
    """The limits at a command's start, to compare with later ones in the command's pauses."""

    def __init__(self, report: Report, look: Callable[[], Limits] = cgroup_limits) -> None:
        self._report, self._look = report, look
        self._seen = look()

    def between(self, steps: Iterable[T]) -> Iterator[T]:
        """Yield the steps, and look at the limits after each."""
        for step in steps:
            yield step
            self.tell_changes()

    def tell_changes(self) -> None:
        """Report the limits where they differ from those of the last call."""
        with suppress(OSError, ValueError):  # not now
            limits = self._look()
            if limits != self._seen:
                self._seen = limits
                self._report(f"this process may use {_told(limits)} now: its plans stay those of its start")


def _told(limits: Limits) -> str:
    mask, quota = limits
    pus = () if mask is None else cpus_of(mask)
    cores = f"{plural(len(pus), 'core')} {list_cores(pus)}" if pus else "all cores"
    return cores if quota is None else f"{cores}, and the time of {number(quota)} CPUs"

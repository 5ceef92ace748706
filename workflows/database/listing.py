"""The schedules that `db show` lists: all keys are counted, and of each section the first few are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from phasewise.kerneldb.records import MachineKey
    from phasewise.kerneldb.store import Store
    from phasewise.kerneldb.upkeep import Preferred


class Section(StrEnum):
    """A kind of schedule, by its use, as a title."""

    IN_USE = "Schedules in use"
    MEASURED = "Fastest measured, nothing promoted"
    IMPORTED = "Imported, to be timed here by `tune-kernels`"
    STALE = "Of an earlier build of the kernels, not used"


@dataclass
class ListedSchedules:
    """The number of schedules of each section, and those that are shown, in the order of problems."""

    counts: Counter[Section] = field(default_factory=Counter)
    shown: list[tuple[Section, Preferred]] = field(default_factory=list)
    machines: set[MachineKey] = field(default_factory=set)


def list_schedules(
    store: Store, builds: Collection[str], m: int | None, limit: int | None
) -> ListedSchedules:
    """The schedules for m rows, or all; of each section the first `limit`, or all.

    builds: of this program's kernels.
    """
    from phasewise.kerneldb.records import PlanRecord, StepTime
    from phasewise.kerneldb.upkeep import is_stale, preferred_of, standings

    listed = ListedSchedules(machines=store.machines(PlanRecord, StepTime))
    for key, standing in standings(store).items():
        listed.machines.add(key.machine)
        if m not in (None, key.problem.m):
            continue
        section = Section.STALE if is_stale(key.kernel_abi, builds) else Section[standing.name]
        listed.counts[section] += 1
        if limit is None or listed.counts[section] <= limit:
            preferred = preferred_of(store, key, standing)
            if preferred is not None:
                listed.shown.append((section, preferred))
    return listed

"""Database maintenance: preferred timings and clean-up.

Of every key (problem, kind of machine, build) one timing is preferred: of the schedule in use, else the
fastest one measured here, else what was in use where the rows came from, else the fastest one there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import TypeAlias

from phasewise._words import counted
from phasewise.kerneldb.counts import Key, KeyCount, Report
from phasewise.kerneldb.records import MachineKey, Measurement, PlanRecord, Schedule
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.summaries import KEEP_SCHEDULES, TIDY_ABOVE_ROWS


class PreferenceReason(StrEnum):
    """The reason that a timing is the preferred one of its key."""

    IN_USE = "in use"
    MEASURED = "measured"
    IMPORTED = "imported"


@dataclass(frozen=True)
class Preferred:
    """The preferred timing of a key and the reason for it."""

    measurement: Measurement
    standing: PreferenceReason

    @property
    def schedule(self) -> Schedule:
        return self.measurement.sample.schedule


def standings(store: Store) -> dict[Key, PreferenceReason]:
    """Find the reason for the preferred timing of every key that has timings, in the order of problems. Read
    from indexes: memory grows with keys, not with timings."""
    in_use = store.promoted_keys()
    reasons = {count.key: _standing(count, count.key in in_use) for count in store.key_counts()}
    return dict(sorted(reasons.items(), key=lambda item: order_of(item[0])))


def _standing(count: KeyCount, in_use: bool) -> PreferenceReason:
    if in_use:
        return PreferenceReason.IN_USE
    return PreferenceReason.MEASURED if count.verified else PreferenceReason.IMPORTED


def preferred_of(store: Store, key: Key, standing: PreferenceReason) -> Preferred | None:
    """Read the preferred timing of a key; None where no row of the key keeps its record's bounds."""
    columns = (key.problem, key.machine, key.kernel_abi)
    row = None
    if standing is PreferenceReason.IN_USE:
        row = store.promoted_measurement(*columns)
    if row is None and standing is not PreferenceReason.IMPORTED:
        standing = PreferenceReason.MEASURED
        row = store.best_measurement(*columns)
    if row is None:
        standing = PreferenceReason.IMPORTED
        row = store.promoted_measurement(*columns, verified=False)
        row = row or store.best_measurement(*columns, verified=False)
    return None if row is None else Preferred(row, standing)


def order_of(key: Key) -> tuple[object, ...]:
    """The sort key of a key: problem, then machine and build."""
    return (*astuple(key.problem), *astuple(key.machine), key.kernel_abi)


AsShared: TypeAlias = Callable[[PlanRecord], PlanRecord | None]
"""Function from a plan to the plan as it is shared with other machines; None where it cannot be shared."""


def newest_plans(plans: Sequence[PlanRecord]) -> dict[tuple[str, str, MachineKey], PlanRecord]:
    """The newest plan of each model, phase and machine, verified before imported. plans: oldest first."""
    in_order = sorted(plans, key=lambda plan: plan.origin.verified)
    return {(plan.model_key, plan.phase, plan.origin.machine): plan for plan in in_order}


def is_stale(kernel_abi: str, current: Collection[str]) -> bool:
    """True if this program has another build of the same kernels; a build of kernels that this program lacks
    is not stale. current: names such as `gemm-avx2-5f1c9e2b7a04`, of every family and instruction set that
    runs here."""
    kernels = kernel_abi.rpartition("-")[0]
    return kernel_abi not in current and kernels in {name.rpartition("-")[0] for name in current}


def builds_set_aside(keys: Collection[Key], current: Collection[str]) -> dict[str, int]:
    """Count each stale build's winners that wait to be timed again. keys: with a schedule in use."""
    judged = {(key.problem, key.machine) for key in keys if key.kernel_abi in current}
    return dict(
        Counter(
            key.kernel_abi
            for key in keys
            if is_stale(key.kernel_abi, current) and (key.problem, key.machine) not in judged
        )
    )


@dataclass(frozen=True)
class Collected:
    """The effect of a clean-up: rows deleted by table, and timings whose samples were summarised."""

    deleted: Mapping[str, int]
    summarised: int
    spared: Mapping[str, int]
    """Stale builds that stay, with the number of winners of each that wait to be timed again."""


def collect_garbage(
    store: Store, current_builds: Collection[str], keep_schedules: int | None, *, dry_run: bool
) -> Collected:
    """Delete rows of stale builds, except builds whose winners here wait to be timed again. Summarise raw
    samples of all but the `keep_schedules` fastest schedules of each key and those that promotions name; keep
    as many of the newest plans and scores. dry_run: only count."""
    spared = builds_set_aside(store.promoted_keys(), current_builds)
    builds = {build.kernel_abi for build in store.stats().builds}
    stale = [name for name in sorted(builds - spared.keys()) if is_stale(name, current_builds)]
    deleted = Counter(store.delete_builds(stale, dry_run=dry_run))
    if keep_schedules is None:
        return Collected(deleted, 0, spared)
    lost = store.summarise_losers(keep_schedules, except_builds=stale, dry_run=dry_run)
    deleted["measurement"] += lost.deleted
    deleted.update(store.delete_old(keep_schedules, dry_run=dry_run))
    return Collected(deleted, lost.summarised, spared)


def tidy(store: Store, machine: MachineKey, report: Report) -> None:
    """Summarise losers' samples once this kind of machine has more than TIDY_ABOVE_ROWS timings."""
    if sum(count.total for count in store.key_counts(machine=machine)) <= TIDY_ABOVE_ROWS:
        return
    lost = store.summarise_losers(KEEP_SCHEDULES, machine)
    if lost.deleted or lost.summarised:
        report(
            f"{counted(lost.summarised, 'timing')} of schedules that lost were summarised, {lost.deleted} "
            f"deleted: more than {TIDY_ABOVE_ROWS} are of this kind of machine"
        )

"""The tuning database as JSON values: what `phasewise db --json` prints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.records import MachineKey, PlanRecord
    from phasewise.kerneldb.store import StoreStats
    from phasewise.kerneldb.upkeep import Diff, Preferred, ScheduleVerdict

    Machines: TypeAlias = dict[MachineKey, str]


def plan_fields(
    plans: Sequence[PlanRecord], machines: Machines, report: Report = silent
) -> list[dict[str, Any]]:
    """One object a plan, oldest first. `in_use`: the newest verified one of its model, phase and machine."""
    newest = {(one.model_key, one.phase, one.origin.machine): one for one in plans if one.origin.verified}
    return [
        {
            "model": plan.model_key,
            "phase": plan.phase,
            "ranks": _ranks(plan, report),
            "machine": machines[plan.origin.machine],
            "in_use": newest.get((plan.model_key, plan.phase, plan.origin.machine)) is plan,
            "verified": plan.origin.verified,
            "objectives": dict(plan.objectives),
            "created_at_ms": plan.origin.created_at_ms,
            "program_version": plan.origin.program_version,
        }
        for plan in plans
    ]


def _ranks(plan: PlanRecord, report: Report) -> list[list[int]] | None:
    """The cores of each rank; None where the stored plan cannot be read."""
    from phasewise.tuner.errors import PlanError
    from phasewise.tuner.plans import ServicePlan

    try:
        return [list(rank.cores) for rank in ServicePlan.from_json(plan.plan_json).ranks]
    except PlanError as error:
        report(f"the {plan.phase} plan for {plan.model_key} cannot be read: {error}")
        return None


def schedule_fields(one: Preferred, machines: Machines, stale: bool) -> dict[str, Any]:
    """The problem, its schedule and what was measured, flat."""
    from dataclasses import asdict

    timing = one.measurement
    return {
        **asdict(timing.problem),
        **asdict(timing.sample.schedule),
        "estimate_ns": timing.sample.estimate_ns,
        "samples": len(timing.sample.samples_ns),
        "kernel_abi": timing.kernel_abi,
        "standing": one.standing.value,
        "stale": stale,
        "machine": machines[timing.origin.machine],
    }


def stats_fields(name: str, found: StoreStats, current_builds: Collection[str]) -> dict[str, Any]:
    """The JSON that `--json` prints."""
    machines = labels(one.machine for one in found.signatures)
    return {
        "database": name,
        "exists": True,
        "schema": found.revision,
        "file_bytes": found.file_bytes,
        "rows": dict(found.rows),
        "by_machine": [
            {
                "machine": machines[one.machine],
                "measurements": one.measurements,
                "service_plans": one.service_plans,
                "step_times": one.step_times,
            }
            for one in found.signatures
        ],
        "by_build": [
            {
                "build": one.kernel_abi,
                "measurements": one.measurements,
                "unverified": one.unverified,
                "state": _build_state(one.kernel_abi, current_builds),
            }
            for one in found.builds
        ],
        "machines": machine_fields(machines),
    }


def _build_state(kernel_abi: str, current_builds: Collection[str]) -> str:
    from phasewise.kerneldb.upkeep import is_stale

    if kernel_abi in current_builds:
        return "current"
    return "stale" if is_stale(kernel_abi, current_builds) else "elsewhere"


def diff_fields(found: Diff, machines: Machines) -> list[dict[str, Any]]:
    """One object a key that differs; null where a side knows nothing of it."""
    from dataclasses import asdict

    return [
        {
            **asdict(one.key.problem),
            "kernel_abi": one.key.kernel_abi,
            "machine": machines[one.key.machine],
            "here": one.here and asdict(one.here.schedule),
            "there": one.there and asdict(one.there.schedule),
        }
        for one in found.differences
    ]


def verdict_fields(one: ScheduleVerdict) -> dict[str, Any]:
    """The problem, the schedule, what was claimed and what was found, flat."""
    from dataclasses import asdict

    return {
        **asdict(one.problem),
        **asdict(one.schedule),
        "claimed_ns": one.claimed_ns,
        "measured_ns": one.measured_ns,
        **asdict(one.comparison),
        "promoted": one.promoted,
        "outcome": one.outcome,
    }


def machine_fields(machines: Machines) -> list[dict[str, str]]:
    """The signatures are too long for a table, so tables name machines by number and this is the legend."""
    return [
        {"machine": label, "core": key.core_sig, "placement": key.placement_sig}
        for key, label in machines.items()
    ]


def labels(machines: Iterable[MachineKey]) -> Machines:
    """A short label for each kind of machine, by its signatures: the same in every listing of a database."""
    return {machine: f"#{number}" for number, machine in enumerate(sorted(set(machines), key=str), start=1)}

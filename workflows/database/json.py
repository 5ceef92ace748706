"""The tuning database as JSON values: what `phasewise db --json` prints."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.counts import StoreStats
    from phasewise.kerneldb.diff import Diff
    from phasewise.kerneldb.records import MachineKey, PlanRecord, PredictorScore
    from phasewise.kerneldb.upkeep import Preferred
    from phasewise.topology import Machine

    Machines: TypeAlias = dict[MachineKey, str]


def plan_fields(
    plans: Sequence[PlanRecord], machines: Machines, report: Report = silent
) -> list[dict[str, Any]]:
    """One object a plan, oldest first. `in_use`: the one that a start takes, verified or imported."""
    from phasewise.kerneldb.upkeep import newest_plans

    here, newest = _Here(), newest_plans(plans)
    return [
        {
            "model": plan.model_key,
            "phase": plan.phase,
            **_ranks(plan, here, report),
            "machine": machines[plan.origin.machine],
            "in_use": newest.get((plan.model_key, plan.phase, plan.origin.machine)) is plan,
            "verified": plan.origin.verified,
            "objectives": dict(plan.objectives),
            "created_at_ms": plan.origin.created_at_ms,
            "program_version": plan.origin.program_version,
        }
        for plan in plans
    ]


def score_fields(scores: Sequence[PredictorScore]) -> list[dict[str, Any]]:
    """One object a score of a predictor, oldest first. They are of no machine."""
    return [
        {
            "model": score.model_name,
            "reads": score.reads,
            "answers_key": score.answers_key,
            "judged_by": score.judged_by,
            "learnt_answers": score.learnt_answers,
            "judged_answers": score.judged_answers,
            "hold": score.hold,
            "figures": dict(score.figures),
            "verified": score.origin.verified,
            "created_at_ms": score.origin.created_at_ms,
            "program_version": score.origin.program_version,
        }
        for score in scores
    ]


class _Here:
    """This machine, read when a plan is of it or may be."""

    @cached_property
    def machine(self) -> Machine:
        from phasewise.topology import read_machine

        return read_machine()

    @cached_property
    def key(self) -> MachineKey:
        from phasewise.tuner.plans import machine_key

        return machine_key(self.machine)


def _ranks(record: PlanRecord, here: _Here, report: Report) -> dict[str, Any]:
    """The cores of each rank, or instance, where they are known here; and the places that the plan names.

    Both are None where the stored plan cannot be read. `bands`: the same of decode's plan for more sequences.
    """
    from phasewise.serving.embedding import plan as embedding
    from phasewise.serving.errors import ServingError
    from phasewise.tuner import plans
    from phasewise.tuner.errors import PlanError

    is_here = record.origin.machine == here.key
    try:
        if record.phase == embedding.PHASE:
            of_instances = embedding.stored_places(record.plan_json)
            if not is_here:
                return _load_fields(None, of_instances)
            instances = embedding.stored_plan(record.plan_json, here.machine).instances
            return _load_fields([list(instance.cores) for instance in instances], of_instances)
        places = plans.stored_places(record.plan_json)
        if places is not None and not is_here:
            (_, first), *others = places
            bands = [{"sequences": n, **_places_fields(None, own)} for n, own in others]
            return _load_fields(None, first, bands)
        plan = plans.stored_plan(record.plan_json, here.machine)
        cores = [[list(rank.cores) for rank in own.ranks] for own in plan.each]
        named = [None] * len(cores) if places is None else [own for _, own in places]
        bands = [
            {"sequences": n, **_places_fields(own, named_by)}
            for n, own, named_by in zip(plan.starts, cores[1:], named[1:], strict=True)
        ]
        return _load_fields(cores[0], named[0], bands)
    except (PlanError, ServingError) as error:
        report(f"the {record.phase} plan for {record.model_key} cannot be read: {error}")
        return _load_fields(None, None)


def _load_fields(
    ranks: list[list[int]] | None, places: list[list[int]] | None, bands: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {**_places_fields(ranks, places), "bands": list(bands)}


def _places_fields(ranks: list[list[int]] | None, places: list[list[int]] | None) -> dict[str, Any]:
    return {"ranks": ranks, "places": places}


def schedule_fields(preferred: Preferred, machines: Machines, stale: bool) -> dict[str, Any]:
    """The problem, its schedule and what was measured, flat."""
    from dataclasses import asdict

    timing = preferred.measurement
    return {
        **asdict(timing.problem),
        **asdict(timing.sample.schedule),
        "estimate_ns": timing.sample.estimate_ns,
        "samples": len(timing.sample.samples_ns),
        "kernel_abi": timing.kernel_abi,
        "standing": preferred.standing.value,
        "stale": stale,
        "machine": machines[timing.origin.machine],
    }


def stats_fields(name: str, stats: StoreStats, current_builds: Collection[str]) -> dict[str, Any]:
    """The JSON that `--json` prints."""
    machines = labels(signature.machine for signature in stats.signatures)
    return {
        "database": name,
        "exists": True,
        "schema": stats.revision,
        "file_bytes": stats.file_bytes,
        "rows": dict(stats.rows),
        "by_machine": [
            {
                "machine": machines[signature.machine],
                "measurements": signature.measurements,
                "service_plans": signature.service_plans,
                "step_times": signature.step_times,
            }
            for signature in stats.signatures
        ],
        "by_build": [
            {
                "build": build.kernel_abi,
                "measurements": build.measurements,
                "unverified": build.unverified,
                "state": _build_state(build.kernel_abi, current_builds),
            }
            for build in stats.builds
        ],
        "machines": machine_fields(machines),
    }


def _build_state(kernel_abi: str, current_builds: Collection[str]) -> str:
    from phasewise.kerneldb.upkeep import is_stale

    if kernel_abi in current_builds:
        return "current"
    return "stale" if is_stale(kernel_abi, current_builds) else "elsewhere"


def diff_fields(diff: Diff, machines: Machines) -> list[dict[str, Any]]:
    """One object a key that differs; null where a side knows nothing of it."""
    from dataclasses import asdict

    return [
        {
            **asdict(difference.key.problem),
            "kernel_abi": difference.key.kernel_abi,
            "machine": machines[difference.key.machine],
            "here": difference.here and asdict(difference.here.schedule),
            "there": difference.there and asdict(difference.there.schedule),
            "here_standing": difference.here and difference.here.standing.value,
            "there_standing": difference.there and difference.there.standing.value,
        }
        for difference in diff.differences
    ]


def other_diff_fields(diff: Diff, machines: Machines) -> list[dict[str, Any]]:
    """One object a plan, a storage, a predictor or a user's kernel that differs."""
    return [
        {
            "kind": difference.kind,
            "of": difference.of,
            "kernel_abi": difference.kernel_abi,
            "machine": machines[difference.machine],
            "here": difference.here,
            "there": difference.there,
        }
        for difference in diff.others
    ]


def machine_fields(machines: Machines) -> list[dict[str, str]]:
    """The signatures are too long for a table, so tables name machines by number and this is the legend."""
    return [
        {"machine": label, "core": key.core_sig, "placement": key.placement_sig}
        for key, label in machines.items()
    ]


def labels(machines: Iterable[MachineKey]) -> Machines:
    """A short label for each kind of machine, by its signatures: the same in every listing of a database."""
    return {machine: f"#{number}" for number, machine in enumerate(sorted(set(machines), key=str), start=1)}

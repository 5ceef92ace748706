"""A verdict as JSON values and back: what one process tells another that shares its study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from phasewise.kerneldb.records import Comparison
from phasewise.tuner.config.references import Reference
from phasewise.tuner.plans import ServicePlan
from phasewise.workflows.tune_config.verdict import Finalist, PhaseVerdict, Versus


def verdict_fields(verdict: PhaseVerdict) -> dict[str, Any]:
    """All of it."""
    return {
        "phase": verdict.phase,
        "plan": _plan_fields(verdict.plan),
        "latency_ms": verdict.latency_ms,
        "winner": _plan_fields(verdict.winner),
        "standing": verdict.standing,
        "against": [_versus_fields(versus) for versus in verdict.against],
        "finalists": [
            {**vars(finalist), "plan": _plan_fields(finalist.plan)} for finalist in verdict.finalists
        ],
    }


def verdict_of(fields: Mapping[str, Any]) -> PhaseVerdict:
    """The verdict that has these fields."""
    return PhaseVerdict(
        phase=fields["phase"],
        plan=_plan_of(fields["plan"]),
        latency_ms=fields["latency_ms"],
        winner=_plan_of(fields["winner"]),
        standing=fields["standing"],
        against=tuple(map(_versus_of, fields["against"])),
        finalists=tuple(
            Finalist(**{**finalist, "plan": _plan_of(finalist["plan"])}) for finalist in fields["finalists"]
        ),
    )


def _versus_fields(versus: Versus) -> dict[str, Any]:
    habit = versus.reference
    plan = habit.plan and _plan_fields(habit.plan)
    comparison = versus.comparison and asdict(versus.comparison)
    return {**vars(versus), "reference": {**vars(habit), "plan": plan}, "comparison": comparison}


def _versus_of(fields: Mapping[str, Any]) -> Versus:
    habit, comparison = fields["reference"], fields["comparison"]
    reference = Reference(**{**habit, "plan": habit["plan"] and _plan_of(habit["plan"])})
    compared = comparison and Comparison(**comparison)
    return Versus(**{**fields, "reference": reference, "comparison": compared})


def _plan_fields(plan: ServicePlan) -> dict[str, str]:
    return {"source": plan.source, "json": plan.to_json()}


def _plan_of(fields: Mapping[str, Any]) -> ServicePlan:
    return ServicePlan.from_json(fields["json"], fields["source"])

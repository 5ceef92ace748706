"""Simulated and provisioned clusters as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phasewise.cluster.simulated.metrics import Slo, Summary, broken

if TYPE_CHECKING:
    from phasewise.cluster.simulated.simulate import ClusterSpec
    from phasewise.workflows.capacity.embeddings import EmbeddingDay
    from phasewise.workflows.capacity.provision import Provisioned


def simulation_fields(spec: ClusterSpec, summary: Summary, slo: Slo | None) -> dict[str, Any]:
    """The same for a script."""
    return {
        "policy": spec.policy,
        "pools": _pool_fields(spec),
        "cost": spec.cost,
        "power_w": spec.power_w,
        **_summary_fields(summary, slo, with_occupancy=True),
    }


def _pool_fields(spec: ClusterSpec) -> list[dict[str, Any]]:
    return [{"role": pool.role, "machine": pool.machine.name, "count": pool.count} for pool in spec.pools]


def _summary_fields(summary: Summary, slo: Slo | None, *, with_occupancy: bool) -> dict[str, Any]:
    failures = None if slo is None else broken(summary, slo)
    return {
        "n_requests": summary.n_requests,
        "output_tokens": summary.output_tokens,
        "duration_s": summary.duration_s,
        "times_s": {metric: _named(values) for metric, values in summary.times_s.items()},
        "slowdowns": None
        if summary.slowdowns is None
        else {metric: _named(values) for metric, values in summary.slowdowns.items()},
        "machines": [
            {
                "role": use.role,
                "machine": use.machine,
                "count": use.count,
                "utilisation": use.utilisation,
                **({"occupancy": [list(row) for row in use.occupancy]} if with_occupancy else {}),
            }
            for use in summary.uses
        ],
        "kv_transfers": {"count": summary.n_transfers, "wait_s": _named(summary.transfer_s)},
        "n_preemptions": summary.n_preemptions,
        "slo": None
        if slo is None or failures is None
        else {"name": slo.name, "kept": not failures, "broken": failures},
    }


def _named(values: Mapping[int, float]) -> dict[str, float]:
    return {f"p{percentile}": value for percentile, value in values.items()}


def provision_fields(answers: Sequence[Provisioned], slo: Slo) -> dict[str, Any]:
    """The same for a script."""
    return {"slo": slo.name, "designs": [_answer_fields(answer, slo) for answer in answers]}


def _answer_fields(answer: Provisioned, slo: Slo) -> dict[str, Any]:
    fields: dict[str, Any] = {"design": answer.design.name, "n_runs": answer.n_runs, "reason": answer.reason}
    if answer.spec is None or answer.summary is None:
        return fields
    return {
        **fields,
        "pools": _pool_fields(answer.spec),
        "rate": answer.rate,
        "cost": answer.spec.cost,
        "power_w": answer.spec.power_w,
        "n_machines": answer.spec.n_machines,
        "bound_used": answer.tightness,
        "frontier": [list(cell) for cell in answer.frontier],
        **_summary_fields(answer.summary, slo, with_occupancy=False),
    }


def embedding_fields(answer: EmbeddingDay) -> dict[str, Any]:
    """A day of embedding queries, for a script. Costs are of a day; shares from 0 to 1."""
    return {
        "slo_s": answer.slo_s,
        "queries_per_s": list(answer.day.rates),
        "fleets": [
            {**asdict(fleet), "saved": answer.saved(fleet.deployed) if fleet.uses_cpus else 0.0}
            for fleet in answer.fleets
        ],
        "saved_at_most": answer.saved_at_most,
    }

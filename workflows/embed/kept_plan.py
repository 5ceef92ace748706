"""The plan of an embedding model in the tuning database."""

from __future__ import annotations

import time

from phasewise._version import __version__
from phasewise.kerneldb.location import locate
from phasewise.kerneldb.records import Origin, PlanRecord
from phasewise.kerneldb.start_reads import open_start_reads
from phasewise.serving.embedding.plan import PHASE, EmbeddingPlan, placed_json, stored_plan
from phasewise.serving.errors import ServingError
from phasewise.serving.models.packed_model import PackedModel
from phasewise.topology import Machine
from phasewise.tuner.plans import machine_key, model_key
from phasewise.workflows.report import Report


def keep_plan(
    db: str | None, model: PackedModel, machine: Machine, plan: EmbeddingPlan, report: Report
) -> None:
    """Append a plan to the database; from now on that plan is in use. Raises KernelDbError."""
    from phasewise.kerneldb.store import open_store

    origin = Origin(machine_key(machine), __version__, time.time_ns() // 1_000_000)
    objectives = {} if plan.slo_s is None else {"slo_s": plan.slo_s}
    key = model_key(model.name, model.format)
    with open_store(db, report) as store:
        store.add([PlanRecord(key, PHASE, placed_json(plan, machine), origin, objectives)])


def kept_plan(db: str | None, model: PackedModel, machine: Machine, report: Report) -> EmbeddingPlan | None:
    """The plan in use; None, and a report, where there is no plan that this process can follow."""
    if locate(db).is_absent:
        return None
    with open_start_reads(db, report) as reads:
        record = reads.newest_plan(machine_key(machine), model_key(model.name, model.format), PHASE)
    if record is None:
        return None
    try:
        source = "database" if record.origin.verified else "imported"
        return stored_plan(record.plan_json, machine, source)
    except ServingError as error:
        report(f"the embedding plan in the database is set aside, the default is used: {error}")
        return None

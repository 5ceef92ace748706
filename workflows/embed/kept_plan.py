"""The plan of an embedding model in the tuning database, and the file that an earlier version kept it in."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from phasewise._version import __version__
from phasewise._words import reason_of
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.location import locate
from phasewise.workflows.report import Report

if TYPE_CHECKING:
    from phasewise.serving.embedding.plan import EmbeddingPlan
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.topology import Machine

MOVED = ".moved"
"""Ending of the name of a file whose plan is in the database."""


def keep_plan(
    db: str | None, model: PackedModel, machine: Machine, plan: EmbeddingPlan, report: Report
) -> None:
    """Append a plan; from now on it is the one in use. KernelDbError."""
    from phasewise.kerneldb.records import Origin, PlanRecord
    from phasewise.kerneldb.store import open_store
    from phasewise.serving.embedding.stored_plan import PHASE, placed_json
    from phasewise.tuner.plans import machine_key, model_key

    origin = Origin(machine_key(machine), __version__, time.time_ns() // 1_000_000)
    objectives = {} if plan.slo_s is None else {"slo_s": plan.slo_s}
    key = model_key(model.name, model.format)
    with open_store(db, report) as store:
        store.add([PlanRecord(key, PHASE, placed_json(plan, machine), origin, objectives)])


def kept_plan(db: str | None, model: PackedModel, machine: Machine, report: Report) -> EmbeddingPlan | None:
    """The plan in use; None where there is none that this process can follow, which is told."""
    from phasewise.serving.embedding.stored_plan import PHASE, stored_plan
    from phasewise.serving.errors import ServingError
    from phasewise.tuner.plans import machine_key, model_key

    record = None
    if not locate(db).is_absent:
        from phasewise.kerneldb.start_reads import open_start_reads

        with open_start_reads(db, report) as reads:
            record = reads.newest_plan(machine_key(machine), model_key(model.name, model.format), PHASE)
    if record is None:
        return _moved_plan(db, model, machine, report)
    try:
        source = "database" if record.origin.verified else "imported"
        return stored_plan(record.plan_json, machine, source)
    except ServingError as error:
        report(f"the embedding plan in the database is set aside, the default is used: {error}")
        return None


def _moved_plan(db: str | None, model: PackedModel, machine: Machine, report: Report) -> EmbeddingPlan | None:
    """The plan of an earlier version's file, which goes into the database once."""
    from phasewise.serving.embedding.plan import load_plan, plan_file
    from phasewise.serving.errors import ServingError
    from phasewise.topology import placement_signature

    path = plan_file(model.name, model.format, placement_signature(machine, machine.allowed_pus))
    try:
        plan = load_plan(path, frozenset(machine.allowed_pus))
    except ServingError as error:
        report(f"{error}; the default is used")
        return None
    if plan is not None:
        try:
            keep_plan(db, model, machine, plan, report)
            Path(path).rename(path.with_name(path.name + MOVED))
        except (KernelDbError, OSError) as error:
            report(f"the embedding plan {path} is used, and stays a file: {reason_of(error)}")
        else:
            report(f"the embedding plan {path} is in the database now")
    return plan

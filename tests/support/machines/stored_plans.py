"""Service plans in a tuning database, as `db set-plan` keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from phasewise.kerneldb.records import Origin, PlanRecord
from phasewise.kerneldb.store import open_store
from phasewise.topology import Machine
from phasewise.tuner.plans import Phase, ServicePlan, machine_key, rank_on


def keep_plan(db: Path, machine: Machine, key: str, phase: Phase, *ranks: Iterable[int]) -> None:
    """The plan of one phase; ranks: the cores of each. key: the model's name and format, `tiny@native`."""
    plan = ServicePlan(phase, tuple(rank_on(machine, tuple(cores)) for cores in ranks), "database")
    with open_store(db) as store:
        store.add_plan(PlanRecord(key, phase, plan.to_json(), Origin(machine_key(machine), "0", 1)))

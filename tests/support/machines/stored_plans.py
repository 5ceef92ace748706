"""Plans in a tuning database, as `db set-plan` and `tune-embed` keep them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from phasewise.kerneldb.records import Origin, PlanRecord
from phasewise.kerneldb.store import open_store
from phasewise.serving.embedding.plan import PHASE, EmbeddingPlan, Instance, placed_json
from phasewise.topology import Machine
from phasewise.tuner.plans import Phase, ServicePlan, machine_key, rank_on


def keep_plan(db: Path, machine: Machine, key: str, phase: Phase, *ranks: Iterable[int]) -> None:
    """The plan of one phase; ranks: the cores of each. key: the model's name and format, `tiny@native`."""
    plan = ServicePlan(phase, tuple(rank_on(machine, tuple(cores)) for cores in ranks), "database")
    _keep(db, machine, key, phase, plan.to_json())


def keep_banded_plan(db: Path, machine: Machine, key: str, bands: Mapping[int, tuple[int, ...]]) -> None:
    """Decode's plan, of one rank. bands: the cores from each number of sequences on, the first from 1."""
    first, *others = bands.items()
    plan = ServicePlan("decode", (rank_on(machine, first[1]),), "database")
    for sequences, cores in others:
        plan = plan.with_band(sequences, (rank_on(machine, cores),))
    _keep(db, machine, key, "decode", plan.to_json())


def keep_embedding_plan(db: Path, machine: Machine, key: str, *instances: Iterable[int]) -> None:
    """instances: the cores of each."""
    plan = EmbeddingPlan(
        tuple(Instance(f"cpu:{index}", tuple(cores)) for index, cores in enumerate(instances))
    )
    _keep(db, machine, key, PHASE, placed_json(plan, machine))


def _keep(db: Path, machine: Machine, key: str, phase: str, plan_json: str) -> None:
    with open_store(db) as store:
        store.add([PlanRecord(key, phase, plan_json, Origin(machine_key(machine), "0", 1))])

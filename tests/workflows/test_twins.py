"""Two hosts of a kind, one with its CPUs numbered in another way: what the one learnt, the other has."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from phasewise.kerneldb.product_counts import count_products
from phasewise.kerneldb.records import Origin, PlanRecord
from phasewise.kerneldb.store import open_store
from phasewise.serving.embedding import plan as embedding_plan
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance
from phasewise.topology import Machine, core_signature, placement_signature, places_of, read_lstopo
from phasewise.tuner.plans import PHASES, ServicePlan, machine_key, placed_json, rank_on, resolve_plans
from phasewise.workflows.database.remote import pull, push
from phasewise.workflows.database.settings import Leaving, Trust
from tests.support.machines.kerneldb_examples import MEASUREMENT, PROMOTION

XML = Path(__file__).parents[1] / "data" / "topology" / "lstopo_v2.xml"
MODEL = "tiny@native"


def renumbered(path: Path, numbers: list[int]) -> Path:
    """The same machine with CPU i called `numbers[i]`: in every set of CPUs, and of each PU."""
    tree = ElementTree.parse(XML)
    for node in tree.iter("object"):
        for name, value in node.attrib.items():
            if name.endswith("cpuset"):
                mask = int(value, 16)
                node.set(name, f"0x{sum(1 << new for old, new in enumerate(numbers) if mask >> old & 1):08x}")
        if node.get("type") == "PU":
            node.set("os_index", str(numbers[int(node.attrib["os_index"])]))
    tree.write(path)
    return path


def learnt(db: Path, machine: Machine) -> dict[str, ServicePlan]:
    """Plans of two ranks for both phases, and a winner on the cores of the first rank."""
    half = len(machine.allowed_pus) // 2
    cores = (machine.allowed_pus[:half], machine.allowed_pus[half : 2 * half])
    plans = {
        phase: ServicePlan(phase, tuple(rank_on(machine, rank_cores) for rank_cores in cores))
        for phase in PHASES
    }
    everywhere, first = (
        Origin(machine_key(machine), "0.1.0", 1),
        Origin(machine_key(machine, cores[0]), "0.1.0", 1),
    )
    with open_store(db) as store:
        for phase, plan in plans.items():
            store.add([PlanRecord(MODEL, phase, placed_json(plan, machine), everywhere)])
        of_vectors = EmbeddingPlan((Instance("cpu:0", cores[0]), Instance("cpu:1", cores[1])))
        text = embedding_plan.placed_json(of_vectors, machine)
        store.add([PlanRecord(MODEL, embedding_plan.PHASE, text, everywhere)])
        store.add([replace(MEASUREMENT, origin=first)])
        store.add([replace(PROMOTION, origin=first)])
    return dict(plans)


@pytest.mark.parametrize("seed", range(3))
def test_a_twin_starts_with_plans_and_schedules_of_the_first(tmp_path: Path, seed: int) -> None:
    numbers = random.Random(seed).sample(range(8), 8)
    here, twin = read_lstopo(XML), read_lstopo(renumbered(tmp_path / "twin.xml", numbers))
    mine, theirs, remote = tmp_path / "here.db", tmp_path / "twin.db", str(tmp_path / "remote")
    plans = learnt(mine, here)
    digest = push(remote, str(mine), Leaving(scores=False), Trust()).digest
    pull(remote, str(theirs), Trust(digest=digest), every_core=True)

    assert core_signature(twin) == core_signature(here)
    said: list[str] = []
    with open_store(theirs) as store:
        own = resolve_plans(store, twin, MODEL, report=said.append)
        assert said == []
        for phase, plan in own.items():
            assert plan.source == "imported"
            for rank, first in zip(plan.ranks, plans[phase].ranks, strict=True):
                assert places_of(twin, rank.cores) == places_of(here, first.cores)
                assert placement_signature(twin, rank.cores) == placement_signature(here, first.cores)
        record = store.newest_plan(machine_key(twin), MODEL, embedding_plan.PHASE)
        assert record is not None
        assert [
            places_of(twin, instance.cores)
            for instance in embedding_plan.stored_plan(record.plan_json, twin).instances
        ] == [places_of(here, first.cores) for first in plans["decode"].ranks]
        key = machine_key(twin, own["decode"].ranks[0].cores)
        assert {row.sample.schedule for row in store.promoted_measurements(key, verified=False)} == {
            MEASUREMENT.sample.schedule
        }
        assert store.promoted_measurements(key) == [], "nothing is used that was not timed here"
        builds = {MEASUREMENT.kernel_abi}
        assert count_products(store, key.core_sig, builds).describe() == (
            "0 tuned here, 1 imported of which 0 verified, 0 set aside"
        )
        verdict = Origin(key, "0.1.0", 2)
        store.add([replace(MEASUREMENT, origin=verdict)])
        store.add([replace(PROMOTION, origin=verdict)])
        assert count_products(store, key.core_sig, builds).describe() == (
            "1 tuned here, 1 imported of which 1 verified, 0 set aside"
        )

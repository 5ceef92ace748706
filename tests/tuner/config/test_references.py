"""A tuned plan is held against the same references on machines of every kind."""

from __future__ import annotations

from dataclasses import replace

from phasewise.topology import Machine
from phasewise.tuner.config.references import (
    ALL_CORES,
    PER_NODE,
    PHYSICAL_CORES,
    Reference,
    references,
    same_cores,
)
from phasewise.tuner.plans import RankCores, ServicePlan
from tests.support.machines.paper_machines import epyc, kunpeng, xeon


def of(machine: Machine, refusal: str | None = None) -> dict[str, Reference]:
    all_references = references(machine, "decode", lambda ranks: refusal)
    return {reference.name: reference for reference in all_references}


def test_all_cores_are_every_allowed_pu_and_physical_ones_are_each_core_once() -> None:
    machine = epyc(threads_a_core=2)
    by_name = of(machine)

    assert by_name[ALL_CORES].plan is not None
    assert by_name[PHYSICAL_CORES].plan is not None
    assert set(by_name[ALL_CORES].plan.cores) == set(range(256))
    assert set(by_name[PHYSICAL_CORES].plan.cores) == set(range(128))


def test_each_node_gets_a_process_that_stays_on_it() -> None:
    plan = of(kunpeng())[PER_NODE].plan

    assert plan is not None
    assert [rank.numa_node for rank in plan.ranks] == list(range(8))
    assert [len(rank.cores) for rank in plan.ranks] == [24] * 8


def test_a_model_that_cannot_be_split_so_often_has_the_reason_instead() -> None:
    by_name = of(kunpeng(), refusal="8 ranks, but 3 KV heads")

    assert by_name[PER_NODE].plan is None
    assert by_name[PER_NODE].reason == "8 ranks, but 3 KV heads"
    assert by_name[ALL_CORES].plan is not None


def test_only_what_the_process_may_use_counts() -> None:
    """The process may use the first three cores of one node of 20 and the last of the other."""
    by_name = of(replace(xeon(), allowed_pus=(0, 1, 2, 39)))
    plans = [reference.plan for reference in by_name.values()]

    assert [plan.cores for plan in plans if plan] == [(0, 1, 2, 39)] * 3
    assert [plan and len(plan.ranks) for plan in plans] == [1, 1, 2]


def test_plans_are_the_same_whatever_the_order_of_their_cores() -> None:
    def plan(*ranks: tuple[int, ...]) -> ServicePlan:
        return ServicePlan("decode", tuple(RankCores(cores) for cores in ranks))

    assert same_cores(plan((0, 1), (2, 3)), plan((3, 2), (1, 0)))
    assert not same_cores(plan((0, 1), (2, 3)), plan((0, 2), (1, 3)))
    assert not same_cores(plan((0, 1, 2, 3)), plan((0, 1), (2, 3)))

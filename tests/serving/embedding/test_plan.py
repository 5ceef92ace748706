"""A stored plan comes back as it was, or is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.devices import (
    accelerators,
    free_cores,
    highest_cores,
    instance_cores,
    rank_of,
)
from phasewise.serving.embedding.plan import EmbeddingPlan, Instance, placed_json, stored_places, stored_plan
from phasewise.serving.embedding.queues import Depth
from phasewise.serving.errors import ServingError
from phasewise.topology import Kind, Machine, read_machine
from tests.support.machines.machine_shapes import machine_of
from tests.support.machines.paper_machines import epyc, kunpeng, xeon
from tests.support.tiers import examples


def test_devices_are_those_whose_files_are_here(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl"):
        (tmp_path / "dev").mkdir(exist_ok=True)
        (tmp_path / "dev" / name).touch()

    assert accelerators(tmp_path, lambda: 1) == ["cuda:0"]
    assert [rank_of(device) for device in ("cuda:0", "exec:1", "cpu:0", "npu:0")] == [0, 0, 1, 1]
    assert accelerators(tmp_path / "nothing", lambda: 4) == []


def test_instances_take_cores_from_the_high_end_and_leave_the_fronts() -> None:
    machine = read_machine()
    cores = sorted(core[0] for core in machine.allowed_cores()) or sorted(machine.allowed_pus)

    (whole,) = instance_cores(machine, 1)

    assert set(whole) <= set(cores)
    if len(cores) > 1:
        (last,) = instance_cores(machine, 1, cores[:-1])
        assert last == (cores[-1],)
        two = instance_cores(machine, 2)
        assert not set(two[0]) & set(two[1])
    with pytest.raises(ValueError, match="instances"):
        instance_cores(machine, len(cores) + 1)


def interleaved() -> Machine:
    """Two nodes of two L3s of two cores; PUs count round the nodes, as some firmware numbers them."""
    return machine_of((2, 2, 2), pus=(0, 4, 2, 6, 1, 5, 3, 7))


PLANTED: dict[str, Machine] = {
    "kunpeng": kunpeng(),
    "epyc": epyc(),
    "xeon": xeon(threads_a_core=2),
    "one node": machine_of((1, 1, 6)),
    "nodes of three": machine_of((2, 1, 3)),
    "interleaved": interleaved(),
    "uneven cpuset": replace(xeon(), allowed_pus=(3, 17, 18, 19, 20, 39)),
}


def nodes_of(machine: Machine) -> list[frozenset[int]]:
    allowed = frozenset(machine.allowed_pus)
    return [own for node in machine.nodes(Kind.NUMA) if (own := allowed.intersection(node.cpus))]


@pytest.mark.parametrize("name", PLANTED)
@examples(60)
@given(data=st.data())
def test_no_instance_crosses_nodes_and_the_highest_cores_go_first(name: str, data: st.DataObject) -> None:
    """However many instances, cores and taken ones there are (section IV-D)."""
    machine = PLANTED[name]
    nodes, free = nodes_of(machine), free_cores(machine, ())
    taken = data.draw(st.sets(st.sampled_from(free), max_size=len(free) - 1))
    left = free_cores(machine, taken)
    n_cores = data.draw(st.integers(1, len(left)))
    n_instances = data.draw(st.integers(1, n_cores))

    usable = highest_cores(machine, taken, n_cores)
    instances = instance_cores(machine, n_instances, taken, n_cores)

    of_all = [core for own in instances for core in own]
    assert len(instances) == n_instances
    assert len(set(of_all)) == len(of_all)
    assert set(of_all) <= set(usable) <= set(left)
    assert len(usable) == n_cores
    for own in instances:
        assert own
        assert any(node.issuperset(own) for node in nodes), own
    of_nodes = [(node.intersection(left), node.intersection(usable)) for node in nodes]
    cut = [(own, used) for own, used in of_nodes if used and used != own]
    assert len(cut) <= 1, "nodes are taken whole, the last one apart"
    lowest_used = min(max(node) for node in nodes if node.intersection(usable))
    assert all(
        max(node) <= lowest_used for node, (own, used) in zip(nodes, of_nodes, strict=True) if own > used
    )
    if n_instances >= len([used for _, used in of_nodes if used]):
        assert set(of_all) == set(usable)


def test_a_quarter_of_the_cores_is_of_one_node_whatever_their_numbers() -> None:
    assert highest_cores(interleaved(), n_cores=2) == [3, 7]
    assert highest_cores(interleaved(), n_cores=4) == [1, 3, 5, 7]
    assert instance_cores(interleaved(), 1, n_cores=4) == [(1, 3, 5, 7)]
    assert instance_cores(interleaved(), 2, n_cores=4) == [(3, 7), (1, 5)], "an L3 each"
    assert instance_cores(interleaved(), 3, n_cores=6) == [(3, 7), (1, 5), (2, 6)]


def test_more_instances_than_nodes_divide_each_node_by_itself() -> None:
    machine = machine_of((2, 1, 3))

    assert instance_cores(machine, 2) == [(3, 4, 5), (0, 1, 2)]
    assert instance_cores(machine, 3) == [(4, 5), (3,), (0, 1, 2)]
    assert instance_cores(machine, 4) == [(4, 5), (3,), (1, 2), (0,)]
    assert instance_cores(kunpeng(), 1) == [tuple(range(168, 192))]


HERE = machine_of([2, 4])
TWIN = machine_of([2, 4], [7, 3, 5, 1, 0, 6, 2, 4])
STORED = EmbeddingPlan(
    (Instance("cpu:0", (4, 5), Depth(9, 700)), Instance("cuda:0", (0,), Depth(20, 999))), 0.5, "x"
)


def test_a_plan_comes_back_and_a_twin_reads_it_in_its_own_numbers() -> None:
    text = placed_json(STORED, HERE)

    assert stored_plan(text, HERE, "x") == STORED
    twin = stored_plan(text, TWIN)
    assert placed_json(twin, TWIN) == text
    assert [instance.cores for instance in twin.instances] != [
        instance.cores for instance in STORED.instances
    ]
    assert stored_places(text) == [[4, 5], [0]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 9}, "that this phasewise reads"),
        ({"pus": 4}, "it is for a process with 4 PUs; this one may use 8"),
        ({"instances": []}, "0 instances"),
        ({"instances": None}, "no plan of embedding"),
        (
            {"instances": [{"device": "cpu:0", "places": [99], "depth": {"inputs": 1, "tokens": 1}}]},
            "no place 99",
        ),
        ({"instances": [{"device": "cpu:0", "places": ["0"], "depth": {"inputs": 1, "tokens": 1}}]}, "whole"),
        ({"instances": [{"device": "tpu:0", "places": [0], "depth": {"inputs": 1, "tokens": 1}}]}, "tpu"),
        ({"slo_s": -1}, "an SLO of -1"),
        ({"slo_s": "soon"}, "no plan of embedding"),
        (
            {"instances": [{"device": "cpu:0", "places": [0], "depth": {"inputs": 0, "tokens": 1}}]},
            "a number 0",
        ),
    ],
)
def test_a_stored_plan_that_is_none_is_refused(change: dict[str, Any], reason: str) -> None:
    text = json.dumps({**json.loads(placed_json(STORED, HERE)), **change})

    with pytest.raises(ServingError, match=reason):
        stored_plan(text, HERE)


def test_a_core_that_may_not_be_used_has_no_place() -> None:
    foreign = replace(STORED, instances=(Instance("cpu:0", (99,)),))

    with pytest.raises(ServingError, match="core 99"):
        placed_json(foreign, HERE)

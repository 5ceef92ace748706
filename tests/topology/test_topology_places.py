"""Places: positions in the tree that like machines share, whatever the numbers of their CPUs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import (
    TopologyError,
    core_signature,
    placement_signature,
    places,
    places_of,
    pus_at,
    read_machine,
)
from phasewise.tuner.plans import ServicePlan, placed_json, rank_on, stored_plan
from tests.support.machines.machine_shapes import machine_of
from tests.support.machines.sysfs_factory import FakeCpu, grid, write_sysfs
from tests.support.tiers import examples


@examples(50)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.randoms(use_true_random=False), st.data())
def test_every_plan_falls_on_like_cores_of_a_twin(
    arities: list[int], rng: random.Random, data: st.DataObject
) -> None:
    """Its placement has the same signature, and there and back it is the same plan."""
    here = machine_of(arities)
    numbers = [pu + 3 for pu in here.allowed_pus]
    rng.shuffle(numbers)
    twin = machine_of(arities, numbers)
    cores = data.draw(st.lists(st.sampled_from(here.allowed_pus), min_size=1, unique=True))

    own = pus_at(twin, places_of(here, cores))
    assert placement_signature(twin, own) == placement_signature(here, cores)
    assert pus_at(here, places_of(twin, own)) == tuple(cores)
    assert sorted(places(twin)) == sorted(twin.allowed_pus)


@pytest.mark.parametrize("shape", [(2, 1, 2, 2, 2), (1, 2, 2, 3, 1), (2, 2, 1, 2, 2)])
def test_a_plan_of_one_host_is_the_same_plan_on_its_twin(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """The kernel of another host numbers CPUs in another way."""
    cpus = grid(*shape)
    numbers = list(range(len(cpus)))
    random.Random(11).shuffle(numbers)
    renumbered = [replace(cpu, cpu=numbers[index]) for index, cpu in enumerate(cpus)]
    here = read_machine(write_sysfs(tmp_path / "here", cpus))
    twin = read_machine(write_sysfs(tmp_path / "twin", renumbered))
    half = len(cpus) // 2
    plan = ServicePlan(
        "decode", (rank_on(here, tuple(range(half))), rank_on(here, tuple(range(half, 2 * half))))
    )

    text = placed_json(plan, here)
    placed = stored_plan(text, twin)

    assert core_signature(here) == core_signature(twin)
    assert stored_plan(text, here).ranks == plan.ranks
    assert placed_json(placed, twin) == text
    for mine, theirs in zip(plan.ranks, placed.ranks, strict=True):
        assert placement_signature(twin, theirs.cores) == placement_signature(here, mine.cores)


def test_kinds_of_cores_are_not_confused(tmp_path: Path) -> None:
    """The fast cores of one host come first, of its twin last; a plan for the fast ones stays with them."""
    fast, slow = 1024, 300
    hosts = [
        read_machine(
            write_sysfs(
                tmp_path / str(index),
                [FakeCpu(cpu=n, core=n, capacity=capacity) for n, capacity in enumerate(capacities)],
            )
        )
        for index, capacities in enumerate(([fast, fast, slow, slow], [slow, slow, fast, fast]))
    ]

    assert set(pus_at(hosts[1], places_of(hosts[0], (0, 1)))) == {2, 3}


def test_what_is_not_there_has_no_place() -> None:
    machine = machine_of([2])

    with pytest.raises(TopologyError, match="core 9"):
        places_of(machine, (9,))
    for place in (2, -1):
        with pytest.raises(TopologyError, match=f"no place {place}"):
            pus_at(machine, (place,))

"""Signatures and places: equal for machines of like shape, whatever the numbers of their CPUs."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import (
    Machine,
    TopologyError,
    core_signature,
    placement_signature,
    places,
    places_of,
    pus_at,
    read_machine,
)
from phasewise.topology.signature import MAX_SIGNATURE_CHARS
from phasewise.tuner.plans import ServicePlan, placed_json, rank_on, stored_plan
from tests.support.machines.machine_shapes import machine_of
from tests.support.machines.sysfs_factory import FakeCpu, grid, write, write_sysfs
from tests.support.tiers import examples

XEON = "vendor_id : GenuineIntel\ncpu family : 6\nmodel : 143\nflags : avx2 avx512f amx_tile\n"


def test_the_shape_of_the_design_note_is_written_as_there(tmp_path: Path) -> None:
    machine = read_machine(write_sysfs(tmp_path, grid(2, 1, 4, 4, 1)))

    assert placement_signature(machine, range(32)) == "32 threads: 2 nodes x 4 L3 x 4 cores"


@pytest.fixture(scope="module")
def even(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return read_machine(write_sysfs(tmp_path_factory.mktemp("even"), grid(2, 2, 2, 2, 2)))


@pytest.mark.parametrize(
    ("cores", "expected"),
    [
        ([0], "1 thread: 1 node x 1 L3 x 1 core"),
        ([0, 1], "2 threads: 1 node x 1 L3 x 2 cores"),
        ([0, 16], "2 threads: 1 node x 1 L3 x 1 core x 2 threads"),
        ([0, 2], "2 threads: 1 node x 2 L3 x 1 core"),
        ([0, 4], "2 threads: 1 package x 2 nodes x 1 L3 x 1 core"),
        ([0, 8], "2 threads: 2 nodes x 1 L3 x 1 core"),
        ([0, 1, 2], "3 threads: 1 node x (1 L3 x 1 core + 1 L3 x 2 cores)"),
    ],
)
def test_what_is_shared_tells_placements_apart(even: Machine, cores: list[int], expected: str) -> None:
    assert placement_signature(even, cores) == expected


def test_the_same_shape_elsewhere_has_the_same_signature(even: Machine) -> None:
    shapes = {placement_signature(even, [first, first + 1]) for first in range(0, 16, 2)}
    assert len(shapes) == 1


def test_numbers_do_not_matter(tmp_path: Path) -> None:
    """Renumbering CPUs, as another firmware would, changes neither signature."""
    cpus = grid(2, 1, 2, 2, 2)
    numbers = list(range(len(cpus)))
    random.Random(7).shuffle(numbers)
    renumbered = [replace(cpu, cpu=numbers[index]) for index, cpu in enumerate(cpus)]
    first = read_machine(write_sysfs(tmp_path / "first", cpus, cpuinfo=XEON))
    second = read_machine(write_sysfs(tmp_path / "second", renumbered, cpuinfo=XEON))

    assert core_signature(first) == core_signature(second)
    assert placement_signature(first, first.allowed_pus) == placement_signature(second, second.allowed_pus)


def test_the_order_of_cores_does_not_matter(tmp_path: Path) -> None:
    machine = read_machine(write_sysfs(tmp_path, grid(1, 2, 1, 2, 1)))

    assert placement_signature(machine, [3, 0, 2]) == placement_signature(machine, [0, 2, 3])


def test_kinds_of_core_tell_placements_apart(tmp_path: Path) -> None:
    cpus = [FakeCpu(cpu=n, core=n, capacity=1024 if n < 2 else 300) for n in range(4)]
    machine = read_machine(write_sysfs(tmp_path, cpus))

    assert placement_signature(machine, [0, 1]) == "2 threads: 1 node x 1 L3 x 2 kind-1 cores"
    assert placement_signature(machine, [2, 3]) == "2 threads: 1 node x 1 L3 x 2 kind-0 cores"


def test_a_shared_l2_is_named(tmp_path: Path) -> None:
    machine = read_machine(write_sysfs(tmp_path, [FakeCpu(cpu=n, core=n, l2=n // 2) for n in range(4)]))

    assert placement_signature(machine, [0, 1, 2, 3]) == "4 threads: 1 node x 1 L3 x 2 L2 x 2 cores"
    assert placement_signature(machine, [0, 2]) == "2 threads: 1 node x 1 L3 x 2 cores"


@pytest.mark.parametrize("cores", [[], [0, 0], [99]])
def test_impossible_placements_are_refused(tmp_path: Path, cores: list[int]) -> None:
    machine = read_machine(write_sysfs(tmp_path, grid(1, 1, 1, 2, 1)))

    with pytest.raises(TopologyError, match="cannot place"):
        placement_signature(machine, cores)


def test_the_core_signature_reads_in_one_line(tmp_path: Path) -> None:
    machine = read_machine(write_sysfs(tmp_path, grid(1, 1, 1, 2, 1), cpuinfo=XEON))

    assert core_signature(machine) == "GenuineIntel 6/143 avx2+avx512f+amx_tile L1d 32K L2 512K"


def test_only_cores_that_may_be_used_count_in_the_core_signature(tmp_path: Path) -> None:
    cpus = [FakeCpu(cpu=n, core=n, l2=n, l2_size=size) for n, size in enumerate(("2048K", "1280K"))]
    machine = read_machine(write_sysfs(tmp_path, cpus, cpuinfo=XEON))

    assert core_signature(machine).endswith("L2 1.25M/2M")
    assert core_signature(replace(machine, allowed_pus=(0,))).endswith("L2 2M")


def test_signatures_are_bounded_and_stay_distinct(tmp_path: Path) -> None:
    """A pathological machine, where no two L3 hold the same number of cores."""
    cpus, core = [], 0
    for l3 in range(20):
        for _ in range(l3 + 1):
            cpus.append(FakeCpu(cpu=core, core=core, l3=l3))
            core += 1
    machine = read_machine(write_sysfs(tmp_path, cpus))

    everything = placement_signature(machine, range(core))
    but_one = placement_signature(machine, range(core - 1))
    assert len(everything) <= MAX_SIGNATURE_CHARS
    assert everything != but_one


def test_spaces_and_separators_in_names_cannot_forge_a_signature(tmp_path: Path) -> None:
    write_sysfs(tmp_path, grid(1, 1, 1, 1, 1))
    write(tmp_path / "proc/cpuinfo", "vendor_id : A B/C+D L2 9M\n")

    assert core_signature(read_machine(tmp_path)).startswith("A-B-C-D-L2-9M ?/? ")


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

"""Signatures: equal for equal shapes, different for different ones, readable, bounded."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.topology import Machine, TopologyError, core_signature, placement_signature, read_machine
from phasewise.topology.signature import MAX_SIGNATURE_CHARS
from tests.support.machines.sysfs_factory import FakeCpu, grid, write, write_sysfs

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

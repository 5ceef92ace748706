"""Machines that do not exist, written as sysfs trees, and what must hold of every tree read from one."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.topology import (
    Kind,
    Machine,
    Node,
    TopologyError,
    placement_signature,
    read_core_kinds,
    read_machine,
)
from tests.support.machines.sysfs_factory import FakeCpu, grid, write, write_sysfs
from tests.support.tiers import examples

SHAPES = st.tuples(*(st.integers(1, 3) for _ in range(5)))


def _assert_partition(node: Node) -> None:
    """Children with CPUs divide some of their parent's among them, each CPU at most once."""
    seen: set[int] = set()
    for child in node.children:
        assert seen.isdisjoint(child.cpus)
        assert set(child.cpus) <= set(node.cpus)
        seen |= set(child.cpus)
        _assert_partition(child)
    assert node.kind is Kind.PU or seen == set(node.cpus)


@examples(10)
@given(shape=SHAPES)
def test_a_regular_machine_is_counted_level_by_level(shape: tuple[int, int, int, int, int]) -> None:
    packages, nodes, l3, cores, threads = shape
    with tempfile.TemporaryDirectory() as folder:
        machine = read_machine(write_sysfs(Path(folder), grid(*shape)))

    counts = machine.counts()
    assert counts.packages == packages
    assert counts.numa_nodes == packages * nodes
    assert counts.l3 == packages * nodes * l3
    assert counts.cores == packages * nodes * l3 * cores
    assert counts.pus == counts.allowed_pus == counts.cores * threads
    _assert_partition(machine.tree)
    assert [len(core) for core in machine.allowed_cores()] == [threads] * counts.cores


def test_threads_of_a_core_are_one_core(tmp_path: Path) -> None:
    machine = read_machine(write_sysfs(tmp_path, grid(1, 1, 1, 2, 2)))

    assert machine.allowed_cores() == ((0, 2), (1, 3))
    core = machine.nodes(Kind.CORE)[0]
    assert (core.l1d_bytes, core.l1i_bytes) == (32 << 10, 16 << 10)
    assert machine.nodes(Kind.L2)[0].size_bytes == 512 << 10
    assert machine.nodes(Kind.NUMA)[0].size_bytes == 4 << 30


def test_online_cpus_are_found_without_the_kernels_list(tmp_path: Path) -> None:
    write_sysfs(tmp_path, grid(1, 1, 1, 2, 1), offline=[7])
    (tmp_path / "sys/devices/system/cpu/online").unlink()
    write(tmp_path / "sys/devices/system/cpu/cpu1/online", "0")

    assert read_machine(tmp_path).tree.cpus == (0,)


def test_memory_without_cpus_counts_as_a_node(tmp_path: Path) -> None:
    machine = read_machine(write_sysfs(tmp_path, grid(1, 1, 1, 2, 1), memory_only={3: 8 << 30}))

    assert machine.counts().numa_nodes == 2
    memory = machine.nodes(Kind.NUMA)[-1]
    assert (memory.os_index, memory.cpus, memory.size_bytes) == (3, (), 8 << 30)


def test_a_kernel_without_numa_has_one_node(tmp_path: Path) -> None:
    cpus = [replace(cpu, node=None) for cpu in grid(1, 1, 1, 2, 1)]

    (node,) = read_machine(write_sysfs(tmp_path, cpus)).nodes(Kind.NUMA)

    assert (node.cpus, node.size_bytes) == ((0, 1), 1 << 30)


def test_a_machine_may_lack_packages_and_caches(tmp_path: Path) -> None:
    cpus = [FakeCpu(cpu=number, core=number, package=None, l3=None, l1d=None) for number in range(3)]

    machine = read_machine(write_sysfs(tmp_path, cpus))

    counts = machine.counts()
    assert (counts.packages, counts.numa_nodes, counts.l3, counts.cores) == (0, 1, 0, 3)
    assert placement_signature(machine, [0, 1]) == "2 threads: 1 node x 2 cores"


def test_caches_may_differ_between_cores(tmp_path: Path) -> None:
    big = [FakeCpu(cpu=n, core=n, l2=n, l2_size="2048K", l1d="48K", capacity=1024) for n in (0, 1)]
    small = [FakeCpu(cpu=n, core=n, l2=9, l2_size="1024K", capacity=400) for n in (2, 3)]

    machine = read_machine(write_sysfs(tmp_path, [*big, *small]))

    assert [node.cpus for node in machine.nodes(Kind.L2)] == [(0,), (1,), (2, 3)]
    assert [(kind.name, kind.cpus) for kind in machine.kinds] == [
        ("capacity-400", (2, 3)),
        ("capacity-1024", (0, 1)),
    ]


def test_intel_hybrid_kinds_come_from_their_pmus(tmp_path: Path) -> None:
    write_sysfs(tmp_path, grid(1, 1, 1, 4, 1))
    write(tmp_path / "sys/devices/cpu_core/cpus", "0-1")
    write(tmp_path / "sys/devices/cpu_atom/cpus", "2-3")

    kinds = read_machine(tmp_path).kinds

    assert kinds == read_core_kinds(tmp_path)
    assert [(kind.name, kind.cpus) for kind in kinds] == [("efficiency", (2, 3)), ("performance", (0, 1))]


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (Kind.CLUSTER, lambda n: {"l2": n, "cluster": n // 2}, [(0, 1), (2, 3)]),  # as Arm has them
        (Kind.CLUSTER, lambda n: {"l2": n // 2, "cluster": n // 2}, []),  # what repeats the L2 is left out
        (Kind.DIE, lambda n: {"die": n // 2, "l3": n // 2}, [(0, 1), (2, 3)]),
        (Kind.NUMA, lambda n: {"node": n % 2, "l3": 0}, [(0, 2), (1, 3)]),  # an L3 encloses two nodes
    ],
)
def test_parts_between_package_and_core_are_levels(
    tmp_path: Path, kind: Kind, fields: Callable[[int], Any], expected: list[tuple[int, ...]]
) -> None:
    machine = read_machine(write_sysfs(tmp_path, [FakeCpu(cpu=n, core=n, **fields(n)) for n in range(4)]))

    assert [node.cpus for node in machine.nodes(kind)] == expected
    if kind is Kind.CLUSTER and expected:
        assert placement_signature(machine, range(4)) == "4 threads: 1 node x 1 L3 x 2 clusters x 2 cores"
    if kind is Kind.NUMA:
        assert [child.kind for child in machine.nodes(Kind.L3)[0].children] == [kind, kind]


SYSTEM = "sys/devices/system"


@pytest.mark.parametrize(
    ("shape", "name", "text", "look", "expected"),
    [
        # Stale files of an offline CPU, and sets that still name it, must not bring it back.
        ((1, 1, 1, 4, 1), "cpu/online", "0,2-3", lambda machine: machine.tree.cpus, (0, 2, 3)),
        # Snapshots are tarballs of files whose size the kernel gave as one page.
        ((1, 1, 1, 2, 1), "cpu/online", "0-1\n\0\0\0", lambda machine: machine.tree.cpus, (0, 1)),
        (
            *((1, 1, 1, 1, 1), "node/node0/memory_side_cache/index1/size", str(96 << 30)),
            *(lambda machine: machine.nodes(Kind.NUMA)[0].memory_cache_bytes, 96 << 30),
        ),
        # Nodes that claim the same CPU are not believed.
        (
            *((1, 2, 1, 2, 1), "node/node1/cpulist", "0-3"),
            *(lambda machine: [node.cpus for node in machine.nodes(Kind.NUMA)], [(0, 1, 2, 3)]),
        ),
    ],
    ids=["an offline CPU", "padding", "a cache at memory", "nodes that share"],
)
def test_what_a_file_says_shows(
    tmp_path: Path,
    shape: tuple[int, int, int, int, int],
    name: str,
    text: str,
    look: Callable[[Machine], object],
    expected: object,
) -> None:
    write_sysfs(tmp_path, grid(*shape))
    write(tmp_path / SYSTEM / name, text)

    assert look(read_machine(tmp_path)) == expected


def test_sets_that_cross_each_other_leave_a_tree(tmp_path: Path) -> None:
    """Firmware that describes an L3 across half of two packages is wrong; the rest of it is still of use."""
    cpus = [FakeCpu(cpu=n, core=n, package=n // 3, node=None, l3=n // 2) for n in range(6)]

    machine = read_machine(write_sysfs(tmp_path, cpus))

    _assert_partition(machine.tree)
    assert machine.counts().cores == 6


def test_kernel_bitmaps_are_read_where_lists_are_missing(tmp_path: Path) -> None:
    write_sysfs(tmp_path, grid(1, 1, 1, 2, 2))
    for folder in (tmp_path / "sys/devices/system/cpu").glob("cpu[0-9]"):
        (folder / "topology/core_cpus_list").unlink()
        write(folder / "topology/thread_siblings", "00000000,00000005" if folder.name in "cpu0 cpu2" else "a")

    assert read_machine(tmp_path).allowed_cores() == ((0, 2), (1, 3))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sys/devices/system/cpu/online", "0-99999"),
        ("sys/devices/system/cpu/online", "3-1"),
        ("sys/devices/system/cpu/online", "zero"),
        ("sys/devices/system/cpu/cpu0/topology/core_id", "first"),
        ("sys/devices/system/cpu/cpu0/cache/index2/size", "K"),
        ("sys/devices/system/cpu/cpu0/topology/core_cpus_list", "0-"),
        ("sys/devices/system/node/node0/meminfo", "Node 0 MemTotal:"),
        ("sys/devices/system/node/node0/cpulist", "0\ufffd"),
    ],
)
def test_damage_is_an_error_that_names_the_snapshot(tmp_path: Path, name: str, text: str) -> None:
    write_sysfs(tmp_path, grid(1, 1, 1, 2, 1))
    write(tmp_path / name, text)

    with pytest.raises(TopologyError, match=re.escape(str(tmp_path))):
        read_machine(tmp_path)


def test_a_folder_that_is_no_snapshot_is_named(tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="sysfs snapshot"):
        read_machine(tmp_path / "nothing")


ARM = (
    "Features : fp asimd asimddp sve i8mm bf16\nCPU implementer : 0x41\nCPU architecture: 8\nCPU part : 0xd4f"
)
AMD = "vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 97\nflags : fpu avx2 fma avx512f\n"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (AMD, ("AuthenticAMD", "25", "97", {"avx2", "fma", "avx512f"})),
        (ARM, ("ARM", "8", "0xd4f", {"asimd", "asimddp", "sve", "i8mm", "bf16"})),
        ("processor : 0\ncpu : POWER9, altivec supported\nrevision : 2.3", ("IBM", "POWER9", None, set())),
        ("", (None, None, None, set())),
    ],
)
def test_cpuinfo_gives_the_cpu_and_the_instruction_sets_that_kernels_use(
    tmp_path: Path, text: str, told: object
) -> None:
    cpu = read_machine(write_sysfs(tmp_path, grid(1, 1, 1, 1, 1), cpuinfo=text)).cpu

    assert (cpu.vendor, cpu.family, cpu.model, cpu.features) == told


def test_this_machine_can_be_read() -> None:
    machine: Machine = read_machine()

    assert machine.allowed_pus
    assert set(machine.allowed_pus) <= set(machine.tree.cpus)
    _assert_partition(machine.tree)


def test_affinity_narrows_what_is_allowed() -> None:
    """A process that narrows its affinity, as taskset would, is allowed no other PU."""
    program = (
        "import os; from phasewise.topology import read_machine; keep = min(os.sched_getaffinity(0));"
        "os.sched_setaffinity(0, {keep}); assert read_machine().allowed_pus == (keep,)"
    )

    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_node_with_neither_memory_nor_cpus_is_no_node(tmp_path: Path) -> None:
    machine = read_machine(write_sysfs(tmp_path, grid(1, 1, 1, 1, 1), memory_only={4: 0}))

    assert machine.counts().numa_nodes == 1


def test_a_cache_that_says_nothing_of_its_cpus_is_its_cores(tmp_path: Path) -> None:
    write_sysfs(tmp_path, grid(1, 1, 1, 2, 2))
    for folder in (tmp_path / "sys/devices/system/cpu").glob("cpu[0-9]"):
        write(folder / "cache/index3/shared_cpu_map", "00000000")
        (folder / "cache/index3/shared_cpu_list").unlink()

    assert [node.cpus for node in read_machine(tmp_path).nodes(Kind.L3)] == [(0, 2), (1, 3)]

"""Handmade sysfs trees: a machine as a list of CPUs, written the way the Linux kernel would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path


@dataclass(frozen=True)
class FakeCpu:
    """One online CPU. Ids are unique over the whole machine; None leaves the files out."""

    cpu: int
    core: int
    package: int | None = 0
    node: int | None = 0
    l3: int | None = 0
    l2: int | None = None
    cluster: int | None = None
    die: int | None = None
    l1d: str | None = "32K"
    l2_size: str = "512K"
    capacity: int | None = None


def grid(packages: int, nodes: int, l3: int, cores: int, threads: int) -> list[FakeCpu]:
    """A regular machine, each number per part above it; as in Linux all first threads are numbered first."""
    places = list(product(range(packages), range(nodes), range(l3), range(cores)))
    return [
        FakeCpu(
            cpu=thread * len(places) + core,
            core=core,
            package=place[0],
            node=place[0] * nodes + place[1],
            l3=(place[0] * nodes + place[1]) * l3 + place[2],
            l2=core,
        )
        for thread in range(threads)
        for core, place in enumerate(places)
    ]


def write_sysfs(
    root: Path,
    cpus: Sequence[FakeCpu],
    offline: Sequence[int] = (),
    memory_only: Mapping[int, int] | None = None,
    cpuinfo: str = "",
) -> Path:
    """Write the tree under `root` and return `root`. `memory_only`: node number to bytes."""
    system = root / "sys/devices/system"
    online = sorted(cpu.cpu for cpu in cpus)
    write(system / "cpu/online", ",".join(map(str, online)))
    for number in offline:
        write(system / f"cpu/cpu{number}/online", "0")
    for cpu in cpus:
        _write_cpu(system / f"cpu/cpu{cpu.cpu}", cpu, cpus)
    for node in sorted({cpu.node for cpu in cpus if cpu.node is not None}):
        _write_node(system, node, _members(cpus, "node", node), 4 << 30)
    for node, size_bytes in (memory_only or {}).items():
        _write_node(system, node, "", size_bytes)
    write(root / "proc/meminfo", "MemTotal:       1048576 kB")
    write(root / "proc/cpuinfo", cpuinfo)
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n", encoding="utf-8")


def _write_cpu(folder: Path, cpu: FakeCpu, cpus: Sequence[FakeCpu]) -> None:
    write(folder / "topology/core_id", str(cpu.core))
    write(folder / "topology/core_cpus_list", _members(cpus, "core", cpu.core))
    write(folder / "topology/physical_package_id", str(-1 if cpu.package is None else cpu.package))
    for name in ("cluster", "die"):
        number = getattr(cpu, name)
        if number is not None:
            write(folder / f"topology/{name}_id", str(number))
            write(folder / f"topology/{name}_cpus_list", _members(cpus, name, number))
    if cpu.capacity is not None:
        write(folder / "cpu_capacity", str(cpu.capacity))
    if cpu.l1d is not None:
        _write_cache(folder / "cache/index0", 1, "Data", cpu.l1d, _members(cpus, "core", cpu.core))
        _write_cache(folder / "cache/index1", 1, "Instruction", "16K", _members(cpus, "core", cpu.core))
    if cpu.l2 is not None:
        _write_cache(folder / "cache/index2", 2, "Unified", cpu.l2_size, _members(cpus, "l2", cpu.l2))
    if cpu.l3 is not None:
        _write_cache(folder / "cache/index3", 3, "Unified", "8192K", _members(cpus, "l3", cpu.l3))


def _write_cache(folder: Path, level: int, kind: str, size: str, members: str) -> None:
    for name, text in (("level", str(level)), ("type", kind), ("size", size), ("shared_cpu_list", members)):
        write(folder / name, text)


def _write_node(system: Path, node: int, members: str, size_bytes: int) -> None:
    write(system / f"node/node{node}/cpulist", members)
    write(system / f"node/node{node}/meminfo", f"Node {node} MemTotal:       {size_bytes >> 10} kB")


def _members(cpus: Sequence[FakeCpu], attribute: str, value: int | None) -> str:
    return ",".join(str(cpu.cpu) for cpu in cpus if getattr(cpu, attribute) == value)

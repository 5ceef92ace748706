"""The machine as the Linux kernel describes it under `/sys/devices/system`, live or in a snapshot.

The folder of a CPU that is offline may still hold stale topology, so every set is cut to the online CPUs.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import or_
from pathlib import Path

from phasewise.topology.cpuinfo import parse_cpuinfo
from phasewise.topology.cpusets import cpus_of, mask_of, parse_kernel_mask, parse_list
from phasewise.topology.nesting import Part, nest
from phasewise.topology.process_limits import ProcessLimits, read_limits, read_text
from phasewise.topology.tree import (
    LIVE,
    Cpu,
    CpuKind,
    Kind,
    Machine,
    MemoryAccess,
    NumaDistances,
    TopologyError,
)

CORE_VARIABLE = "PHASEWISE_CORE"
CACHE_KINDS = {2: Kind.L2, 3: Kind.L3, 4: Kind.L4}
SIZE_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
NODES = Path("sys/devices/system/node")

UNKNOWN_IDS = {None, -1, 65_535}
"""The number that the kernel writes as package, die or cluster where the firmware gives none."""

MEGABYTE = 1_000_000
"""Bytes in the unit of HMAT bandwidths; latencies are nanoseconds."""

ACCESS_CLASSES = ("access1", "access0")
"""Folders of a node's memory access, as the CPUs nearest to it have it; the class of older kernels counts
other devices too."""

HYBRID_UNITS = (("low-power", "cpu_lowpower"), ("efficiency", "cpu_atom"), ("performance", "cpu_core"))
"""Names and PMU devices of Intel's core kinds, slowest first."""


def read_machine(root: Path = Path("/")) -> Machine:
    """The machine under `root`: `/` for the running one, any other folder for a snapshot. Allowed is what
    this process may use of the running machine, and every online CPU of a snapshot. TopologyError if there is
    nothing to read or it makes no sense."""
    is_live = root == Path("/")
    try:
        online = _online(root / "sys/devices/system/cpu", is_live)
        limits = read_limits(root) if is_live else ProcessLimits(online, None)
        if not limits.allowed & online:
            raise TopologyError(f"none of the CPUs that {root} describes is allowed to this process")
        parts = _cpu_parts(root / "sys/devices/system/cpu", online) + _memory_parts(root, online)
        return Machine(
            source=LIVE if is_live else str(root),
            tree=nest(parts, online),
            cpu=_cpu(root, is_live),
            allowed_pus=cpus_of(limits.allowed & online),
            cpu_quota=limits.cpu_quota,
            kinds=_kinds(root, online),
            distances=_distances(root / NODES),
            memory=_memory_access(root / NODES, online),
        )
    except ValueError as error:
        raise TopologyError(f"the description of the machine under {root} is damaged: {error}") from error


def _cpu(root: Path, is_live: bool) -> Cpu:
    cpu = parse_cpuinfo(read_text(root / "proc/cpuinfo") or "", platform.machine() if is_live else None)
    override = os.environ.get(CORE_VARIABLE) if is_live else None
    return replace(cpu, core_override=override) if override else cpu


def _online(cpu_root: Path, is_live: bool) -> int:
    """The mask of online CPUs: from the kernel's list, else from the folders of the CPUs."""
    listed = read_text(cpu_root / "online")
    if listed:
        return parse_list(listed)
    folders = {int(path.name[3:]): path for path in cpu_root.glob("cpu[0-9]*") if path.name[3:].isdigit()}
    online = mask_of(
        cpu
        for cpu, path in folders.items()
        if (path / "topology").is_dir() and read_text(path / "online") != "0"
    )
    if online:
        return online
    if is_live:  # A sandbox without sysfs still has CPUs to run on.
        return mask_of(os.sched_getaffinity(0))
    raise TopologyError(f"no CPUs described in {cpu_root}: is it the root of a sysfs snapshot?")


def _cpu_parts(cpu_root: Path, online: int) -> list[Part]:
    """PUs, cores, clusters, dies, packages and caches."""
    groups: dict[tuple[Kind, int], Part] = {}
    packages: dict[int, int] = {}
    for cpu in cpus_of(online):
        folder = cpu_root / f"cpu{cpu}"
        package = _number(folder / "topology/physical_package_id")
        if package not in UNKNOWN_IDS and package is not None:
            packages[package] = packages.get(package, 0) | 1 << cpu
        for part in (*_topology_parts(folder, cpu, online), *_cache_parts(folder, cpu, online)):
            groups.setdefault((part.kind, part.mask), part)
    package_parts = [Part(Kind.PACKAGE, number, mask) for number, mask in packages.items()]
    return package_parts + _meaningful(list(groups.values()), set(packages.values()))


def _meaningful(parts: list[Part], packages: set[int]) -> list[Part]:
    """The parts without the dies and clusters that only repeat a package, an L2 or a core."""
    by_kind: dict[Kind, set[int]] = {kind: {p.mask for p in parts if p.kind is kind} for kind in Kind}
    repeats = {
        Kind.DIE: packages,
        Kind.CLUSTER: packages | by_kind[Kind.CORE] | by_kind[Kind.L2] | by_kind[Kind.L3],
    }
    return [part for part in parts if part.mask not in repeats.get(part.kind, ())]


def _topology_parts(folder: Path, cpu: int, online: int) -> list[Part]:
    own = 1 << cpu
    core = _core_mask(folder, cpu, online)
    l1d, l1i = _l1_sizes(folder)
    parts = [
        Part(Kind.PU, cpu, own),
        Part(Kind.CORE, _number(folder / "topology/core_id"), core, l1d_bytes=l1d, l1i_bytes=l1i),
    ]
    for kind, name in ((Kind.CLUSTER, "cluster"), (Kind.DIE, "die")):
        number = _number(folder / f"topology/{name}_id")
        mask = _shared(folder / "topology", (f"{name}_cpus",), online)
        if number not in UNKNOWN_IDS and mask & own:
            parts.append(Part(kind, number, mask))
    return parts


def _core_mask(folder: Path, cpu: int, online: int) -> int:
    return _shared(folder / "topology", ("core_cpus", "thread_siblings"), online) | 1 << cpu


def _cache_parts(folder: Path, cpu: int, online: int) -> list[Part]:
    parts = []
    for index in sorted((folder / "cache").glob("index[0-9]*")):
        kind = CACHE_KINDS.get(_number(index / "level") or 0)
        if kind is not None and read_text(index / "type") != "Instruction":
            mask = _shared(index, ("shared_cpu",), online)
            if not mask & 1 << cpu:  # Not said, or nonsense: the threads of a core share its caches at least.
                mask = _core_mask(folder, cpu, online)
            parts.append(Part(kind, _number(index / "id"), mask, size_bytes=_size(index / "size")))
    return parts


def _l1_sizes(folder: Path) -> tuple[int | None, int | None]:
    """Sizes of the L1 data (or unified) and instruction cache, bytes."""
    data = instruction = None
    for index in sorted((folder / "cache").glob("index[0-9]*")):
        if _number(index / "level") == 1:
            if read_text(index / "type") == "Instruction":
                instruction = _size(index / "size")
            else:
                data = _size(index / "size")
    return data, instruction


def _memory_parts(root: Path, online: int) -> list[Part]:
    """NUMA nodes; a kernel without them, or one that puts a CPU in two, has one that holds everything."""
    parts: list[Part] = []
    seen = 0
    is_sound = True
    for folder in sorted((root / NODES).glob("node[0-9]*")):
        number = int(folder.name.removeprefix("node"))
        mask = _node_cpus(folder) & online
        is_sound, seen = is_sound and not mask & seen, seen | mask
        cache = sum(_size(path) or 0 for path in folder.glob("memory_side_cache/index*/size"))
        part = Part(
            Kind.NUMA,
            number,
            mask,
            size_bytes=_meminfo_bytes(folder / "meminfo", f"Node {number} MemTotal:"),
            memory_cache_bytes=cache or None,
        )
        if part.mask or part.size_bytes:  # The rest are initiators: devices that only access memory.
            parts.append(part)
    if parts and is_sound:
        return parts
    return [Part(Kind.NUMA, 0, online, size_bytes=_meminfo_bytes(root / "proc/meminfo", "MemTotal:"))]


def _node_cpus(folder: Path) -> int:
    bitmap = read_text(folder / "cpumap")
    return parse_kernel_mask(bitmap) if bitmap else parse_list(read_text(folder / "cpulist") or "")


def _node_folders(nodes: Path) -> dict[int, Path]:
    """The folders of NUMA nodes by number, ascending: the order in which the kernel writes a row of
    distances."""
    by_number = {path.name[4:]: path for path in nodes.glob("node[0-9]*") if path.name[4:].isdigit()}
    return {int(number): by_number[number] for number in sorted(by_number, key=int)}


def _distances(nodes: Path) -> NumaDistances | None:
    """The distances between NUMA nodes; None with one node, where a node is not rated, or a row is not as
    long as there are nodes."""
    folders = _node_folders(nodes)
    texts = {number: read_text(folder / "distance") or "" for number, folder in folders.items()}
    rows = tuple(tuple(int(word) for word in text.split()) for text in texts.values())
    if len(rows) < 2 or any(len(row) != len(rows) for row in rows):
        return None
    return NumaDistances(tuple(folders), rows)


def _memory_access(nodes: Path, online: int) -> tuple[MemoryAccess, ...]:
    """Bandwidths and latencies of each node in the firmware's HMAT, by its nearest initiators."""
    folders = _node_folders(nodes)
    accesses = []
    for number, folder in folders.items():
        access = next((folder / name for name in ACCESS_CLASSES if (folder / name).is_dir()), None)
        if access is None:
            continue
        initiators = access / "initiators"
        near = (_node_cpus(folders[other]) for other in _node_folders(initiators) if other in folders)
        values = [
            _positive(initiators / name)
            for name in ("read_bandwidth", "write_bandwidth", "read_latency", "write_latency")
        ]
        if any(values):
            read, write, read_ns, write_ns = values
            cpus = cpus_of(reduce(or_, near, 0) & online)
            accesses.append(
                MemoryAccess(number, cpus, _megabytes(read), _megabytes(write), read_ns, write_ns)
            )
    return tuple(accesses)


def _megabytes(count: int | None) -> int | None:
    return None if count is None else count * MEGABYTE


def _positive(path: Path) -> int | None:
    """The number in a file, if above zero, which is how the kernel writes unknown; else None."""
    return max(_number(path) or 0, 0) or None


def read_core_kinds(root: Path = Path("/")) -> tuple[CpuKind, ...]:
    """The kinds of core of the machine under `root`, slowest first; none where all are alike. TopologyError
    as `read_machine`."""
    try:
        return _kinds(root, _online(root / "sys/devices/system/cpu", root == Path("/")))
    except ValueError as error:
        raise TopologyError(f"the kinds of cores cannot be read: {error}") from error


def _kinds(root: Path, online: int) -> tuple[CpuKind, ...]:
    """The kinds of core of a hybrid machine, from Intel's PMU devices or from Arm's capacities."""
    listed = {name: read_text(root / "sys/devices" / pmu / "cpus") for name, pmu in HYBRID_UNITS}
    masks = {name: parse_list(text or "") & online for name, text in listed.items()}
    kinds = {name: mask for name, mask in masks.items() if mask}
    if len(kinds) < 2:
        capacities: dict[int, int] = {}
        for cpu in cpus_of(online):
            capacity = _number(root / f"sys/devices/system/cpu/cpu{cpu}/cpu_capacity")
            if capacity is not None:
                capacities[capacity] = capacities.get(capacity, 0) | 1 << cpu
        kinds = {f"capacity-{capacity}": capacities[capacity] for capacity in sorted(capacities)}
    return tuple(CpuKind(name, cpus_of(mask)) for name, mask in kinds.items()) if len(kinds) > 1 else ()


def _shared(folder: Path, names: tuple[str, ...], online: int) -> int:
    """The first CPU set found among `names`: the bitmap `<name>` or `<name>_map`, else `<name>_list`."""
    readers: tuple[tuple[str, Callable[[str], int]], ...] = (
        ("", parse_kernel_mask),
        ("_map", parse_kernel_mask),
        ("_list", parse_list),
    )
    for name in names:
        for suffix, parse in readers:
            text = read_text(folder / f"{name}{suffix}")
            if text:
                return parse(text) & online
    return 0


def _meminfo_bytes(path: Path, label: str) -> int | None:
    for line in (read_text(path) or "").splitlines():
        if line.strip().startswith(label):
            kilobytes = line.strip()[len(label) :].removesuffix("kB")
            return max(int(kilobytes), 0) * 1024
    return None


def _size(path: Path) -> int | None:
    """The bytes that a file states as `32K`, `1M` or a bare number; None if absent or zero."""
    text = read_text(path)
    if not text:
        return None
    unit = SIZE_UNITS.get(text[-1], 1)
    size_bytes = int(text if unit == 1 else text[:-1]) * unit
    return size_bytes if size_bytes > 0 else None


def _number(path: Path) -> int | None:
    text = read_text(path)
    return int(text) if text else None

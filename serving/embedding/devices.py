"""Devices of a host that can embed, and the cores of a CPU instance: WindVE's detector and affinity rule.

GPUs are found in /dev and by the driver's library; no framework is imported. `root` stands for / in tests.
Other accelerators are added by a command of the user (`exec:COMMAND`), a worker that speaks `protocol`."""

from __future__ import annotations

import ctypes
import shlex
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TypeAlias

from phasewise._words import counted, plural
from phasewise.serving.embedding.queues import CPU_RANK
from phasewise.topology import Kind, Machine

EXEC = "exec:"
Command: TypeAlias = tuple[str, ...]


def cuda_devices() -> int:
    """The number of devices that the CUDA driver reports; 0 without a driver, or where the driver fails."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return max(0, count.value)


def accelerators(root: Path = Path("/"), count_cuda: Callable[[], int] = cuda_devices) -> list[str]:
    """The names of GPUs: as many as have device files and are reported by the driver. A container may have a
    device file without the driver, or hide devices from the driver."""
    nodes = [path for path in root.glob("dev/nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
    return [f"cuda:{index}" for index in range(min(len(nodes), count_cuda()) if nodes else 0)]


def command_of(text: str) -> Command:
    """The words of `exec:COMMAND`. ValueError, saying why: another text, or a program that is not found."""
    if not text.startswith(EXEC):
        raise ValueError(f"{text[:80]}: a device is exec:COMMAND")
    try:
        words = shlex.split(text[len(EXEC) :])
    except ValueError as error:
        raise ValueError(f"{text[:80]}: {error}") from None
    if not words:
        raise ValueError(f"{text[:80]}: a command is missing behind {EXEC}")
    if shutil.which(words[0]) is None:
        raise ValueError(f"{text[:80]}: there is no program {words[0][:80]}")
    return tuple(words)


def rank_of(device: str) -> int:
    """The rank of a device by its name: devices of lower rank are filled first."""
    return 0 if device.startswith(("cuda:", EXEC)) else CPU_RANK


def instance_cores(
    machine: Machine, n_instances: int, taken: Collection[int] = (), n_cores: int | None = None
) -> list[tuple[int, ...]]:
    """Cores for each CPU instance: from the highest down, never across NUMA nodes (the paper's section IV-D).

    Frameworks run on cores with low numbers. Fewer instances than nodes have a whole node each; more divide
    the nodes as evenly as possible. `taken`: PUs in use by other programs. `n_cores`: cores of all instances
    together; None: all free cores. ValueError where there are fewer cores than instances, or than asked
    for."""
    usable = highest_cores(machine, taken, n_cores)
    if n_cores is not None and n_cores > len(usable):
        raise ValueError(f"{counted(n_cores, 'core')} for embeddings: {len(usable)} are there for them")
    if not 1 <= n_instances <= len(usable):
        raise ValueError(
            f"{counted(n_instances, 'instance')} of at least one core each: "
            f"{counted(len(usable), 'core')} {plural(len(usable), 'is', 'are')} there for them"
        )
    nodes = cores_by_node(machine, usable)[:n_instances]
    counts = [1] * len(nodes)
    for _ in range(n_instances - len(nodes)):
        fullest = max(range(len(nodes)), key=lambda node: len(nodes[node]) / counts[node])
        counts[fullest] += 1
    return [own for node, count in zip(nodes, counts, strict=True) for own in _shares(node, count)]


def _shares(cores: Sequence[int], count: int) -> Iterator[tuple[int, ...]]:
    """The cores divided in order into `count` shares of equal size; the first shares have one more."""
    share, extra = divmod(len(cores), count)
    start = 0
    for number in range(count):
        end = start + share + (number < extra)
        yield tuple(sorted(cores[start:end]))
        start = end


def free_cores(machine: Machine, taken: Collection[int]) -> list[int]:
    """The first PU of every allowed core that has no PU in `taken`."""
    cores = machine.allowed_cores() or [(pu,) for pu in machine.allowed_pus]
    return sorted(core[0] for core in cores if not set(core).intersection(taken))


def highest_cores(machine: Machine, taken: Collection[int] = (), n_cores: int | None = None) -> list[int]:
    """The highest `n_cores` free cores, or fewer where fewer are free; None: all. The cores of one NUMA node
    are taken before those of the next."""
    ordered = [core for node in cores_by_node(machine, free_cores(machine, taken)) for core in node]
    return sorted(ordered[:n_cores])


def cores_by_node(machine: Machine, cores: Collection[int]) -> list[list[int]]:
    """Cores of each NUMA node, the highest nodes and cores first; cores that share an L3 stand together."""
    tops = [
        {pu: max(part.cpus) for part in machine.nodes(kind) if part.cpus for pu in part.cpus}
        for kind in (Kind.NUMA, Kind.L3)
    ]

    def place(core: int) -> tuple[int, ...]:
        return (*(top.get(core, -1) for top in tops), core)

    ordered = sorted(cores, key=place, reverse=True)
    return [list(own) for _, own in groupby(ordered, key=lambda core: place(core)[0])]

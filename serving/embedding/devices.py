"""Devices of a host that can embed, and the cores of an instance: WindVE's detector and affinity rule.

GPUs are found in /dev and by the driver's library; no framework is imported. `root` stands for / in tests.
Other accelerators come in by a command of the user's own (`exec:COMMAND`), a worker that speaks `protocol`.
"""

from __future__ import annotations

import ctypes
import shlex
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from phasewise._words import counted, plural
from phasewise.serving.embedding.queues import CPU_RANK
from phasewise.topology import Kind, Machine

DeviceKind = Literal["cuda", "exec", "cpu"]
RANKS: dict[DeviceKind, int] = {"cuda": 0, "exec": 0, "cpu": CPU_RANK}
EXEC = "exec:"
Command: TypeAlias = tuple[str, ...]


@dataclass(frozen=True)
class Device:
    """`index` counts devices of one kind."""

    kind: DeviceKind
    index: int

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.index}"

    @property
    def rank(self) -> int:
        """Devices of a lower rank are filled first."""
        return RANKS[self.kind]


def cuda_devices() -> int:
    """The number of devices that the driver has; 0 where there is none, or where it fails."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return max(0, count.value)


def accelerators(root: Path = Path("/"), count_cuda: Callable[[], int] = cuda_devices) -> list[Device]:
    """GPUs whose device files are here, as many as the driver answers for.

    A container may have a device file without the driver, or hide devices from the driver.
    """
    nodes = [path for path in root.glob("dev/nvidia[0-9]*") if path.name[len("nvidia") :].isdigit()]
    return [Device("cuda", index) for index in range(min(len(nodes), count_cuda()) if nodes else 0)]


def command_of(text: str) -> Command:
    """The words of `exec:COMMAND`. ValueError, saying why, for anything else, or no program."""
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
    """The rank of a device by its name; that of a CPU for a kind that is not known."""
    kind = device.partition(":")[0]
    return next((rank for ranked_kind, rank in RANKS.items() if ranked_kind == kind), RANKS["cpu"])


def instance_cores(
    machine: Machine, n_instances: int, taken: Collection[int] = (), n_cores: int | None = None
) -> list[tuple[int, ...]]:
    """Cores for each CPU instance: from the high end, none across NUMA nodes where that can be, none that
    is taken.

    The paper's section IV-D: frameworks run on cores with low numbers, and an instance should not cross
    nodes. taken: PUs that others compute on. n_cores: of all instances, the highest ones; None: all that are
    left. ValueError where there are fewer cores than instances, or than asked for.
    """
    usable = free_cores(machine, taken)
    if n_cores is not None:
        if n_cores > len(usable):
            raise ValueError(f"{counted(n_cores, 'core')} for embeddings: {len(usable)} are there for them")
        usable = usable[-n_cores:]
    if not 1 <= n_instances <= len(usable):
        raise ValueError(
            f"{counted(n_instances, 'instance')} of at least one core each: "
            f"{counted(len(usable), 'core')} {plural(len(usable), 'is', 'are')} there for them"
        )
    by_node = _by_node(machine, usable)
    if n_instances <= len(by_node):  # whole nodes, the highest first
        return [tuple(node) for node in sorted(by_node, key=max, reverse=True)[:n_instances]]
    share, extra = divmod(len(usable), n_instances)
    ordered = usable[::-1]
    groups, start = [], 0
    for instance in range(n_instances):
        end = start + share + (instance < extra)
        groups.append(tuple(sorted(ordered[start:end])))
        start = end
    return groups


def free_cores(machine: Machine, taken: Collection[int]) -> list[int]:
    """The first PU of every allowed core that has no PU in `taken`."""
    cores = machine.allowed_cores() or [(pu,) for pu in machine.allowed_pus]
    return sorted(core[0] for core in cores if not set(core).intersection(taken))


def _by_node(machine: Machine, cores: list[int]) -> list[list[int]]:
    nodes: dict[int | None, list[int]] = {}
    for core in cores:
        nodes.setdefault(_node_of(machine, core), []).append(core)
    return list(nodes.values())


def _node_of(machine: Machine, pu: int) -> int | None:
    return next((node.os_index for node in machine.nodes(Kind.NUMA) if pu in node.cpus), None)

"""The topology is as the machine was made, and as lstopo reads it where that is installed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from phasewise.topology import Kind, Machine, read_lstopo, read_machine
from tests.numa.checks import Figures, check
from tests.numa.machines import EIGHTY_CPUS, FOUR_NODES, MACHINES, MEMORY_ONLY, NO_MEMORY, ONLINE
from tests.numa.virtual_machine import VirtualMachine

CPUS = Path("/sys/devices/system/cpu")


@functools.cache
def switch_on() -> None:
    """The CPUs of `ONLINE`, once; the first one is on."""
    for cpu in ONLINE[1:]:
        (CPUS / f"cpu{cpu}/online").write_text("1")


def _assert_as_made(machine: Machine, design: VirtualMachine, online: tuple[int, ...]) -> None:
    nodes = {node.os_index: node for node in machine.nodes(Kind.NUMA)}
    assert sorted(nodes) == [*range(len(design.nodes))]
    for number, node in enumerate(design.nodes):
        assert nodes[number].cpus == tuple(cpu for cpu in node.cpus if cpu in online)
        size = nodes[number].size_bytes or 0
        assert 0.7 * node.mib <= size / 2**20 <= node.mib, (number, size)
    assert machine.distances is not None
    n = range(len(design.nodes))
    assert machine.distances.rows == tuple(tuple(design.distance(a, b) for b in n) for a in n)
    assert machine.tree.cpus == machine.allowed_pus == online


def _as_lstopo(machine: Machine) -> Figures:
    """The same parts as in lstopo's XML."""
    if shutil.which("lstopo") is None:
        return {"lstopo": "not installed"}
    xml = Path("/tmp/lstopo.xml")
    # A node without memory is one that the cpuset does not allow.
    options = ("--of", "xml", "--force", "--disallowed")
    subprocess.run(["lstopo", *options, str(xml)], capture_output=True, check=True)
    told = read_lstopo(xml)
    for kind in (Kind.PACKAGE, Kind.NUMA, Kind.L3, Kind.CORE, Kind.PU):
        ours, theirs = (
            {
                (part.os_index if kind in (Kind.NUMA, Kind.PU) else None, part.cpus)
                for part in each.nodes(kind)
            }
            for each in (machine, told)
        )
        assert ours == theirs, (kind, ours ^ theirs)
    return {"lstopo": "agrees"}


@check(FOUR_NODES.name, MEMORY_ONLY.name, NO_MEMORY.name)
def topology_is_as_made() -> Figures:
    machine = read_machine()
    design = MACHINES[os.environ["MACHINE"]]
    _assert_as_made(machine, design, tuple(range(design.n_cpus)))
    return _as_lstopo(machine)


@check(EIGHTY_CPUS.name)
def topology_has_holes() -> Figures:
    switch_on()
    machine = read_machine()
    _assert_as_made(machine, EIGHTY_CPUS, ONLINE)
    pairs = [tuple(cpu for cpu in (first, first + 1) if cpu in ONLINE) for first in range(0, 80, 2)]
    cores = [core.cpus for core in machine.nodes(Kind.CORE)]
    assert cores == [own for own in pairs if own], cores
    return _as_lstopo(machine)

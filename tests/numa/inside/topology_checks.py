"""The topology is as the machine was made, and as lstopo reads it where that is installed."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from pathlib import Path

from phasewise.serving.embedding.devices import free_cores, highest_cores, instance_cores
from phasewise.topology import Kind, Machine, read_lstopo, read_machine
from phasewise.workflows.serve.embedding import EmbeddingRoom
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


@check(FOUR_NODES.name, MEMORY_ONLY.name, NO_MEMORY.name, EIGHTY_CPUS.name)
def embeddings_have_the_highest_cores_and_cross_no_node() -> Figures:
    """A default plan, a share beside a language model, and every number of instances."""
    if os.environ["MACHINE"] == EIGHTY_CPUS.name:
        switch_on()
    machine = read_machine()
    nodes = [set(node.cpus) for node in machine.nodes(Kind.NUMA) if node.cpus]
    free = free_cores(machine, ())
    for n_cores in range(1, len(free) + 1):
        usable = set(highest_cores(machine, n_cores=n_cores))
        assert len(usable) == n_cores
        assert min(usable) > max(set(free) - usable, default=-1), "nodes are numbered in order here"
        for n_instances in range(1, n_cores + 1):
            instances = instance_cores(machine, n_instances, n_cores=n_cores)
            assert len(instances) == n_instances
            for own in instances:
                assert any(node.issuperset(own) for node in nodes), (n_cores, n_instances, own)
    (alone,) = instance_cores(machine, 1)
    assert set(alone) == set(free) & max(nodes, key=max)
    beside = EmbeddingRoom(machine, free[: -max(1, len(free) // 4)])
    return {"alone": alone, "beside a language model": beside.cut(1)}

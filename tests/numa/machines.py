"""The machines of the tests, by name."""

from __future__ import annotations

from tests.numa.virtual_machine import MemoryNode, VirtualMachine

PAIRS_NEAR = {(0, 1): 12, (2, 3): 12, (0, 2): 32, (0, 3): 32, (1, 2): 32, (1, 3): 32}

FOUR_NODES = VirtualMachine(
    "four-nodes",
    tuple(MemoryNode((2 * node, 2 * node + 1), 768) for node in range(4)),
    cores=2,
    distances=PAIRS_NEAR,
)
"""Two CPUs a node; two pairs of nodes are near."""

MEMORY_ONLY = VirtualMachine(
    "memory-only",
    (MemoryNode((0, 1), 1024), MemoryNode((2, 3), 1024), MemoryNode((), 1024)),
    cores=2,
    distances={(0, 1): 21, (0, 2): 17, (1, 2): 28},
)
"""The last node has memory and no CPUs, as memory behind CXL."""

NO_MEMORY = VirtualMachine(
    "no-memory",
    (MemoryNode((0, 1), 1024), MemoryNode((2, 3), 1024), MemoryNode((4, 5), 0)),
    cores=2,
    distances={(0, 1): 32, (0, 2): 32, (1, 2): 12},
)
"""The last node has CPUs and no memory; node 1 is the nearest that has."""

EIGHTY_CPUS = VirtualMachine(
    "eighty-cpus",
    (MemoryNode(tuple(range(40)), 1024), MemoryNode(tuple(range(40, 80)), 1024)),
    cores=20,
    threads=2,
    booted_cpus=1,
    cpu="max,vendor=GenuineIntel",
)
"""Two packages of 20 cores with two threads each; `ONLINE` of them are switched on, for emulating all takes
minutes.
"""

ONLINE = (0, 1, 6, 39, 40, 41, 63, 64, 65, 79)

CHANGING = VirtualMachine("changing", (MemoryNode((0, 1, 2, 3), 1536),), cores=4)
"""One node, whose CPUs come and go."""

MACHINES = {machine.name: machine for machine in (FOUR_NODES, MEMORY_ONLY, NO_MEMORY, EIGHTY_CPUS, CHANGING)}

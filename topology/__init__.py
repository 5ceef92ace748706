"""The machine as a tree of what its CPUs share, what of it this process may use, and its signatures."""

from phasewise.topology.errors import TopologyError
from phasewise.topology.lstopo import read_lstopo
from phasewise.topology.memory_nodes import MemoryNodes, memory_nodes, read_memory_nodes
from phasewise.topology.places import places, places_of, pus_at
from phasewise.topology.signature import core_signature, placement_signature
from phasewise.topology.sysfs import read_core_kinds, read_machine
from phasewise.topology.tree import (
    Counts,
    Cpu,
    CpuKind,
    Kind,
    Machine,
    MemoryAccess,
    Node,
    NumaDistances,
)

__all__ = [
    "Counts",
    "Cpu",
    "CpuKind",
    "Kind",
    "Machine",
    "MemoryAccess",
    "MemoryNodes",
    "Node",
    "NumaDistances",
    "TopologyError",
    "core_signature",
    "memory_nodes",
    "placement_signature",
    "places",
    "places_of",
    "pus_at",
    "read_core_kinds",
    "read_lstopo",
    "read_machine",
    "read_memory_nodes",
]

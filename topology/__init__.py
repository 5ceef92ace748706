"""The machine as a tree of what its CPUs share, what of it this process may use, and its signatures."""

from phasewise.topology.lstopo import read_lstopo
from phasewise.topology.places import MemoryNodes, memory_nodes, places, places_of, pus_at, read_memory_nodes
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
    TopologyError,
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

"""A machine as JSON values: what `topo --json` prints."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phasewise.topology import Machine, Node


def machine_fields(machine: Machine) -> dict[str, Any]:
    """The JSON that `--json` prints."""
    from phasewise.topology import core_signature, placement_signature

    one_per_core = [core[0] for core in machine.allowed_cores()]
    cpu = machine.cpu
    return {
        "source": machine.source,
        "counts": asdict(machine.counts()),
        "signature": {
            "core": core_signature(machine),
            "placement": placement_signature(machine, one_per_core),
        },
        "cpu": {
            "architecture": cpu.architecture,
            "vendor": cpu.vendor,
            "family": cpu.family,
            "model": cpu.model,
            "name": cpu.name,
        },
        "isa_features": sorted(cpu.features),
        "allowed_pus": list(machine.allowed_pus),
        "cpu_quota": machine.cpu_quota,
        "kinds": [{"name": kind.name, "cpus": list(kind.cpus)} for kind in machine.kinds],
        "numa_distances": None if machine.distances is None else asdict(machine.distances),
        "memory_access": [asdict(access) for access in machine.memory],
        "tree": _node_fields(machine.tree),
    }


def _node_fields(node: Node) -> dict[str, Any]:
    """One part of the tree with what is known of it, and the parts inside."""
    fields: dict[str, Any] = {"kind": node.kind.value, "cpus": list(node.cpus)}
    for name in ("os_index", "size_bytes", "l1d_bytes", "l1i_bytes", "memory_cache_bytes"):
        value = getattr(node, name)
        if value is not None:
            fields[name] = value
    if node.children:
        fields["children"] = [_node_fields(child) for child in node.children]
    return fields

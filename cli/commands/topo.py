"""`phasewise topo`: the machine as a tree, for people, for scripts and as a picture."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from phasewise.cli.options import JsonOption
from phasewise.cli.present import print_json

if TYPE_CHECKING:
    from phasewise.topology import Machine, Node


def topo(as_json: JsonOption = False) -> None:
    """Show the machine as a tree of packages, memory, caches, cores and PUs, and what of it may be used."""
    from phasewise.topology import read_machine

    machine = read_machine()
    print_json(machine_fields(machine))


def machine_fields(machine: Machine) -> dict[str, Any]:
    """What `--json` prints."""
    from phasewise.topology import core_signature, placement_signature

    return {
        "source": machine.source,
        "counts": asdict(machine.counts()),
        "allowed_pus": list(machine.allowed_pus),
        "cpu_quota": machine.cpu_quota,
        "isa_features": sorted(machine.cpu.features),
        "signature": {
            "core": core_signature(machine),
            "placement": placement_signature(machine, [core[0] for core in machine.allowed_cores()]),
        },
        "tree": node_fields(machine.tree),
    }


def node_fields(node: Node) -> dict[str, Any]:
    """One part of the tree with what is known of it."""
    fields = {
        "kind": node.kind.value,
        "os_index": node.os_index,
        "cpus": list(node.cpus),
        "size_bytes": node.size_bytes,
        "l1d_bytes": node.l1d_bytes,
        "l1i_bytes": node.l1i_bytes,
        "memory_cache_bytes": node.memory_cache_bytes,
        "children": [node_fields(child) for child in node.children],
    }
    return {name: value for name, value in fields.items() if value not in (None, [])}

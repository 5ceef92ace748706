"""The state of a Ray cluster: its nodes, and the instances of every server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ClusterStatus:
    """nodes: address, cores, state. instances: name, role, index, cores, node, pid, state."""

    nodes: list[dict[str, Any]]
    instances: list[dict[str, Any]]


def cluster_status(address: str) -> ClusterStatus:
    """Ask the cluster at `address`, or `auto`. ClusterError, in one line, where it cannot be reached."""
    from phasewise.cluster.real.ray_cluster import nodes, ray_connection, running_instances

    with ray_connection(address):
        return ClusterStatus(nodes(), running_instances())

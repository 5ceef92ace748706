"""The state of a Ray cluster: its nodes, and the servers on it with their instances; draining of these."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise._words import meant
from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report, silent

LOOK_S = 0.5
OLD_NODES = 8
"""Number of lost nodes that are shown, the newest ones: a cluster remembers all."""


@dataclass(frozen=True)
class ClusterStatus:
    """nodes: address, id, cores, labels, state. servers: id, model, node, state. instances: those of all
    servers, each with its server, name, role, pool, state, node, label, cores, cpus, format, plans and load.
    """

    nodes: list[dict[str, Any]]
    servers: list[dict[str, Any]]
    instances: list[dict[str, Any]]


def cluster_status(address: str) -> ClusterStatus:
    """Ask the cluster at `address`, or `auto`. ClusterError, in one line, where it cannot be reached."""
    from phasewise.cluster.real.ray_connection import ray_connection

    with ray_connection(address):
        return _status()


def drain(
    address: str, name: str, *, undo: bool = False, wait: bool = True, report: Report = silent
) -> list[dict[str, Any]]:
    """Drain an instance, or all of a node: no new requests go there, and it stops when begun ones have ended.

    name: an instance's name, or a node's address or id. undo: drained instances take requests again, and
    start anew where they have stopped. Returns the facts of the instances: with `wait`, after they have
    stopped or are back. Raises UsageError, ClusterError.
    """
    from phasewise.cluster.real.ray_connection import ray_connection
    from phasewise.cluster.real.ray_desk import order_drain

    with ray_connection(address):
        status = _status()
        chosen = named_instances(status.instances, name)
        if not undo:
            refuse_the_last(status.instances, chosen)
        for instance in chosen:
            order_drain(str(instance["server"]), int(instance["index"]), undo=undo)
        places = {(instance["server"], instance["index"]) for instance in chosen}
        done = "running" if undo else "drained"
        return _until(lambda: _at(places), done, report) if wait else _at(places)


def named_instances(instances: Sequence[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The instances that `name` means: one by its name, or all of a node. UsageError for none and several."""
    of_node = [own for own in instances if name and name in (own.get("node"), own.get("node_id"))]
    if of_node:
        return of_node
    named = [own for own in instances if name in names_of(own)]
    if len({own["server"] for own in named}) > 1:
        servers = ", ".join(f"{own['name']}@{own['server']}" for own in named)
        raise UsageError(f"{name!r:.80} is an instance of several servers: {servers}")
    if not named:
        names = [f"{own['name']}@{own['server']}" for own in instances] + [
            str(own["node"]) for own in instances
        ]
        raise UsageError(f"no instance and no node is called {name!r:.80}{meant(name, names)}")
    return named


def names_of(instance: dict[str, Any]) -> set[str]:
    """Names of an instance that a person may give: with or without the last `-` part, and `@server`."""
    own = str(instance["name"])
    names = {own, own.rpartition("-")[0]}
    return names | {f"{one_name}@{instance['server']}" for one_name in names}


def refuse_the_last(instances: Sequence[dict[str, Any]], chosen: Sequence[dict[str, Any]]) -> None:
    """Raise UsageError where a server would be left without an instance that takes requests."""
    leaving = {(own["server"], own["index"]) for own in chosen}
    for server in {own["server"] for own in chosen}:
        stays = [
            own
            for own in instances
            if own["server"] == server and own["state"] == "running" and (server, own["index"]) not in leaving
        ]
        if not stays:
            raise UsageError(
                f"server {server} would have no instance that takes requests: stop the server instead"
            )


def _status() -> ClusterStatus:
    from phasewise.cluster.real.ray_cluster import nodes
    from phasewise.cluster.real.ray_desk import servers

    all_nodes = nodes()
    alive = [node for node in all_nodes if node["state"] == "alive"]
    lost = [node for node in all_nodes if node["state"] != "alive"]
    facts = servers()
    return ClusterStatus(
        alive + lost[-OLD_NODES:],
        [{name: value for name, value in own.items() if name != "instances"} for own in facts],
        [{"server": own["server"], **instance} for own in facts for instance in own["instances"]],
    )


def _at(places: set[tuple[Any, Any]]) -> list[dict[str, Any]]:
    return [own for own in _status().instances if (own["server"], own["index"]) in places]


def _until(ask: Callable[[], list[dict[str, Any]]], done: str, report: Report) -> list[dict[str, Any]]:
    """Ask until all instances are in the state `done`, and report each change of state."""
    told: dict[Any, str] = {}
    while True:
        instances = ask()
        for own in instances:
            state = f"{own['name']}@{own['server']}: {own['state']}"
            if told.get(own["index"]) != state:
                told[own["index"]] = state
                report(state)
        if all(own["state"] == done for own in instances):
            return instances
        time.sleep(LOOK_S)

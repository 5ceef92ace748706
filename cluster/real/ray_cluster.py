"""Instances on the nodes of a Ray cluster: Ray keeps membership, places instances and ends them.

The only home of `ray`. Each instance has a bundle of a placement group and an actor there, which starts its
process and waits for its end. Messages, keys and values go over our own sockets, never through Ray's store.
Ray pins nothing and knows no NUMA node: the instance does. It notices a lost node after tens of seconds; the
front's heartbeat does so in 2 to 3.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from phasewise._words import number
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.real.instance import Orders
from phasewise.cluster.real.local_instances import LocalInstances, Tell
from phasewise.cluster.routing import Role

NAMESPACE = "phasewise"
NODE = "{node}"
"""Stands in an address for the node's own."""

PLACED_S = 20.0
"""A placement group that is not there by then cannot be met."""
KILL_S = 5.0
CONNECT_S = 5.0
OBJECT_STORE_BYTES = 80 << 20
"""The least that Ray takes: nothing of ours goes through it."""


@dataclass(frozen=True, slots=True)
class WantedInstance:
    """An instance with a role, and the number of cores that it needs on one node."""

    role: Role
    cores: int


class InstanceActor:
    """Starts one instance's process on its node, and tells of its end. Ray makes an actor of it."""

    def __init__(self, role: str, index: int, cores: int) -> None:
        self._known: dict[str, Any] = {"role": role, "index": index, "cores": cores}
        self._processes: LocalInstances | None = None

    def node(self) -> str:
        """The node's address, as other nodes reach it."""
        return str(_ray().util.get_node_ip_address())

    def run(self, module: str, told: bytes) -> str:
        """Start the process and wait until it has ended: how. It ends with the thread that is here."""
        text = told.replace(NODE.encode(), self.node().encode())
        processes = LocalInstances(module, [lambda _orders: text])
        processes.launch(0, Orders("", "", ""))
        self._processes = processes
        return processes.wait(0)

    def kill(self) -> None:
        """The process has ended when this returns."""
        if self._processes is not None:
            self._processes.kill(0)

    def status(self) -> dict[str, Any]:
        """For `phasewise cluster status`."""
        pid = None if self._processes is None else self._processes.pid(0)
        ended = "it was not launched" if self._processes is None else self._processes.ended(0)
        return {**self._known, "node": self.node(), "pid": pid, "state": ended or "running"}


@contextlib.contextmanager
def ray_connection(address: str) -> Iterator[str]:
    """A connection to a running cluster; the address of this node. ClusterError, in one line, without one.

    Off loopback it must be one that asks for a token.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = _ray()
    _check_listens(address)
    was_there = ray.is_initialized()
    try:
        if not was_there:
            with _without_stderr():
                ray.init(
                    address=address,
                    namespace=NAMESPACE,
                    log_to_driver=False,
                    logging_level="error",
                    configure_logging=False,
                )
    except (ConnectionError, ValueError, RuntimeError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        asks = (
            "compare RAY_AUTH_TOKEN with that of the cluster" if _sends_token() else "set RAY_AUTH_MODE=token"
        )
        hint = f"; if it asks for a token, {asks}"
        raise ClusterError(f"the Ray cluster {address!r} cannot be reached: {line}{hint}") from error
    try:
        node = str(ray.util.get_node_ip_address())
        _check_token(node)
        yield node
    finally:
        if not was_there:
            ray.shutdown()


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Ray's C++ side writes a line a second to file descriptor 2 while a cluster refuses its token."""
    kept = os.dup(2)
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    os.close(nothing)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise ClusterError("Ray is not installed: pip install 'phasewise[ray]'") from None


def _placement() -> Any:
    return importlib.import_module("ray.util.placement_group")


def _check_listens(address: str) -> None:
    """Ray itself tries for minutes. What it finds on its own (`auto`) is not asked."""
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), CONNECT_S) as there:
            node = str(there.getpeername()[0])
    except (OSError, OverflowError) as error:
        raise ClusterError(f"the Ray cluster {address!r:.80} cannot be reached: {error}") from error
    _check_token(node)


def _sends_token() -> bool:
    return os.environ.get("RAY_AUTH_MODE") == "token"


def _check_token(node: str) -> None:
    if ipaddress.ip_address(node).is_loopback or _sends_token():
        return
    raise ClusterError(
        f"the Ray cluster listens on {node} and asks for no token, so that every machine that reaches it can "
        "run programs there: start Ray and phasewise with RAY_AUTH_MODE=token"
    )


class RayInstances:
    """`supervisor.Launcher` over the nodes of a cluster. Close it, or use it in `with`.

    spread: instances on different nodes rather than on few. ClusterError where the cluster has not the cores.
    """

    def __init__(self, module: str, wanted: Sequence[WantedInstance], *, spread: bool) -> None:
        self._ray = _ray()
        self._module = module
        self._wanted = wanted
        self._actors: dict[int, Any] = {}
        self._ends: dict[int, Any] = {}
        self._group = self._place(spread)
        taken = self._taken()
        self.first_cores = [first for first, _ in taken]
        """For each instance: the number of cores of its node that the instances before it have."""
        here = str(self._ray.get_runtime_context().get_node_id())
        self.n_cores_here = sum(
            instance.cores for instance, (_, node) in zip(wanted, taken, strict=True) if node == here
        )
        """Cores of this process's own node that instances have: its first ones."""
        self._tells: Sequence[Tell] = ()
        self._server = secrets.token_hex(4)
        """Part of the actors' names: other servers of the cluster have instances of the same names."""

    def tell_with(self, tells: Sequence[Tell]) -> None:
        """The line that each instance is told on its standard input."""
        self._tells = tells

    def _place(self, spread: bool) -> Any:
        bundles = [{"CPU": float(instance.cores)} for instance in self._wanted]
        group = _placement().placement_group(bundles, strategy="SPREAD" if spread else "PACK")
        ready, _ = self._ray.wait([group.ready()], timeout=PLACED_S)
        if not ready:
            _placement().remove_placement_group(group)
            nodes = [node for node in self._ray.nodes() if node["Alive"]]
            has = ", ".join(number(node["Resources"].get("CPU", 0)) for node in nodes)
            asked = ", ".join(f"{instance.role} {instance.cores}" for instance in self._wanted)
            raise ClusterError(
                f"the Ray cluster cannot place instances of these cores ({asked}): its nodes have {has} "
                "cores, and other work may hold some of them"
            )
        return group

    def _taken(self) -> list[tuple[int, str]]:
        """For each instance: how many cores of its node are taken already, and the node's id."""
        nodes = _placement().placement_group_table(self._group)["bundles_to_node_id"]
        taken: dict[str, int] = {}
        first = []
        for index, instance in enumerate(self._wanted):
            node = nodes[index]
            first.append((taken.get(node, 0), str(node)))
            taken[node] = taken.get(node, 0) + instance.cores
        return first

    def launch(self, index: int, orders: Orders) -> None:
        """`Launcher.launch`."""
        strategies = importlib.import_module("ray.util.scheduling_strategies")
        instance = self._wanted[index]
        actor = (
            self._ray.remote(InstanceActor)
            .options(
                name=f"{orders.name}@{self._server}",
                namespace=NAMESPACE,
                num_cpus=instance.cores,
                max_concurrency=4,
                max_restarts=0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(self._group, index),
            )
            .remote(instance.role, index, instance.cores)
        )
        self._actors[index] = actor
        self._ends[index] = actor.run.remote(self._module, self._tells[index](orders))

    def ended(self, index: int) -> str | None:
        """`Launcher.ended`."""
        end = self._ends.get(index)
        if end is None or not self._ray.wait([end], timeout=0)[0]:
            return None
        try:
            return str(self._ray.get(end))
        except self._ray.exceptions.RayError as error:
            return f"its Ray actor ended: {_last_line(error)}"

    def kill(self, index: int) -> None:
        """`Launcher.kill`. A node that is lost cannot confirm it; no memory is shared with it."""
        actor = self._actors.pop(index, None)
        if actor is None:
            return
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(actor.kill.remote(), timeout=KILL_S)
        self._ray.kill(actor)

    def close(self) -> None:
        """`Launcher.close`."""
        for index in list(self._actors):
            self.kill(index)
        _placement().remove_placement_group(self._group)


def running_instances() -> list[dict[str, Any]]:
    """The instances of all servers on the connected cluster. Blocks for a second at most for each."""
    ray = _ray()
    instances = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] != NAMESPACE:
            continue
        with contextlib.suppress(ray.exceptions.RayError, ValueError):
            actor = ray.get_actor(named["name"], namespace=NAMESPACE)
            instances.append({"name": named["name"], **ray.get(actor.status.remote(), timeout=1.0)})
    return sorted(instances, key=lambda instance: str(instance["name"]))


def nodes() -> list[dict[str, Any]]:
    """The nodes of the connected cluster: address, cores, and whether they are alive."""
    return [
        {
            "node": node["NodeManagerAddress"],
            "cores": int(node["Resources"].get("CPU", 0)),
            "state": "alive" if node["Alive"] else "dead",
        }
        for node in _ray().nodes()
    ]


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__

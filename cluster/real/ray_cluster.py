"""Instances on the nodes of a Ray cluster: Ray keeps membership, places instances and ends them.

Each instance has a place, which is a placement group of one bundle, and an actor there, which starts the
instance's process and waits for its end. Messages, keys and values go over our own sockets, never through
Ray's store. Ray pins nothing and knows no NUMA node: the instance pins itself. Ray notices a lost node after
tens of seconds; the front's heartbeat does so in 2 to 3, and the instance waits for a place until Ray has
noticed too.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from phasewise._words import number
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.real.instance import Orders
from phasewise.cluster.real.local_instances import LocalInstances, Tell
from phasewise.cluster.real.ray_connection import NAMESPACE, the_ray
from phasewise.cluster.routing import Role
from phasewise.serving.processes.headroom import available_bytes

NODE = "{node}"
"""Placeholder in an address for the node's own address."""
NODE_ID = "{node_id}"
"""Placeholder in an instance's standard input for the id of its node."""
LABEL = "phasewise"
"""The key of the node label that `@NAME` asks for."""
_NODE_LABEL = "ray.io/node-id"

PLACED_S = 20.0
"""Seconds within which a place must be found; after that the request for it counts as impossible."""
APART_S = 2.0
"""Seconds of waiting for a node without other instances; after that any node will do."""
KILL_S = 5.0
LOOK_S = 1.0
"""Seconds between two looks at the cluster's nodes."""


@dataclass(frozen=True, slots=True)
class WantedInstance:
    """A wanted instance: its role, and the number of cores that it needs on one node. label: label of the
    node, `KEY=VALUE`; None: any node."""

    role: Role
    cores: int
    label: str | None = None

    def __str__(self) -> str:
        return f"{self.role} {self.cores}{f' of {self.label}' if self.label else ''}"


class InstanceActor:
    """Ray actor that starts one instance's process on its node, and reports its end."""

    def __init__(self) -> None:
        self._processes: LocalInstances | None = None

    def node(self) -> str:
        """The node's address, as other nodes reach it."""
        return str(the_ray().util.get_node_ip_address())

    def run(self, module: str, told: bytes) -> str:
        """Start the process, which ends with this thread; wait for its end and return the way it ended."""
        node_id = str(the_ray().get_runtime_context().get_node_id())
        text = told.replace(NODE_ID.encode(), node_id.encode()).replace(NODE.encode(), self.node().encode())
        processes = LocalInstances(module, [lambda _orders: text])
        processes.launch(0, Orders("", "", ""))
        self._processes = processes
        return processes.wait(0)

    def kill(self) -> None:
        """Kill the process and wait for its end."""
        if self._processes is not None:
            self._processes.kill(0)


@dataclass(slots=True)
class _Place:
    """The place of one instance, and its process, which the place's own thread starts; others may cancel."""

    wanted: WantedInstance
    group: Any = None
    """The placement group; None if the place has none, or gave it back."""
    node_id: str = ""
    node: str = ""
    """The node's address."""
    is_apart: bool = False
    """True if the group excludes some nodes, as a preference."""
    left: str = ""
    """The node that the place was given back on, which is asked last for the next place."""
    actor: Any = None
    end: Any = None
    problem: str | None = None
    """The reason why the actor could not be started; None if it could."""
    waits: str | None = None
    is_cancelled: threading.Event = field(default_factory=threading.Event)
    starting: threading.Thread | None = None


class RayInstances:
    """Launcher (`supervisor.Launcher`) over the nodes of a Ray cluster, used in `with` or closed. spread:
    place instances on different nodes rather than on few. ClusterError where the cluster lacks the cores."""

    def __init__(self, module: str, wanted: Sequence[WantedInstance], *, spread: bool) -> None:
        self._ray = the_ray()
        self._module = module
        self._spread = spread
        self._tells: Sequence[Tell] = ()
        self.server = secrets.token_hex(4)
        """This server's own part of the actors' names, as other servers name instances alike."""
        self._lock = threading.Lock()
        self._places = [_Place(instance) for instance in wanted]
        self._nodes = {str(node["NodeID"]): node for node in self._ray.nodes() if node["Alive"]}
        self._n_joined = 0
        self._is_closed = threading.Event()
        self._place_all()
        self._watch = threading.Thread(target=self._look, name="phasewise-nodes", daemon=True)
        self._watch.start()

    @property
    def nodes(self) -> list[str]:
        """The id of the Ray node on which each instance has its place."""
        return [place.node_id for place in self._places]

    @property
    def n_cores_here(self) -> int:
        """Cores of this process's own node that instances use."""
        here = str(self._ray.get_runtime_context().get_node_id())
        return sum(place.wanted.cores for place in self._places if place.node_id == here)

    def free_bytes(self) -> dict[str, int | None]:
        """Free bytes of memory of the instances' nodes, by node id; None for an unknown amount."""
        strategies = the_ray("util.scheduling_strategies")
        ask = self._ray.remote(available_bytes)
        asked = {
            node: ask.options(
                num_cpus=0, scheduling_strategy=strategies.NodeAffinitySchedulingStrategy(node, soft=False)
            ).remote()
            for node in dict.fromkeys(self.nodes)
        }
        try:
            return {node: self._ray.get(answer, timeout=PLACED_S) for node, answer in asked.items()}
        except self._ray.exceptions.RayError as error:
            raise ClusterError(
                f"a node of the Ray cluster cannot run phasewise {_last_line(error)}"
            ) from error

    def tell_with(self, tells: Sequence[Tell]) -> None:
        """Set the functions that make the lines for the instances' standard inputs."""
        self._tells = tells

    # ---- places ------------------------------------------------------------------------------------------

    def _place_all(self) -> None:
        """Find places for all instances; ClusterError, with no place kept, where one has none."""
        deadline_s = time.monotonic() + PLACED_S
        try:
            for place in self._places:
                if not self._find(place, deadline_s):
                    raise ClusterError(self._cannot_place())
        except BaseException:
            for place in self._places:
                self._give_back(place)
            raise

    def _cannot_place(self) -> str:
        has = ", ".join(
            number(node["Resources"].get("CPU", 0)) + _told_label(node) for node in self._nodes.values()
        )
        asked = ", ".join(str(place.wanted) for place in self._places)
        return (
            f"the Ray cluster cannot place instances of these cores ({asked}): its nodes have {has} "
            "cores, and other work may hold some of them"
        )

    def _find(self, place: _Place, deadline_s: float) -> bool:
        """Find a placement group for an instance, on a node to avoid only if there is no other."""
        for apart in filter(None, (self._apart_from(place), {place.left} - {""})):
            if self._wait_for_group(place, apart, time.monotonic() + APART_S):
                return True
        return self._wait_for_group(place, (), deadline_s)

    def _apart_from(self, place: _Place) -> set[str]:
        """The nodes to avoid: the node that the place left and, with `spread`, nodes with more of our
        instances than others."""
        apart = {place.left} - {""}
        if self._spread:
            count = Counter(dict.fromkeys(self._nodes, 0))
            count.update(other.node_id for other in self._places if other is not place and other.group)
            least = min((count[node] for node in self._nodes), default=0)
            apart |= {node for node in self._nodes if count[node] > least}
        return apart

    def _wait_for_group(self, place: _Place, apart: Collection[str], deadline_s: float) -> bool:
        selector = {}
        if place.wanted.label:
            key, _, value = place.wanted.label.partition("=")
            selector[key] = value
        if apart:
            selector[_NODE_LABEL] = f"!in({','.join(sorted(apart))})"
        placement = the_ray("util.placement_group")
        group = placement.placement_group(
            [{"CPU": float(place.wanted.cores)}], bundle_label_selector=[selector] if selector else None
        )
        place.group, place.is_apart = group, bool(apart)
        while not place.is_cancelled.is_set() and (left_s := deadline_s - time.monotonic()) > 0:
            if group.wait(min(LOOK_S, left_s)):
                self._note_node(place)
                return True
        self._give_back(place)
        return False

    def _note_node(self, place: _Place) -> None:
        table = the_ray("util.placement_group").placement_group_table(place.group)
        place.node_id = str(table["bundles_to_node_id"][0])
        place.node = str(self._nodes.get(place.node_id, {}).get("NodeManagerAddress", place.node_id))

    def _give_back(self, place: _Place) -> None:
        if place.group is not None:
            with contextlib.suppress(self._ray.exceptions.RayError):
                the_ray("util.placement_group").remove_placement_group(place.group)
        place.group = None

    def _look(self) -> None:
        """Note the cluster's nodes every LOOK_S until closed."""
        while not self._is_closed.wait(LOOK_S):
            with contextlib.suppress(self._ray.exceptions.RayError, ConnectionError, RuntimeError):
                alive = {str(node["NodeID"]): node for node in self._ray.nodes() if node["Alive"]}
                self._n_joined += len(alive.keys() - self._nodes.keys())
                self._nodes = alive

    # ---- what the front asks -----------------------------------------------------------------------------

    def launch(self, index: int, orders: Orders) -> None:
        """Start an instance's process, on a thread of its own since Ray may take long."""
        place = self._places[index]
        place.is_cancelled, place.problem, place.end = threading.Event(), None, None
        place.waits = f"Ray has not started it on {place.node or 'a node'} yet"
        place.starting = threading.Thread(
            target=self._start, args=(index, orders, place.is_cancelled), name=f"phasewise-start-{index}"
        )
        place.starting.daemon = True
        place.starting.start()

    def _start(self, index: int, orders: Orders, is_cancelled: threading.Event) -> None:
        place = self._places[index]
        try:
            while not is_cancelled.is_set():
                if place.group is None:
                    place.waits = f"no node of the Ray cluster has room for it ({place.wanted})"
                    if not self._find(place, time.monotonic() + 3600.0):
                        continue
                actor = self._actor_in(place, orders)
                if self._is_there(place, actor, is_cancelled):
                    told = self._tells[index](orders)
                    place.actor, place.end = actor, actor.run.remote(self._module, told)
                    self._note_node(place)
                    place.waits = None
                    return
                self._ray.kill(actor)
        except (self._ray.exceptions.RayError, ValueError, ConnectionError, RuntimeError) as error:
            place.problem, place.waits = f"Ray cannot start it: {_last_line(error)}", None

    def _actor_in(self, place: _Place, orders: Orders) -> Any:
        strategies = the_ray("util.scheduling_strategies")
        return (
            self._ray.remote(InstanceActor)
            .options(
                name=f"{orders.name}@{self.server}-{secrets.token_hex(2)}",
                namespace=NAMESPACE,
                num_cpus=place.wanted.cores,
                max_concurrency=4,
                max_restarts=0,
                scheduling_strategy=strategies.PlacementGroupSchedulingStrategy(place.group, 0),
            )
            .remote()
        )

    def _is_there(self, place: _Place, actor: Any, is_cancelled: threading.Event) -> bool:
        """Wait for the actor of a place. False if cancelled, or if another place must be found."""
        there = actor.node.remote()
        while not is_cancelled.is_set():
            if self._ray.wait([there], timeout=LOOK_S)[0]:
                self._ray.get(there)
                return True
            place.waits = f"Ray has not started it: no node has room for it ({place.wanted})"
            if place.is_apart and place.node_id not in self._nodes:
                self._give_back(place)  # Ray would wait for a node of its own
                return False
        return False

    def waits(self, index: int) -> str | None:
        """The reason, in one line, why an instance has no place yet; None if it has one."""
        return self._places[index].waits

    def n_joined(self) -> int:
        """Count the nodes that have joined since the start."""
        return self._n_joined

    def place(self, index: int) -> dict[str, object]:
        """Facts about the place where an instance runs or is to run."""
        place = self._places[index]
        return {
            "node": place.node,
            "node_id": place.node_id,
            "cores": place.wanted.cores,
            "label": place.wanted.label,
        }

    def ended(self, index: int) -> str | None:
        """The way in which an instance's process has ended, in one line; None while it runs."""
        place = self._places[index]
        if place.problem is not None or place.end is None:
            return place.problem
        try:
            if not self._ray.wait([place.end], timeout=0)[0]:
                return None
            return str(self._ray.get(place.end))
        except self._ray.exceptions.RayError as error:
            return f"its Ray actor ended: {_last_line(error)}"

    def kill(self, index: int) -> None:
        """Kill an instance's process. A lost node cannot confirm it; no memory is shared with that node."""
        place = self._places[index]
        place.is_cancelled.set()
        if place.starting is not None:
            place.starting.join(KILL_S)
        actor, place.actor, place.waits = place.actor, None, None
        if actor is None:
            return
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(actor.kill.remote(), timeout=KILL_S)
        self._ray.kill(actor)

    def vacate(self, index: int) -> None:
        """Give an instance's place back."""
        place = self._places[index]
        place.left = place.node_id
        self._give_back(place)

    def close(self) -> None:
        """End all instances at the same time, since an instance on a lost node takes long."""
        self._is_closed.set()
        self._watch.join(KILL_S)  # Ray would start a cluster for one that asks after the connection ended
        with ThreadPoolExecutor(len(self._places)) as pool:
            list(pool.map(self.kill, range(len(self._places))))
        for place in self._places:
            self._give_back(place)


def nodes() -> list[dict[str, Any]]:
    """The nodes of the connected cluster: address, id, cores, labels, and whether each is alive."""
    return [
        {
            "node": node["NodeManagerAddress"],
            "node_id": node["NodeID"],
            "cores": int(node["Resources"].get("CPU", 0)),
            "labels": {key: value for key, value in _labels(node).items() if not key.startswith("ray.io/")},
            "state": "alive" if node["Alive"] else "dead",
        }
        for node in the_ray().nodes()
    ]


def _labels(node: dict[str, Any]) -> dict[str, str]:
    return {str(key): str(value) for key, value in (node.get("Labels") or {}).items()}


def _told_label(node: dict[str, Any]) -> str:
    label = _labels(node).get(LABEL)
    return f" ({LABEL}={label})" if label else ""


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__

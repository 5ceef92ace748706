"""The desk of each server on a Ray cluster: `phasewise cluster` reads there what runs, and leaves orders.

A desk is a named actor that holds the last facts of its server, and the orders that the server has not taken
yet. It ends with its server, and Ray starts it anew on another node where its node is lost.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from phasewise.cluster.real.front import DrainPlace, Front
from phasewise.cluster.real.ray_connection import NAMESPACE, the_ray

EXCHANGE_S = 0.5
ANSWER_S = 5.0
_NAME = "server@"


class Desk:
    """Actor that keeps the facts of a server and the orders to it."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._orders: list[dict[str, Any]] = []

    def exchange(self, facts: dict[str, Any]) -> list[dict[str, Any]]:
        """Keep the calling server's facts; returns the orders that wait for it."""
        self._facts = facts
        orders, self._orders = self._orders, []
        return orders

    def facts(self) -> dict[str, Any]:
        """The last facts that the server gave; empty before it gave any."""
        return self._facts

    def order(self, order: dict[str, Any]) -> None:
        """Keep an order until the server takes it."""
        self._orders.append(order)


class DeskThread:
    """Thread that brings a front's facts to its desk and takes orders from there. Close it before the
    connection. names: the server's id on its cluster, its model, and its node."""

    def __init__(self, names: dict[str, str], front: Front) -> None:
        self._names = names
        self._front = front
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="phasewise-desk", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join(ANSWER_S)

    def _run(self) -> None:
        ray = the_ray()
        desk = (
            ray.remote(Desk)
            .options(name=f"{_NAME}{self._names['server']}", namespace=NAMESPACE, num_cpus=0, max_restarts=-1)
            .remote()
        )
        while not self._is_closed.wait(EXCHANGE_S):
            with contextlib.suppress(ray.exceptions.RayError, ConnectionError, RuntimeError):
                answer = desk.exchange.remote(self._facts())
                for order in ray.get(answer, timeout=ANSWER_S):
                    if order["index"] in range(len(self._front.members())):
                        self._front.send(DrainPlace(order["index"], undo=order["undo"]))
        with contextlib.suppress(Exception):  # the cluster may have gone
            ray.kill(desk)

    def _facts(self) -> dict[str, Any]:
        return {**self._names, "state": self._front.state, "instances": self._front.members()}


def servers() -> list[dict[str, Any]]:
    """The facts of every server of the connected cluster; none of a desk that does not answer in seconds."""
    ray = the_ray()
    facts = []
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == NAMESPACE and str(named["name"]).startswith(_NAME):
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                desk = ray.get_actor(named["name"], namespace=NAMESPACE)
                facts.append(ray.get(desk.facts.remote(), timeout=ANSWER_S))
    return sorted(filter(None, facts), key=lambda fact: str(fact["server"]))


def order_drain(server: str, index: int, *, undo: bool) -> None:
    """Leave an order to drain an instance, or with `undo` to let it come back, at the desk of its server."""
    ray = the_ray()
    desk = ray.get_actor(f"{_NAME}{server}", namespace=NAMESPACE)
    ray.get(desk.order.remote({"index": index, "undo": undo}), timeout=ANSWER_S)

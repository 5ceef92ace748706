"""Several models behind one HTTP server: an engine each, which take turns on the cores that they share."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from phasewise.serving.engine.engine_host import (
    Deliver,
    EngineHost,
    EngineState,
    InstanceState,
    OpenHost,
    Recoveries,
    SharedCores,
)
from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Delivery, EngineLoad, Message, Submit
from phasewise.serving.errors import EngineLost

_WORST_FIRST: tuple[EngineState, ...] = ("lost", "replacing", "starting", "running")


class Turns:
    """A lock that threads get in the order in which they ask for it. With `threading.Lock` an engine that is
    never idle would take the next step before another one wakes up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_held = False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._lock:
            if not self._is_held:
                self._is_held = True
                return
            own = threading.Lock()
            own.acquire()
            self._waiting.append(own)
        own.acquire()

    def __exit__(self, *_error: object) -> None:
        with self._lock:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_held = False


class SeveralEngines:
    """An `EngineHost` of several models, by their ids. A request goes to the engine of `Submit.model`. A
    model that is put in before the start stays: its engine that is lost for good ends the server. Others are
    put in and taken out while it runs, from any thread but their own. The load is the sum of all. An engine
    that has requests of batches alone computes while no other has any that are of none."""

    def __init__(self, deliver: Deliver, on_lost: Callable[[], None] = lambda: None) -> None:
        self._turns = Turns()
        self._deliver = deliver
        self._on_lost = on_lost
        self._has_started = False
        self._hosts: Mapping[str, EngineHost] = {}
        self._staying: list[EngineHost] = []
        self._gone = Recoveries()
        """The recoveries of engines that were taken out."""
        self._loads: dict[str, EngineLoad] = {}
        self._changing = threading.Lock()
        """Held while a load changes and the sum is delivered: the newest sum is delivered last."""

    @property
    def state(self) -> EngineState:
        """The worst of those that stay."""
        states = {host.state for host in self._staying}
        worst: EngineState | None = next((state for state in _WORST_FIRST if state in states), None)
        return worst or ("running" if self._has_started else "starting")

    @property
    def is_alive(self) -> bool:
        return self._has_started and all(host.is_alive for host in self._staying)

    @property
    def lost(self) -> EngineLost | None:
        return next((host.lost for host in self._staying if host.lost is not None), None)

    def recoveries(self) -> Recoveries:
        with self._changing:
            each = [self._gone, *(host.recoveries() for host in self._hosts.values())]
        return Recoveries(*map(sum, zip(*each, strict=True)))

    def threads(self) -> Mapping[str, int]:
        """Engines take turns: the most that one of them has."""
        each = [host.threads() for host in self._hosts.values()]
        return {phase: max(own.get(phase, 0) for own in each) for own in each for phase in own}

    def fingerprint(self, model: str = "") -> Fingerprint | None:
        """The identity of the model of this id; None where it has gone."""
        host = self._hosts.get(model)
        return None if host is None else host.fingerprint()

    def instances(self) -> tuple[InstanceState, ...]:
        """Those of every model, by its id and their names."""
        return tuple(
            state._replace(name=f"{name}/{state.name}")
            for name, host in self._hosts.items()
            for state in host.instances()
        )

    def start(self) -> None:
        self._has_started = True
        for host in self._staying:
            host.start()

    def send(self, message: Message) -> None:
        """Only requests name their model; to an engine that does not know it, an abort is nothing."""
        if isinstance(message, Submit):
            self._hosts[message.model].send(message)
            return
        for host in self._hosts.values():
            host.send(message)

    def stop(self, timeout_s: float = 10.0) -> bool:
        stopped = [host.stop(timeout_s) for host in self._hosts.values()]
        return all(stopped)

    def put(self, name: str, open_host: OpenHost, on_lost: Callable[[], None] | None = None) -> None:
        """Requests for this model may be sent from now on. on_lost: of one that may be taken out, which
        starts now; None: of the server, with which the model starts and stays."""
        cores = SharedCores(self._turns, partial(self._are_others_busy, name))
        host = open_host(partial(self._deliver_of, name), on_lost or self._on_lost, cores)
        with self._changing:
            self._hosts = {**self._hosts, name: host}
        if on_lost is None:
            self._staying.append(host)
        else:
            host.start()

    def take_out(self, name: str) -> None:
        """Stop an engine, however long its step takes: nothing of it runs once this returns."""
        host = self._hosts[name]
        while not host.stop():
            pass
        with self._changing:
            self._hosts = {other: each for other, each in self._hosts.items() if other != name}
            self._loads.pop(name, None)
            self._gone = Recoveries(*map(sum, zip(self._gone, host.recoveries(), strict=True)))
            self._deliver(Delivery((), None, _sum(dict(self._loads))))

    def _are_others_busy(self, name: str) -> bool:
        """True while another engine has requests that are of no batch."""
        others = [load for other, load in self._loads.copy().items() if other != name]
        return any(load.n_waiting or load.n_running for load in others)

    def _deliver_of(self, name: str, delivery: Delivery) -> None:
        """On the thread of one engine."""
        stats = None if delivery.stats is None else delivery.stats._replace(model=name)
        with self._changing:
            self._loads[name] = delivery.load
            self._deliver(delivery._replace(stats=stats, load=_sum(dict(self._loads))))


def _sum(by_model: Mapping[str, EngineLoad]) -> EngineLoad:
    loads = list(by_model.values())
    if not loads:
        return EngineLoad(0, 0, 0, 0, by_model={})
    numbers = {
        name: sum(getattr(load, name) for load in loads)
        for name in EngineLoad._fields
        if isinstance(getattr(loads[0], name), int)
    }
    return loads[0]._replace(**{**numbers, "pool": None, "by_model": by_model})

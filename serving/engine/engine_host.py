"""Interface between HTTP and the engine host: an engine on a thread, a front over several instances, or
several models, of one host each, which take turns on shared cores."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Literal, NamedTuple

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Delivery, EngineLoad, Message, Submit
from phasewise.serving.errors import EngineLost


class InstanceState(NamedTuple):
    """State of one place for an instance. The front's counters never fall; the instance's restart with it."""

    name: str
    """Role and number of the instance, e.g. `prompt-0`."""
    role: str
    pool: str
    """Name of the pool that the instance is in now."""
    load: EngineLoad | None
    """The load that the instance reported last; None: it does not run."""
    restarts: int
    prompts: int
    """Number of requests whose prompts the instance was given."""
    prompt_tokens: int
    prefix_tokens_expected: int
    """Prompt tokens that the instance was expected to hold already when requests were routed."""
    answers: int
    prefix_tokens_held: int
    """Number of prefix tokens that the instance reports as held."""
    pool_changes: int
    handing_over: int
    """Number of prompts on their way from the instance, and of its blocks being filled."""
    hand_overs: int
    """Number of the instance's prompts that arrived at the answering instance."""
    hand_over_seconds: float
    """Total seconds from the end of a handed-over prompt to its arrival."""
    hand_over_bytes: int
    """Total bytes of handed-over keys and values."""
    reports_refused: int
    """Number of prefix reports refused as impossible."""
    without_database: int = 0
    """Number of times that the instance went on without the tuning database, over all its starts."""
    place: Mapping[str, str] = {}
    """Node, label, formats and plans of the instance, by the labels of its metric; empty: it does not run."""
    kv_bytes: int = 0
    """Bytes of memory for keys and values; 0: it does not run."""


class Recoveries(NamedTuple):
    """Counters of recoveries since the start; none ever falls."""

    ranks_replaced: int = 0
    """Number of times that dead rank or instance processes were restarted."""
    requests_rerun: int = 0
    """Number of requests that ran again from the beginning because nothing had been given out."""
    answers_continued: int = 0
    """Number of answers that lost their ranks or instance and continued behind what was given out."""
    core_moves: int = 0
    """Number of times that an engine changed plans because its cores had changed."""


EngineState = Literal["starting", "running", "replacing", "lost"]

Deliver = Callable[[Delivery], None]
"""Called on the host's thread; must only pass the delivery on."""


class EngineHost(ABC):
    """Takes messages from any thread, and gives results to the `Deliver` function it was made with."""

    state: EngineState = "starting"
    lost: EngineLost | None = None
    """The reason why the host has given up for good; None: it has not."""

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """True if the host can still answer, now or after a restart of dead processes."""

    @abstractmethod
    def recoveries(self) -> Recoveries:
        """Counters of recoveries. Thread-safe."""

    def threads(self) -> Mapping[str, int]:
        """Number of threads of each phase now, the most over several models; empty if instances compute."""
        return {}

    @abstractmethod
    def fingerprint(self, model: str = "") -> Fingerprint | None:
        """Identity of the answering arithmetic; None: not yet known. `model`: id, if there are several."""

    def instances(self) -> Sequence[InstanceState]:
        """States of the instances behind the host; empty if one engine does everything. Thread-safe."""
        return ()

    @abstractmethod
    def start(self) -> None: ...

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message, from any thread. Results arrive through `Deliver`."""

    @abstractmethod
    def stop(self, timeout_s: float = 10.0) -> bool:
        """End every request. False: the step under way takes longer than `timeout_s`."""


class SharedCores(NamedTuple):
    """An engine's access to cores that other engines may compute on too."""

    turn: AbstractContextManager[None] = nullcontext()
    """Context entered for each step."""
    are_others_busy: Callable[[], bool] | None = None
    """True while other engines compute interactive requests; None: there are no other engines."""


OWN_CORES = SharedCores()

OpenHost = Callable[[Deliver, Callable[[], None], SharedCores], EngineHost]
"""Makes a host from `deliver`, `on_lost` (called once it has given up for good) and its cores."""


_WORST_FIRST: tuple[EngineState, ...] = ("lost", "replacing", "starting", "running")


class Turns:
    """A lock that threads get in the order in which they ask. With `threading.Lock` an engine that is never
    idle would take the next step before another one wakes up."""

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


class SeveralEngines(EngineHost):
    """The engines of several models by id. A request goes to the engine of `Submit.model`. A model put in
    before the start is permanent: losing its engine ends the server. Others are put in and taken out while it
    runs, from any thread but an engine's. The load is the sum of all. An engine with only requests of batches
    computes while no other engine has interactive ones."""

    def __init__(self, deliver: Deliver, on_lost: Callable[[], None] = lambda: None) -> None:
        self._turns = Turns()
        self._deliver = deliver
        self._on_lost = on_lost
        self._has_started = False
        self._hosts: Mapping[str, EngineHost] = {}
        self._staying: list[EngineHost] = []
        self._gone = Recoveries()
        """Recoveries of engines that were taken out."""
        self._loads: dict[str, EngineLoad] = {}
        self._changing = threading.Lock()
        """Held while a load changes and the sum is delivered, so that the newest sum is delivered last."""

    @property
    def state(self) -> EngineState:  # type: ignore[override]
        """The worst state of the permanent models' engines."""
        states = {host.state for host in self._staying}
        worst: EngineState | None = next((state for state in _WORST_FIRST if state in states), None)
        return worst or ("running" if self._has_started else "starting")

    @property
    def is_alive(self) -> bool:
        return self._has_started and all(host.is_alive for host in self._staying)

    @property
    def lost(self) -> EngineLost | None:  # type: ignore[override]
        return next((host.lost for host in self._staying if host.lost is not None), None)

    def recoveries(self) -> Recoveries:
        with self._changing:
            each = [self._gone, *(host.recoveries() for host in self._hosts.values())]
        return Recoveries(*map(sum, zip(*each, strict=True)))

    def threads(self) -> Mapping[str, int]:
        """The most threads that one engine has in each phase, since engines take turns."""
        each = [host.threads() for host in self._hosts.values()]
        return {phase: max(own.get(phase, 0) for own in each) for own in each for phase in own}

    def fingerprint(self, model: str = "") -> Fingerprint | None:
        """Identity of the arithmetic of the model with this id; None: it was taken out."""
        host = self._hosts.get(model)
        return None if host is None else host.fingerprint()

    def instances(self) -> tuple[InstanceState, ...]:
        """Instances of all models, named `MODEL/INSTANCE`."""
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
        """Send a request to its model's engine, any other message to all engines; an engine ignores an abort
        of a request that it does not know."""
        if isinstance(message, Submit):
            self._hosts[message.model].send(message)
            return
        for host in self._hosts.values():
            host.send(message)

    def stop(self, timeout_s: float = 10.0) -> bool:
        stopped = [host.stop(timeout_s) for host in self._hosts.values()]
        return all(stopped)

    def put(self, name: str, open_host: OpenHost, on_lost: Callable[[], None] | None = None) -> None:
        """Add a model, so that requests for it may be sent. `on_lost`: called when a removable model's engine
        is lost, which starts now; None: the model is permanent, and starts with the server."""
        cores = SharedCores(self._turns, partial(self._are_others_busy, name))
        host = open_host(partial(self._deliver_of, name), on_lost or self._on_lost, cores)
        with self._changing:
            self._hosts = {**self._hosts, name: host}
        if on_lost is None:
            self._staying.append(host)
        else:
            host.start()

    def take_out(self, name: str) -> None:
        """Stop a model's engine, however long its step takes, and remove it."""
        host = self._hosts[name]
        while not host.stop():
            pass
        with self._changing:
            self._hosts = {other: each for other, each in self._hosts.items() if other != name}
            self._loads.pop(name, None)
            self._gone = Recoveries(*map(sum, zip(self._gone, host.recoveries(), strict=True)))
            self._deliver(Delivery((), None, self._load()))

    def _load(self) -> EngineLoad:
        return EngineLoad.total(list(self._loads.values()))._replace(by_model=dict(self._loads))

    def _are_others_busy(self, name: str) -> bool:
        """True while another engine has interactive requests."""
        others = [load for other, load in self._loads.copy().items() if other != name]
        return any(load.n_waiting or load.n_running for load in others)

    def _deliver_of(self, name: str, delivery: Delivery) -> None:
        """Deliver one engine's results with the load of all. Called on that engine's thread."""
        stats = None if delivery.stats is None else delivery.stats._replace(model=name)
        with self._changing:
            self._loads[name] = delivery.load
            self._deliver(delivery._replace(stats=stats, load=self._load()))

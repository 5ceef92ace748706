"""Instances that say what a test has them say: the front's side of the protocol without engines."""

from __future__ import annotations

import contextlib
import queue
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import zmq

from phasewise._version import __version__
from phasewise.cluster.real.front import Front
from phasewise.cluster.real.instance import Orders
from phasewise.cluster.real.instance_messages import (
    FromInstance,
    Identity,
    Ready,
    ToInstance,
    read_to_instance,
    write,
)
from phasewise.cluster.real.supervisor import FrontSettings
from phasewise.cluster.routing import Role
from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Answer, Delivery, EngineLoad, Failure, Placed, Progress
from phasewise.serving.pools.contract import Placement
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.ranks.kv_share import KvPlace, KvShape
from tests.support.servers.rude_clients import until

PATIENCE_S = 60.0
FINGERPRINT = Fingerprint("ab" * 32, "cd" * 32, "ef" * 32, "", "native", "f16", "1/portable/00", "1/00")
IDENTITY = Identity(__version__, "ab" * 32, KvShape(2, 1, 4, "f16"), 300, 2048, FINGERPRINT)
LOAD = EngineLoad(0, 0, 0, 1024)

Message = TypeVar("Message", bound=ToInstance)


class ScriptedInstance:
    """One life of an instance."""

    def __init__(self, orders: Orders, index: int) -> None:
        self.orders = orders
        self.index = index
        self.ended: str | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt_string(zmq.IDENTITY, orders.name)
        self._socket.connect(orders.front)

    def say(self, message: FromInstance) -> None:
        self._socket.send(write(message))

    def ready(self, identity: Identity = IDENTITY, host: str = "here") -> None:
        place = KvPlace("/proc/1/fd/1", 1, 0, 1024)
        self.say(Ready(identity, 1000 + self.index, host, 1024, self.orders.listen, place, ()))

    def tell(
        self,
        *outs: Answer,
        placed: Sequence[Placed] = (),
        computed: Sequence[str] = (),
        arrived: Sequence[str] = (),
        progress: Sequence[Progress] = (),
    ) -> None:
        parts = tuple(placed), tuple(computed), tuple(arrived), tuple(progress)
        self.say(Delivery(outs, None, LOAD, *parts))

    def place(self, attempt_id: str) -> None:
        self.tell(placed=[Placed(attempt_id, Placement(0, 64))])

    def hear(self, kind: type[Message]) -> Message:
        """The next message, which is of this kind."""
        assert self._socket.poll(int(PATIENCE_S * 1000)), f"no {kind.__name__} came"
        message = read_to_instance(self._socket.recv())
        assert isinstance(message, kind), message
        return message

    def hears_nothing(self, for_s: float = 0.3) -> bool:
        return not self._socket.poll(int(for_s * 1000))

    def close(self) -> None:
        self._context.destroy(0)


class ScriptedLauncher:
    """`supervisor.Launcher` whose instances the test speaks for."""

    def __init__(self) -> None:
        self.launched: queue.Queue[ScriptedInstance] = queue.Queue()
        self.now: dict[int, ScriptedInstance] = {}
        self.killed: list[str] = []
        self.is_stopping = False
        self.joined = 0
        self.kills_wait_for = threading.Event()
        """A kill ends when this is set, as that of a host that is lost."""
        self.kills_wait_for.set()
        self.vacated: list[int] = []
        self.waiting: dict[int, str] = {}
        self.labels: dict[int, str] = {}
        self._all: list[ScriptedInstance] = []

    def launch(self, index: int, orders: Orders) -> None:
        instance = self.now[index] = ScriptedInstance(orders, index)
        self._all.append(instance)
        self.launched.put(instance)

    def ended(self, index: int) -> str | None:
        return "it was told to stop" if self.is_stopping else self.now[index].ended

    def waits(self, index: int) -> str | None:
        return self.waiting.get(index)

    def n_joined(self) -> int:
        return self.joined

    def place(self, index: int) -> dict[str, object]:
        return {"node": f"host-{index}", "label": self.labels.get(index)}

    def vacate(self, index: int) -> None:
        self.vacated.append(index)

    def kill(self, index: int) -> None:
        assert self.kills_wait_for.wait(PATIENCE_S)
        self.killed.append(self.now[index].orders.name)
        self.now[index].ended = "it was killed"

    def close(self) -> None:
        for instance in self._all:
            instance.ended = "it was closed"

    def close_sockets(self) -> None:
        for instance in self._all:
            instance.close()

    def next(self) -> ScriptedInstance:
        """The instance that is launched next."""
        return self.launched.get(timeout=PATIENCE_S)


class ScriptedServer:
    """A front over scripted instances, and what it delivered."""

    def __init__(self, front: Front, launcher: ScriptedLauncher) -> None:
        self.front, self.launcher = front, launcher
        self.outs: queue.Queue[Answer | Failure] = queue.Queue()
        self.progress: list[Progress] = []
        self.load: EngineLoad | None = None
        self.is_lost = False

    def deliver(self, delivery: Delivery) -> None:
        self.load = delivery.load
        self.progress += delivery.progress
        for out in delivery.outs:
            self.outs.put(out)

    def running(self, n_instances: int = 2) -> list[ScriptedInstance]:
        """All instances, ready."""
        instances = [self.launcher.next() for _ in range(n_instances)]
        for instance in instances:
            instance.ready()
        self.wait_until_state("running")
        return instances

    def replaced(
        self, instance: ScriptedInstance, ended: str = "it was killed by SIGKILL"
    ) -> ScriptedInstance:
        """The instance that is launched in the place of one that ends."""
        instance.ended = ended
        return self.launcher.next()

    def next_out(self) -> Answer | Failure:
        return self.outs.get(timeout=PATIENCE_S)

    def next_answer(self) -> Answer:
        out = self.next_out()
        assert isinstance(out, Answer)
        return out

    def wait_until_state(self, state: str) -> None:
        until(lambda: self.front.state == state, f"it does not become {state}")

    def wait_until(self, holds: Callable[[], bool]) -> None:
        until(holds, "it does not become so")


def who_hears(instances: Sequence[ScriptedInstance]) -> ScriptedInstance:
    """The first of these instances that something is said to."""
    poller = zmq.Poller()
    by_socket = {instance._socket: instance for instance in instances}
    for heard in by_socket:
        poller.register(heard, zmq.POLLIN)
    ((heard, _), *_others) = poller.poll(int(PATIENCE_S * 1000))
    return by_socket[heard]


@contextlib.contextmanager
def scripted_front(
    roles: Sequence[Role] = ("prompt", "token"), *, most_restarts: int = 5, **settings: object
) -> Iterator[ScriptedServer]:
    """A front whose instances are launched and have said nothing yet."""
    launcher = ScriptedLauncher()
    with tempfile.TemporaryDirectory(prefix="pw-") as folder:
        chosen = FrontSettings(
            f"ipc://{folder}/front",
            lambda index, life: f"ipc://{folder}/kv-{index}-{life}",
            **{"silent_s": 30.0, **settings},  # type: ignore[arg-type]
        )
        server = ScriptedServer(front=None, launcher=launcher)  # type: ignore[arg-type]
        server.front = Front(
            roles,
            launcher,
            chosen,
            server.deliver,
            lambda: setattr(server, "is_lost", True),
            lambda: Restarts(most=most_restarts, first_pause_s=0.01),
        )
        server.front.start()
        try:
            yield server
        finally:
            launcher.is_stopping = True
            server.front.stop(PATIENCE_S)
            launcher.close_sockets()

"""Supervision of instances: their processes are started, watched by heartbeats, and restarted when they end.

It knows no request. The front asks it what is wrong (`look_after`), and tells it who is of no use (`end`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from phasewise._version import __version__
from phasewise._words import number
from phasewise.cluster.real.instance import Orders
from phasewise.cluster.real.instance_messages import Beat, Ready
from phasewise.cluster.routing import Role
from phasewise.serving.engine.messages import EngineLoad
from phasewise.serving.errors import RankLost, RanksError
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.processes.sockets import Keys
from phasewise.serving.scheduling.scheduler_terms import LAYERWISE_ABOVE_TOKENS

KvTransfer = Literal["auto", "shm", "tcp"]

log = logging.getLogger(__name__)


class Launcher(Protocol):
    """Starts the processes of instances, and knows whether they live. Called on the front's thread."""

    def launch(self, index: int, orders: Orders) -> None:
        """Start the process of one instance; what comes of it, the instance says itself."""
        ...

    def ended(self, index: int) -> str | None:
        """In one line, how the process that was launched last has ended; None while it runs."""
        ...

    def kill(self, index: int) -> None:
        """End it at once, also where it is stopped. It cannot write to any memory once this returns."""
        ...

    def close(self) -> None:
        """End all of them."""
        ...


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings of a front and its instances. Times in seconds.

    endpoint: where instances reach it; listen: where each of them takes keys and values. keys: needed
    wherever these are not on this host.
    """

    endpoint: str
    listen: Callable[[int, int], str]
    """From an instance's number and the number of its start to an address, e.g. `ipc:///run/x/kv-0-1`."""
    keys: Keys | None = None
    split_above_tokens: int = 0
    repurpose_after_requests: int = 0
    kv_transfer: KvTransfer = "auto"
    layerwise_above_tokens: int = LAYERWISE_ABOVE_TOKENS
    start_s: float = 300.0
    silent_s: float = 2.5
    """An instance that says nothing for so long is dead."""
    stuck_s: float = 60.0
    """An engine that has work and makes no turn for so long hangs."""
    hand_over_s: float = 10.0
    """From the end of a prompt to the arrival of its keys and values."""


@dataclass(slots=True)
class InstanceMember:
    """One place for an instance, and the instance that fills it now."""

    index: int
    role: Role
    restarts: Restarts
    life: int = 0
    ready: Ready | None = None
    launched_s: float = 0.0
    heard_s: float = 0.0
    turns: int = -1
    turned_s: float = 0.0
    is_busy: bool = True
    """By its last beat."""
    load: EngineLoad | None = None
    refused: dict[str, int] = field(default_factory=dict)
    n_handing_over: int = 0
    due_s: float | None = 0.0
    """When to launch the next one; None: it runs, or the place is given up."""
    is_given_up: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}-{self.life}"

    @property
    def has_nothing(self) -> bool:
        """True if it says that it holds no request."""
        return not self.is_busy and (self.load is None or not any(self.load[:3]))

    def beats(self, beat: Beat) -> None:
        """Take note of what it says of itself; it has just been heard."""
        self.refused, self.n_handing_over, self.is_busy = beat.refused, beat.n_handing_over, beat.is_busy
        if beat.turns != self.turns or not beat.is_busy:
            self.turns, self.turned_s = beat.turns, self.heard_s

    def facts(self, pool: Role) -> dict[str, object]:
        """For people and scripts. pool: the one that it is in now."""
        return {
            "index": self.index,
            "role": self.role,
            "pool": pool,
            "state": "running" if self.ready else "given up" if self.is_given_up else "starting",
            "pid": self.ready.pid if self.ready else None,
            "restarts": max(0, self.life - 1),
            "running": self.load.n_running if self.load else 0,
            "waiting": self.load.n_waiting if self.load else 0,
            "kv_slots_used": self.load.kv_slots_used if self.load else 0,
            "kv_slots": self.ready.kv_slots if self.ready else 0,
            "handing_over": self.n_handing_over,
            "plans": list(self.ready.plans) if self.ready else [],
        }


class Supervisor:
    """The processes of all instances of a front. Used on the front's thread."""

    def __init__(
        self,
        roles: Sequence[Role],
        launcher: Launcher,
        settings: FrontSettings,
        restarts: Callable[[], Restarts] = Restarts,
    ) -> None:
        self.members = [InstanceMember(index, role, restarts()) for index, role in enumerate(roles)]
        self.n_replaced = 0
        self._launcher = launcher
        self._settings = settings
        self._by_name: dict[str, InstanceMember] = {}

    @property
    def has_started(self) -> bool:
        """True if every instance is ready, but for those that are given up."""
        return all(member.ready is not None or member.is_given_up for member in self.members)

    @property
    def is_hopeless(self) -> bool:
        """True if no instance will ever be ready again."""
        return all(member.is_given_up for member in self.members)

    def heard(self, name: str) -> InstanceMember | None:
        """The instance that has just said something; None: an earlier life."""
        member = self._by_name.get(name)
        if member is not None:
            member.heard_s = time.monotonic()
        return member

    def look_after(self, endpoint: str, now_s: float) -> Iterator[tuple[InstanceMember, str]]:
        """Start the instances that are due, which find the front at `endpoint`. Yields those to `end`, and
        why.
        """
        for member in self.members:
            problem = None
            if member.due_s is not None and now_s >= member.due_s:
                problem = self._launch(member, endpoint, now_s)
            elif member.due_s is None and not member.is_given_up:
                problem = self._launcher.ended(member.index) or self._problem(member, now_s)
            if problem is not None:
                yield member, problem

    def admit(self, member: InstanceMember, ready: Ready) -> str | None:
        """Take it in among the others; if not, why it cannot belong to them: it is given up then."""
        problem = self._misfit(member, ready)
        if problem is not None:
            member.is_given_up = True
            return problem
        member.ready = ready
        member.turned_s = member.heard_s
        log.info("instance %s runs as process %d: %s", member.name, ready.pid, "; ".join(ready.plans))
        return None

    def end(self, member: InstanceMember, why: str) -> RankLost:
        """The instance has ended or is of no use: it is killed, and due to be started anew unless it is given
        up."""
        was_ready, name = member.ready is not None, member.name
        self._by_name.pop(name, None)
        self._launcher.kill(member.index)
        member.ready, member.load, member.n_handing_over, member.is_busy = None, None, 0, True
        lost = RankLost(f"instance {name} was lost: {why}")
        log.error("%s", lost)
        pause_s = None if member.is_given_up else member.restarts.pause_s(time.monotonic())
        if pause_s is None:
            member.due_s, member.is_given_up = None, True
        else:
            member.due_s = time.monotonic() + pause_s
            self.n_replaced += was_ready
        return lost

    def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until all that are ready have ended by themselves."""
        deadline_s = time.monotonic() + timeout_s
        running = [member.index for member in self.members if member.ready is not None]
        while time.monotonic() < deadline_s and any(self._launcher.ended(index) is None for index in running):
            time.sleep(0.01)

    def close(self) -> None:
        """End every process."""
        self._launcher.close()

    def _launch(self, member: InstanceMember, endpoint: str, now_s: float) -> str | None:
        member.life += 1
        member.due_s = None
        member.launched_s = now_s
        self._by_name[member.name] = member
        settings = self._settings
        orders = Orders(
            member.name,
            endpoint,
            settings.listen(member.index, member.life),
            settings.keys,
            settings.layerwise_above_tokens,
        )
        try:
            self._launcher.launch(member.index, orders)
        except (OSError, RanksError) as error:
            return f"it cannot be started: {error}"
        return None

    def _problem(self, member: InstanceMember, now_s: float) -> str | None:
        if member.ready is None:
            late = now_s - member.launched_s > self._settings.start_s
            return f"it was not ready within {number(self._settings.start_s)} s" if late else None
        if now_s - member.heard_s > self._settings.silent_s:
            return f"it said nothing for {number(self._settings.silent_s)} s"
        if now_s - member.turned_s > self._settings.stuck_s:
            return f"its engine made no step for {number(self._settings.stuck_s)} s"
        return None

    def _misfit(self, member: InstanceMember, ready: Ready) -> str | None:
        """Why an instance cannot belong to the others; None: it can."""
        if ready.identity.version != __version__:
            return f"it runs phasewise {ready.identity.version}, this server is {__version__}"
        for other in self.members:
            if other is member or other.ready is None or other.ready.identity == ready.identity:
                continue
            ours, theirs = other.ready.identity, ready.identity
            if ours.model_hash != theirs.model_hash:
                return f"its model or weight format differs from that of instance {other.name}"
            if ours.shape != theirs.shape:
                return f"it keeps keys and values as {theirs.shape}, instance {other.name} as {ours.shape}"
            if differing := ours.fingerprint.differences(theirs.fingerprint):
                return (
                    f"its answers would not be those of instance {other.name}: they differ in "
                    f"{', '.join(differing)} ({ours.fingerprint.arithmetic}, {theirs.fingerprint.arithmetic})"
                )
            if ours.adapters != theirs.adapters:
                return f"its adapters are not those of instance {other.name}"
            return (
                f"its context is {theirs.context_length} tokens, that of {other.name} {ours.context_length}"
            )
        return None

"""Supervision of instances: their processes are started, watched by heartbeats, and restarted when they end.

A supervisor knows no request. `look_after` tells the front the instances that are lost, and `end` kills one.
Processes are killed on threads of their own: a host that is lost confirms nothing, and the front must not
wait.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Literal, Protocol

from phasewise._version import __version__
from phasewise._words import number
from phasewise.cluster.real.instance import Orders
from phasewise.cluster.real.instance_messages import Heartbeat, Identity, Ready
from phasewise.cluster.routing import Role, Router
from phasewise.serving.engine.engine_host import InstanceState
from phasewise.serving.engine.messages import EngineLoad
from phasewise.serving.engine.stored_prefixes import shape_of
from phasewise.serving.errors import RankLost, RanksError
from phasewise.serving.prefix_store.store import summed
from phasewise.serving.processes.restarts import Restarts
from phasewise.serving.processes.sockets import Keys
from phasewise.serving.scheduling.held_prefixes import BLOCK_TOKENS

KvTransfer = Literal["auto", "shm", "tcp"]

log = logging.getLogger(__name__)


QUICK_S = 0.005
"""Seconds that the front waits for the end of a killed process; of several, only for the first."""
LEAVE_S = 5.0
"""Seconds after which a process that was told to stop, because its place is given back, is killed."""


class Launcher(Protocol):
    """Starts the processes of instances and reports whether they live. Called on the front's thread, where
    methods return at once, except `kill` and `vacate`, which may take long and run on other threads."""

    def launch(self, index: int, orders: Orders) -> None:
        """Start the process of one instance; the instance itself reports its success."""

    def waits(self, index: int) -> str | None:
        """The reason, in one line, why the last launched process has no place yet; None if it has one."""
        return None

    def ended(self, index: int) -> str | None:
        """The way in which the last launched process has ended, in one line; None while it runs."""

    def n_joined(self) -> int:
        """Number of hosts that have joined since the start: when it grows, the supervisor tries again to
        place instances that did not fit."""
        return 0

    def place(self, index: int) -> dict[str, object]:
        """Facts about the place where the instance runs or is to run, for people and scripts."""
        return {}

    def kill(self, index: int) -> None:
        """End an instance at once, even if stopped by a signal; it then writes to no memory any more."""

    def vacate(self, index: int) -> None:
        """Give an instance's place back, after `kill`: the next launch looks for another one."""

    def close(self) -> None:
        """End all instances."""


@dataclass(frozen=True, slots=True)
class FrontSettings:
    """Settings of a front and its instances; times in seconds. endpoint: the front's address, for instances.
    listen: address at which each instance takes keys and values. keys: keys of encrypted connections, needed
    wherever these are not on this host."""

    endpoint: str
    listen: Callable[[int, int], str]
    """Function that makes an address from an instance's number and the number of its start, e.g.
    `ipc:///run/x/kv-0-1`."""
    keys: Keys | None = None
    policy: str = "prefix-aware"
    """The routing policy, one of `routing.POLICIES`."""
    split_above_tokens: int = 0
    kv_transfer: KvTransfer = "auto"
    start_s: float = 300.0
    silent_s: float = 2.5
    """Seconds of silence after which an instance counts as dead."""
    stuck_s: float = 60.0
    """Seconds after which an engine that has work and makes no turn counts as hanging."""
    hand_over_s: float = 10.0
    """Seconds that a hand-over may take from the end of a prompt to the arrival of its keys and values."""
    again_s: float = 60.0
    """Seconds after which a given-up place is tried again; when a host joins, it is tried at once."""


@dataclass(slots=True)
class InstanceMember:
    """One place for an instance, and the instance that is there now."""

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
    """True if the instance had work at its last heartbeat."""
    load: EngineLoad | None = None
    refused: dict[str, int] = field(default_factory=dict)
    n_handing_over: int = 0
    n_without_database: int = 0
    """Number of times that the instances of this place went on without the tuning database."""
    hand_overs: int = 0
    hand_over_s: float = 0.0
    hand_over_bytes: int = 0
    reports_refused: int = 0
    due_s: float | None = 0.0
    """The instant of the next launch; None if an instance runs, or the place is given up or was left."""
    is_given_up: bool = False
    given_up_s: float = 0.0
    problem: str = ""
    """The reason, in one line, why the last instance ended; empty if none has ended."""
    is_draining: bool = False
    """True while the instance is given no request and stops once it has none."""
    has_left: bool = False
    """True if the instance was drained and has stopped."""
    ending: Future[None] | None = None
    """Done when the last killed process cannot write any more; None if none was killed."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.index}-{self.life}"

    @property
    def has_nothing(self) -> bool:
        """True if the instance reports that it holds no request."""
        return not self.is_busy and (self.load is None or not any(self.load[:3]))

    def handed_over(self, n_prompt: int, took_s: float) -> None:
        """Count a prompt whose keys and values have arrived at the instance that answers."""
        self.hand_overs += 1
        self.hand_over_s += max(0.0, took_s)
        if self.ready is not None:
            shape = shape_of(self.ready.identity.shape)
            self.hand_over_bytes += n_prompt * shape.n_layers * shape.slot_bytes

    def hear(self, heartbeat: Heartbeat) -> None:
        """Take note of the instance's report of itself, and of the time at which it was heard."""
        self.refused, self.n_handing_over, self.is_busy = (
            heartbeat.refused,
            heartbeat.n_handing_over,
            heartbeat.is_busy,
        )
        if heartbeat.turns != self.turns or not heartbeat.is_busy:
            self.turns, self.turned_s = heartbeat.turns, self.heard_s

    @property
    def state(self) -> str:
        """The instance's state in a word or two, for people and scripts."""
        if self.ready is not None:
            return "draining" if self.is_draining else "running"
        if self.has_left:
            return "drained"
        return "given up" if self.is_given_up else "starting"

    def facts(self, pool: Role) -> dict[str, object]:
        """Facts of the instance, for people and scripts. pool: the pool that it is in now. Any thread may
        call this, also while the instance is lost."""
        ready, load = self.ready, self.load
        fingerprint = ready.identity.fingerprint if ready else None
        return {
            "index": self.index,
            "name": self.name,
            "role": self.role,
            "pool": pool,
            "state": self.state,
            "problem": "" if ready else self.problem,
            "pid": ready.pid if ready else None,
            "format": fingerprint.weight_format if fingerprint else None,
            "kv_format": fingerprint.kv_format if fingerprint else None,
            "kv_bytes": ready.kv_bytes if ready else 0,
            "cpus": list(ready.cpus) if ready else [],
            "restarts": max(0, self.life - 1),
            "running": load.n_running if load else 0,
            "waiting": load.n_waiting if load else 0,
            "kv_slots_used": load.kv_slots_used if load else 0,
            "kv_slots": ready.kv_slots if ready else 0,
            "handing_over": self.n_handing_over,
            "plans": list(ready.plans) if ready else [],
        }


class Supervisor:
    """Starts, watches and ends the processes of all instances of a front. Used on the front's thread."""

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
        self._n_joined = 0
        self._aside = ThreadPoolExecutor(len(self.members), "phasewise-ends")

    @property
    def has_started(self) -> bool:
        """True if every instance is ready, except places that were given up or left."""
        return all(
            member.ready is not None or member.is_given_up or member.has_left for member in self.members
        )

    @property
    def is_hopeless(self) -> bool:
        """True if no instance will become ready again by itself."""
        return all(member.is_given_up or member.has_left for member in self.members)

    def states(self, router: Router) -> list[InstanceState]:
        """The state of each instance, in the order of their places. Any thread may ask."""
        return [
            InstanceState(
                f"{member.role}-{member.index}",
                member.role,
                pool,
                member.load,
                max(0, member.life - 1),
                counts.prompts,
                counts.prompt_tokens,
                counts.tokens_expected,
                counts.answers,
                router.n_blocks(member.index) * BLOCK_TOKENS,
                counts.pool_changes,
                member.n_handing_over,
                member.hand_overs,
                member.hand_over_s,
                member.hand_over_bytes,
                member.reports_refused,
                member.n_without_database,
                *_place(member.ready, self._launcher.place(member.index)),
            )
            for member, pool, counts in zip(self.members, router.roles, router.counts, strict=True)
        ]

    def facts(self, pools: Sequence[Role]) -> list[dict[str, object]]:
        """Facts of every place, for people and scripts. pools: the pools that the instances are in now."""
        facts = []
        for member, pool in zip(self.members, pools, strict=True):
            waits = None if member.ready or member.due_s is not None else self._launcher.waits(member.index)
            own = member.facts(pool) | self._launcher.place(member.index)
            facts.append({**own, "state": "waiting", "problem": waits} if waits else own)
        return facts

    def heard(self, name: str) -> InstanceMember | None:
        """Note that an instance was heard and return its member; None for an earlier life's name."""
        member = self._by_name.get(name)
        if member is not None:
            member.heard_s = time.monotonic()
        return member

    def look_after(self, endpoint: str, now_s: float) -> Iterator[tuple[InstanceMember, str]]:
        """Start the instances that are due, which find the front at `endpoint`. Yields the instances to
        `end`, each with the reason."""
        self._try_again(now_s)
        for member in self.members:
            problem = None
            if member.ending is not None or member.has_left:
                continue
            if member.due_s is not None and now_s >= member.due_s:
                problem = self._launch(member, endpoint, now_s)
            elif member.due_s is None and not member.is_given_up:
                problem = self._launcher.ended(member.index) or self._problem(member, now_s)
            if problem is not None:
                yield member, problem

    def ended(self) -> Iterator[InstanceMember]:
        """Yield the killed instances whose processes have ended: they write to no memory any more."""
        for member in self.members:
            if member.ending is not None and member.ending.done():
                if (error := member.ending.exception()) is not None:
                    log.error("instance %s cannot be killed: %s", member.name, error)
                member.ending = None
                yield member

    def _try_again(self, now_s: float) -> None:
        """Make given-up places due again after `again_s`, or when a host has joined."""
        n_joined = self._launcher.n_joined()
        for member in self.members:
            late = now_s - member.given_up_s > self._settings.again_s
            if member.is_given_up and member.ending is None and (late or n_joined > self._n_joined):
                member.is_given_up, member.due_s = False, now_s
        self._n_joined = n_joined

    def admit(self, member: InstanceMember, ready: Ready) -> str | None:
        """Admit a ready instance. Returns None, or the reason why it cannot serve beside the others, with
        its place given up."""
        problem = self._misfit(member, ready)
        if problem is not None:
            member.is_given_up = True
            return problem
        member.ready, member.problem = ready, ""
        member.n_without_database += ready.n_without_database
        member.turned_s = member.heard_s
        log.info("instance %s runs as process %d: %s", member.name, ready.pid, "; ".join(ready.plans))
        return None

    def end(self, member: InstanceMember, why: str) -> RankLost:
        """Kill an instance that has ended or is of no use. `ended` yields it once its process is dead; it is
        started anew unless its place is given up or it leaves."""
        was_ready, name = member.ready is not None, member.name
        lost = RankLost(f"instance {name} was lost: {why}")
        log.error("%s", lost)
        member.problem = why
        now_s = time.monotonic()
        pause_s = None if member.is_given_up or member.is_draining else member.restarts.pause_s(now_s)
        if pause_s is not None:
            member.due_s = now_s + pause_s
            self.n_replaced += was_ready
        elif member.is_draining:
            member.due_s, member.has_left = None, True
        else:
            member.due_s, member.is_given_up, member.given_up_s = None, True, now_s
        self._kill(member, 0.0)
        return lost

    def leave(self, member: InstanceMember) -> None:
        """Mark a drained instance as gone; it is killed unless it ends by itself within LEAVE_S."""
        member.has_left, member.due_s, member.problem = True, None, ""
        log.info("instance %s is drained", member.name)
        self._kill(member, LEAVE_S)

    def come_back(self, member: InstanceMember) -> None:
        """Undo the draining of an instance: it goes on, or is started anew if it has left."""
        member.is_draining = False
        if member.has_left:
            member.has_left, member.due_s = False, time.monotonic()

    def _kill(self, member: InstanceMember, patience_s: float) -> None:
        """Kill an instance's process on another thread, after `patience_s` in which it may end by itself."""
        self._by_name.pop(member.name, None)
        member.ready, member.load, member.n_handing_over, member.is_busy = None, None, 0, True
        quick_s = QUICK_S if all(other.ending is None for other in self.members) else 0
        is_out = member.is_given_up or member.has_left
        member.ending = self._aside.submit(self._end_process, member.index, patience_s, is_out)
        if not patience_s:
            wait_for([member.ending], quick_s)

    def _end_process(self, index: int, patience_s: float, is_out: bool) -> None:
        deadline_s = time.monotonic() + patience_s
        while time.monotonic() < deadline_s and self._launcher.ended(index) is None:
            time.sleep(0.01)
        self._launcher.kill(index)
        if is_out:
            self._launcher.vacate(index)

    def wait_for_ends(self, timeout_s: float) -> None:
        """Wait until all ready instances have ended by themselves."""
        deadline_s = time.monotonic() + timeout_s
        running = [member.index for member in self.members if member.ready is not None]
        while time.monotonic() < deadline_s and any(self._launcher.ended(index) is None for index in running):
            time.sleep(0.01)

    def close(self) -> None:
        self._aside.shutdown(wait=False)
        self._launcher.close()

    def _launch(self, member: InstanceMember, endpoint: str, now_s: float) -> str | None:
        member.life += 1
        member.due_s = None
        member.launched_s = now_s
        self._by_name[member.name] = member
        settings = self._settings
        orders = Orders(member.name, endpoint, settings.listen(member.index, member.life), settings.keys)
        try:
            self._launcher.launch(member.index, orders)
        except (OSError, RanksError) as error:
            return f"it cannot be started: {error}"
        return None

    def _problem(self, member: InstanceMember, now_s: float) -> str | None:
        if member.ready is None:
            if self._launcher.waits(member.index) is not None:
                member.launched_s = now_s  # its time to start begins when it has a place
                return None
            late = now_s - member.launched_s > self._settings.start_s
            return f"it was not ready within {number(self._settings.start_s)} s" if late else None
        if now_s - member.heard_s > self._settings.silent_s:
            return f"it said nothing for {number(self._settings.silent_s)} s"
        if now_s - member.turned_s > self._settings.stuck_s:
            return f"its engine made no step for {number(self._settings.stuck_s)} s"
        return None

    def _misfit(self, member: InstanceMember, ready: Ready) -> str | None:
        """The reason why an instance cannot serve beside the others; None if it can."""
        if ready.identity.version != __version__:
            return f"it runs phasewise {ready.identity.version}, this server is {__version__}"
        for other in self.members:
            if other is not member and other.ready is not None:
                problem = _difference(other.name, other.ready.identity, ready.identity)
                if problem is not None:
                    return problem
        return None


def _difference(name: str, ours: Identity, theirs: Identity) -> str | None:
    """The difference of two identities for which instance `name`, of identity `ours`, cannot hand requests
    over; None if it can. The name of a format is no difference: the same numbers and arithmetic give the same
    bits."""
    if ours.model_hash != theirs.model_hash:
        return f"its model or weight format differs from that of instance {name}"
    if ours.shape != theirs.shape:
        return f"it keeps keys and values as {theirs.shape}, instance {name} as {ours.shape}"
    differing = [part for part in ours.fingerprint.differences(theirs.fingerprint) if part != "weight_format"]
    if differing:
        return (
            f"its answers would not be those of instance {name}: they differ in "
            f"{', '.join(differing)} ({ours.fingerprint.arithmetic}, {theirs.fingerprint.arithmetic})"
        )
    if ours.adapters != theirs.adapters:
        return f"its adapters are not those of instance {name}"
    if ours.context_length != theirs.context_length:
        return f"its context is {theirs.context_length} tokens, that of {name} {ours.context_length}"
    return None


# ---- what is told of all instances ------------------------------------------------------------------------


def _place(ready: Ready | None, place: Mapping[str, object]) -> tuple[Mapping[str, str], int]:
    """`place` and `kv_bytes` of an instance's state."""
    if ready is None:
        return {}, 0
    plans = {phase: words for phase, _, words in (plan.partition(": ") for plan in ready.plans)}
    fingerprint = ready.identity.fingerprint
    told = {
        "node": str(place.get("node") or ""),
        "label": str(place.get("label") or ""),
        "format": fingerprint.weight_format,
        "kv_format": fingerprint.kv_format,
        "sparse_weights": str(ready.n_sparse_weights),
        "prefill_plan": plans.get("prefill", ""),
        "decode_plan": plans.get("decode", ""),
    }
    return told, ready.kv_bytes


def load_together(loads: Sequence[EngineLoad], n_waiting: int, n_running: int) -> EngineLoad:
    """Add up the load of several instances; n_waiting, n_running: the front's own counts of requests."""
    return EngineLoad.total(loads)._replace(
        n_waiting=n_waiting,
        n_running=n_running,
        stored=summed([load.stored for load in loads if load.stored is not None]),
        prompt_token_ns=_together_ns([load.prompt_token_ns for load in loads]),
        best_token_ns=_together_ns([load.best_token_ns for load in loads]),
    )


def _together_ns(times_ns: Sequence[float]) -> float:
    """Nanoseconds a token of several instances that compute prompts at once; 0 if none has computed one."""
    positive_ns = [time_ns for time_ns in times_ns if time_ns > 0]
    return 1 / sum(1 / time_ns for time_ns in positive_ns) if positive_ns else 0.0

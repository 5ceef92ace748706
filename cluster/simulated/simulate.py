"""A trace through a cluster of machines with the production scheduler, on simulated time.

The clock moves by step times and transfers alone. The same cluster and trace give the same instants for ever:
events of one instant run in the order in which they were scheduled, and of equal machines the first is taken.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, cast

from phasewise._words import counted
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.routing import Ask, Limits, Role, Router
from phasewise.cluster.simulated.machines import EngineSettings, ProductionMachine, Timeline
from phasewise.cluster.simulated.simulated_requests import PREFIX_BLOCK_TOKENS, Arrival, Life
from phasewise.cluster.simulated.steps import StepTimes
from phasewise.serving.errors import RequestError
from phasewise.serving.scheduling.held_prefixes import HeldReport, block_keys
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS
from phasewise.serving.scheduling.request import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_SEQUENCES,
    Request,
    SchedulerLimits,
)

DEFAULT_LIMITS = Limits()


# ---- keys and values from one machine to another (Splitwise IV-C, Fig. 11) ------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """The outgoing link of a machine. Transfers follow one another; each has the whole bandwidth."""

    bytes_per_s: float
    latency_s: float = 0.0
    layerwise_above_tokens: int = 0
    """Prompt tokens above which keys and values are sent layer by layer while they are computed; shorter
    prompts are sent when they are done. The paper has 512 (VI-A), `phasewise serve` 0."""

    def to(self, other: Link) -> Link:
        """The link between two machines: the slower of their two decides."""
        return Link(
            min(self.bytes_per_s, other.bytes_per_s),
            max(self.latency_s, other.latency_s),
            self.layerwise_above_tokens,
        )


class Prompt(NamedTuple):
    """A prompt to send: its length, and when it was computed."""

    n_tokens: int
    n_bytes: int
    n_layers: int
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """The instants of a transfer: when the link is taken, and when the last byte has arrived."""

    begin_s: float
    link_free_s: float
    arrival_s: float


def transfer(link: Link, prompt: Prompt, granted_s: float, free_s: float) -> Transfer:
    """The transfer of a computed prompt whose target had a block from `granted_s`, on a link free at
    `free_s`.

    Layer by layer: layer i of L is there to be sent when i / L of the prompt's time has passed. The
    layers leave in order, so the last byte leaves when the link has sent all of them, and not
    before the last layer has been computed and sent.
    """
    whole_s = prompt.n_bytes / link.bytes_per_s
    if prompt.n_tokens <= link.layerwise_above_tokens:
        begin_s = max(prompt.end_s, granted_s, free_s)
        left_s = begin_s + whole_s
    else:
        first_layer_s = prompt.start_s + (prompt.end_s - prompt.start_s) / prompt.n_layers
        begin_s = max(first_layer_s, granted_s, free_s)
        left_s = max(begin_s + whole_s, prompt.end_s + whole_s / prompt.n_layers)
    return Transfer(begin_s, left_s, left_s + link.latency_s)


# ---- machines and the cluster ---------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineType:
    """A kind of machine with a model on it."""

    name: str
    steps: StepTimes
    memory_bytes: int
    """Bytes for weights, keys and values."""
    weight_bytes: int
    kv_bytes_per_token: int
    n_layers: int
    link: Link
    cost: float = 0.0
    """Price of one machine for an hour, in any one currency."""
    power_w: float = 0.0
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS
    max_sequences: int = DEFAULT_SEQUENCES
    tpot_ms: float = DEFAULT_TPOT_MS

    @property
    def kv_slots(self) -> int:
        """Tokens whose keys and values fit beside the weights."""
        return (self.memory_bytes - self.weight_bytes) // self.kv_bytes_per_token


@dataclass(frozen=True)
class Pool:
    """Machines of one type with one role."""

    role: Role
    machine: MachineType
    count: int


@dataclass(frozen=True)
class ClusterSpec:
    """The settings of a simulation. `policy` is one of `POLICIES`."""

    pools: tuple[Pool, ...]
    policy: str = "splitwise"
    limits: Limits = DEFAULT_LIMITS
    prefix_reuse: bool = False

    @property
    def machines(self) -> list[tuple[Role, MachineType]]:
        return [(pool.role, pool.machine) for pool in self.pools for _ in range(pool.count)]

    @property
    def tells_prefixes(self) -> bool:
        """True if machines tell the router which beginnings of prompts they hold."""
        return self.prefix_reuse and self.policy == "prefix-aware"

    @property
    def n_machines(self) -> int:
        return sum(pool.count for pool in self.pools)

    @property
    def cost(self) -> float:
        return sum(pool.count * pool.machine.cost for pool in self.pools)

    @property
    def power_w(self) -> float:
        return sum(pool.count * pool.machine.power_w for pool in self.pools)


@dataclass(frozen=True)
class MachineUse:
    """The work of one machine in a simulation."""

    role: Role
    machine: str
    busy_s: float
    occupancy_s: Mapping[int, float]
    """Seconds that the machine computed, by tokens of the batch."""


@dataclass(frozen=True)
class Simulation:
    """The outcome of a trace. `lives` in the order of the trace."""

    spec: ClusterSpec
    lives: list[Life]
    machines: list[MachineUse]
    end_s: float
    n_preemptions: int
    """Moves of machines between the prompt and the token pool."""


def simulate(spec: ClusterSpec, arrivals: Sequence[Arrival]) -> Simulation:
    """Run every request of a trace to its end. ClusterError where one can run on no machine."""
    if not arrivals:
        raise ClusterError("the trace holds no request")
    return ProductionCluster(spec, arrivals).run()


class _Going:
    """A request on its way between two machines."""

    __slots__ = ("granted_s", "is_computed", "is_sending", "life")

    def __init__(self, life: Life) -> None:
        self.life = life
        self.granted_s = math.nan
        self.is_computed = False
        """True if the prompt's keys and values are all there: a preemption undoes it."""
        self.is_sending = False


class ProductionCluster:
    """Several engines behind a router; it is the `Listener` of each of its machines."""

    def __init__(self, spec: ClusterSpec, arrivals: Sequence[Arrival]) -> None:
        """Make the machines of `spec` idle."""
        self._spec = spec
        self._timeline = Timeline()
        self._kinds = [kind for _, kind in spec.machines]
        longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
        self._machines = [
            ProductionMachine(index, kind.steps, _settings(kind, longest, spec), self._timeline, self)
            for index, kind in enumerate(self._kinds)
        ]
        machines = ((role, kind.kv_slots) for role, kind in spec.machines)
        self._router = Router(machines, spec.policy, spec.limits)
        self._link_free_s = [0.0] * len(self._machines)
        self._lives = {str(index): Life(arrival) for index, arrival in enumerate(arrivals)}
        self._going: dict[str, _Going] = {}

    def run(self) -> Simulation:
        for request_id, life in self._lives.items():
            self._timeline.at(life.arrival.at_s, partial(self._take, request_id))
        self._timeline.run()
        lives = list(self._lives.values())
        stuck = [life for life in lives if math.isnan(life.end_s)]
        if stuck:
            raise AssertionError(f"{counted(len(stuck), 'request')} never ended, the first is {stuck[0]}")
        for machine in self._machines:
            machine.scheduler.check()
        uses = [
            MachineUse(role, kind.name, machine.busy_s, machine.occupancy_s)
            for machine, (role, kind) in zip(self._machines, self._spec.machines, strict=True)
        ]
        preemptions = sum(machine.scheduler.counts.preemptions for machine in self._machines)
        return Simulation(self._spec, lives, uses, self._timeline.now_s, preemptions)

    def prompt_step_begins(self, request_id: str) -> None:
        life, going = self._lives[request_id], self._going.get(request_id)
        if going is not None:
            going.is_computed = False
        if not math.isnan(life.prompt_start_s):
            return
        life.prompt_start_s = self._timeline.now_s
        if going is not None:
            self._submit(life.token_machine, self._request(request_id, prefill_only=False), expect=True)

    def prompt_computed(self, request_id: str) -> None:
        life = self._lives[request_id]
        if math.isnan(life.prompt_end_s):  # a paused answer has its prompt computed again
            life.prompt_end_s = self._timeline.now_s
        if request_id in self._going:
            self._going[request_id].is_computed = True
            self._send(request_id)
        else:
            self._router.prompt_done(request_id)

    def block_granted(self, request_id: str) -> None:
        going = self._going[request_id]
        going.granted_s = self._timeline.now_s
        self._send(request_id)

    def told(self, index: int, token_s: float, report: HeldReport | None) -> None:
        self._router.tells(index, token_s, report)

    def token_made(self, request_id: str, n_generated: int, *, is_last: bool) -> None:
        life, now_s = self._lives[request_id], self._timeline.now_s
        if n_generated == 1:
            life.first_token_s = now_s
        if is_last:
            life.end_s = now_s
            self._router.finished(request_id)

    def _take(self, request_id: str) -> None:
        life = self._lives[request_id]
        arrival = life.arrival
        prompt = _token_ids(arrival, reuse=self._spec.prefix_reuse)
        prefix = block_keys(prompt, "", "") if self._spec.tells_prefixes else ()
        ask = Ask(request_id, arrival.prompt_tokens, arrival.output_tokens, prefix)
        assignment = self._router.assign(ask)
        life.prompt_machine, life.token_machine = assignment
        is_split = assignment.prompt != assignment.token
        if is_split:
            self._going[request_id] = _Going(life)
        self._submit(assignment.prompt, self._request(request_id, prefill_only=is_split), expect=False)

    def _request(self, request_id: str, *, prefill_only: bool) -> Request:
        arrival = self._lives[request_id].arrival
        prompt = _token_ids(arrival, reuse=self._spec.prefix_reuse)
        most = 1 if prefill_only else arrival.output_tokens
        return Request(request_id, prompt, most, prefill_only=prefill_only, client=arrival.client)

    def _submit(self, index: int, request: Request, *, expect: bool) -> None:
        machine = self._machines[index]
        try:
            (machine.expect if expect else machine.submit)(request)
        except RequestError as error:
            kind = self._kinds[index].name
            raise ClusterError(f"request {request.request_id} cannot run on {kind}: {error}") from None

    def _send(self, request_id: str) -> None:
        """Send a request's keys and values, if its prompt is computed and its block is granted; else one of
        both is still to come."""
        going = self._going[request_id]
        life = going.life
        if going.is_sending or not going.is_computed or math.isnan(going.granted_s):
            return
        source = self._machines[life.prompt_machine]
        if source.scheduler.hand_over(request_id) is None:
            return  # preempted before its block was granted: it will be computed again
        going.is_sending = True
        kind = self._kinds[life.prompt_machine]
        link = kind.link.to(self._kinds[life.token_machine].link)
        n_tokens = self.tokens_to_send(request_id)
        prompt = Prompt(
            n_tokens,
            n_tokens * kind.kv_bytes_per_token,
            kind.n_layers,
            life.prompt_start_s,
            life.prompt_end_s,
        )
        sent = transfer(link, prompt, going.granted_s, self._link_free_s[life.prompt_machine])
        self._link_free_s[life.prompt_machine] = sent.link_free_s
        self._timeline.at(max(sent.arrival_s, self._timeline.now_s), lambda: self._arrive(request_id))

    def tokens_to_send(self, request_id: str) -> int:
        """Positions of a prompt that a hand-over brings to the machine that answers: all (decision 0131)."""
        return self._lives[request_id].arrival.prompt_tokens

    def _arrive(self, request_id: str) -> None:
        life = self._going.pop(request_id).life
        life.kv_arrival_s = self._timeline.now_s
        self._router.prompt_done(request_id)
        self._machines[life.token_machine].arrived(request_id)
        self._machines[life.prompt_machine].acknowledge(request_id)


def _settings(kind: MachineType, longest: int, spec: ClusterSpec) -> EngineSettings:
    if kind.kv_slots < longest:
        raise ClusterError(
            f"machine type {kind.name} has room for the keys and values of {max(0, kind.kv_slots)} tokens, "
            f"but a request of the trace has {longest}"
        )
    limits = SchedulerLimits(
        longest, kind.max_batch_tokens, kind.max_sequences, prefix_reuse=spec.prefix_reuse
    )
    return EngineSettings(limits, kind.kv_slots, kind.tpot_ms, spec.tells_prefixes)


def _token_ids(arrival: Arrival, *, reuse: bool) -> tuple[int, ...]:
    """Stand-ins for token ids. Without prefix reuse they are never compared, so a range is enough."""
    n_tokens = arrival.prompt_tokens
    if not reuse:
        return cast("tuple[int, ...]", range(n_tokens))
    ids: list[int] = []
    for block in arrival.prefix_ids:
        ids.extend(range(block * PREFIX_BLOCK_TOKENS, (block + 1) * PREFIX_BLOCK_TOKENS))
    if len(ids) < n_tokens:
        start = -(arrival.request_id + 1) << 32
        ids.extend(range(start, start + n_tokens - len(ids)))
    return tuple(ids[:n_tokens])

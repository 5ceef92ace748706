"""Simulation of a trace on a cluster of machines with the production scheduler, on simulated time.

The clock moves by step times and transfers alone. The same cluster and trace always give the same instants:
events of one instant run in the order in which they were scheduled, and of equal machines the first is taken.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import cast

from phasewise._words import counted
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.routing import Ask, Limits, Role, Router
from phasewise.cluster.simulated.simulated_requests import PREFIX_BLOCK_TOKENS, Arrival, Life
from phasewise.cluster.simulated.steps import PromptPart, StepTimes
from phasewise.serving.batch import Batch
from phasewise.serving.errors import RequestError
from phasewise.serving.pools.contract import PoolSettings
from phasewise.serving.pools.opening import DEFAULT_POLICY, open_pool
from phasewise.serving.scheduling.held_prefixes import HeldPrefixes, HeldReport, block_keys
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS, Pacing
from phasewise.serving.scheduling.request import (
    DEFAULT_BATCH_TOKENS,
    DEFAULT_SEQUENCES,
    Request,
    SchedulerLimits,
)
from phasewise.serving.scheduling.scheduler import Scheduler

DEFAULT_LIMITS = Limits()


# ---- keys and values from one machine to another (Splitwise IV-C, Fig. 11) ------------------------------


@dataclass(frozen=True, slots=True)
class Link:
    """The outgoing link of a machine. Transfers follow one another; each gets the whole bandwidth."""

    bytes_per_s: float
    latency_s: float = 0.0
    layerwise_above_tokens: int = 0
    """Prompt tokens above which keys and values are sent layer by layer while they are computed; shorter
    prompts are sent when they are done. The paper has 512 (VI-A), `phasewise serve` 0."""

    def to(self, other: Link) -> Link:
        """The link between this machine and another: the slower of their two links decides."""
        return Link(
            min(self.bytes_per_s, other.bytes_per_s),
            max(self.latency_s, other.latency_s),
            self.layerwise_above_tokens,
        )

    def last_byte_s(self, life: Life, n_bytes: int, n_layers: int, free_s: float) -> float:
        """The instant at which the last byte of a computed prompt's keys and values leaves a link that is
        free, and allowed to begin, from `free_s` on.

        Layer by layer: layer i of L is there to be sent when i / L of the prompt's time has passed. The
        layers leave in order, so the last byte leaves when the link has sent all of them, and not
        before the last layer has been computed and sent.
        """
        whole_s = n_bytes / self.bytes_per_s
        if life.arrival.prompt_tokens <= self.layerwise_above_tokens:
            return max(life.prompt_end_s, free_s) + whole_s
        first_layer_s = life.prompt_start_s + (life.prompt_end_s - life.prompt_start_s) / n_layers
        return max(max(first_layer_s, free_s) + whole_s, life.prompt_end_s + whole_s / n_layers)


# ---- a machine -------------------------------------------------------------------------------------------

REFRESH_S = 0.5
"""Simulated seconds between two updates of what a KV pool learns from its requests."""

TOKEN = 0
"""The token id that stands for every token of an answer."""


Action = Callable[[], None]


class Timeline:
    """A clock in seconds that only events move; events of one instant run in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._serial = 0
        self._heap: list[tuple[float, int, Action]] = []

    def at(self, at_s: float, action: Action) -> None:
        """Run `action` at `at_s`, which must not lie in the past."""
        if at_s < self.now_s:
            raise ValueError(f"an event at {at_s} s would lie before now, {self.now_s} s")
        self._serial += 1
        heappush(self._heap, (at_s, self._serial, action))

    def run(self) -> None:
        """Run every event, and the events that they schedule, to the last."""
        heap = self._heap
        while heap:
            self.now_s, _, action = heappop(heap)
            action()


class ProductionMachine:
    """A machine that runs the production scheduler, its KV pool and its pacing. `submit`, `expect`, `arrived`
    and `acknowledge` are called from outside. Each step does what `serving.engine.engine.Engine.step` does,
    with stand-ins for tokens, and moves the clock by the step-time model; the machine decides nothing that
    the engine would decide."""

    def __init__(
        self,
        index: int,
        steps: StepTimes,
        limits: SchedulerLimits,
        kv_slots: int,
        tpot_ms: float,
        timeline: Timeline,
        cluster: ProductionCluster,
        tells_prefixes: bool = False,
    ) -> None:
        """Make an idle machine. tells_prefixes: True if the machine reports its held prefixes."""
        self.index = index
        self.busy_s = 0.0
        self.occupancy_s: dict[int, float] = defaultdict(float)
        """Seconds of steps, by the tokens of the step."""
        self._steps = steps
        self._timeline = timeline
        self._cluster = cluster
        pool_settings = PoolSettings(longest_request=limits.context_length)
        pool = open_pool(DEFAULT_POLICY, kv_slots, pool_settings)
        self.scheduler = Scheduler(pool, limits)
        self._held = HeldPrefixes(self.scheduler, "") if tells_prefixes else None
        self._pacing = Pacing(round(tpot_ms * 1e6), limits.max_batch_tokens)
        self._is_computing = False
        self._granted: set[str] = set()
        self._refreshed_s = 0.0
        self._since_prefill: int | None = None
        """Decode steps since the last prefill step; None before the first prefill step."""

    def submit(self, request: Request) -> None:
        """Queue a request. RequestError if it can never run here."""
        self.scheduler.add(request)
        self._wake()

    def expect(self, request: Request) -> None:
        """Queue a request whose prompt is computed elsewhere. RequestError if it can never run here."""
        self.scheduler.expect(request)
        self._wake()

    def arrived(self, request_id: str) -> None:
        """Note that keys and values of an expected request are here: its first token is sampled."""
        self._granted.discard(request_id)
        out = self.scheduler.arrived(request_id, TOKEN)
        assert out is not None, f"{request_id} was aborted"
        self._cluster.token_made(request_id, out.n_generated, is_last=out.finish_reason is not None)
        self._wake()

    def acknowledge(self, request_id: str) -> None:
        """Note that a request that was handed over has arrived at the other machine."""
        self.scheduler.abort(request_id)
        self._wake()

    def _wake(self) -> None:
        if not self._is_computing:
            self._step()

    def _step(self) -> None:
        scheduler = self.scheduler
        paced = self._pacing.pace(scheduler.n_answering, is_all_shadow=scheduler.is_all_shadow)
        batch = scheduler.next_batch(*paced)
        if batch is None:
            self.scheduler.take_copies()
            self._tell_granted()
            return
        self._is_computing = True
        now_s = self._timeline.now_s
        if batch.phase == "prefill":
            for name in batch.request_ids:
                self._cluster.prompt_step_begins(name)
        self._tell_granted()
        cost_s = self._cost_s(batch)
        self._timeline.at(now_s + cost_s, lambda: self._end(batch, cost_s))

    def _cost_s(self, batch: Batch) -> float:
        if batch.phase == "prefill":
            return self._steps.prompts_s(
                PromptPart(len(piece.token_ids), piece.start) for piece in batch.slices
            )
        context = sum(piece.start + 1 for piece in batch.slices)
        return self._steps.decode_s(len(batch.slices), context, self._since_prefill)

    def _end(self, batch: Batch, cost_s: float) -> None:
        self._is_computing = False
        self.busy_s += cost_s
        self.occupancy_s[batch.n_tokens] += cost_s
        runs = [[TOKEN] for piece in batch.slices if piece.wants_logits]
        outs = self.scheduler.commit_runs(batch, runs)
        self._pacing.observe(batch.phase, batch.n_tokens, round(cost_s * 1e9), batch.n_in_shadow)
        if batch.phase == "prefill":
            self._since_prefill = 0
        elif self._since_prefill is not None:
            self._since_prefill += 1
        self._tell()
        if batch.phase == "prefill":
            for name, piece in zip(batch.request_ids, batch.slices, strict=True):
                if piece.wants_logits:
                    self._cluster.prompt_computed(name)
        for out in outs:
            self._cluster.token_made(out.request_id, out.n_generated, is_last=out.finish_reason is not None)
        if self._timeline.now_s - self._refreshed_s >= REFRESH_S:
            self._refreshed_s = self._timeline.now_s
            self.scheduler.pool.refresh()
        self._wake()

    def _tell(self) -> None:
        report = None if self._held is None else self._held.report()
        self._cluster.told(self.index, self._pacing.best_token_ns / 1e9, report)

    def _tell_granted(self) -> None:
        for request_id in [name for name in self.scheduler.expected if name not in self._granted]:
            self._granted.add(request_id)
            self._cluster.block_granted(request_id)


# ---- the cluster -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MachineType:
    """A kind of machine with a model on it."""

    name: str
    steps: StepTimes
    memory_bytes: int
    """Bytes of memory for weights, keys and values."""
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
        """Tokens whose keys and values fit into memory beside the weights."""
        return (self.memory_bytes - self.weight_bytes) // self.kv_bytes_per_token


@dataclass(frozen=True)
class Pool:
    """Machines of one type with one role."""

    role: Role
    machine: MachineType
    count: int


@dataclass(frozen=True)
class ClusterSpec:
    """The settings of a simulation. policy: one of `POLICIES`."""

    pools: tuple[Pool, ...]
    policy: str = "splitwise"
    limits: Limits = DEFAULT_LIMITS
    prefix_reuse: bool = False

    @property
    def machines(self) -> list[tuple[Role, MachineType]]:
        return [(pool.role, pool.machine) for pool in self.pools for _ in range(pool.count)]

    @property
    def tells_prefixes(self) -> bool:
        """True if machines report to the router which prompt prefixes they hold."""
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
    """The outcome of a trace; `lives` are in the order of the trace."""

    spec: ClusterSpec
    lives: list[Life]
    machines: list[MachineUse]
    end_s: float
    n_preemptions: int
    """Number of preemptions by the schedulers of all machines."""


def simulate(spec: ClusterSpec, arrivals: Sequence[Arrival]) -> Simulation:
    """Run every request of a trace to its end. ClusterError where one can run on no machine."""
    if not arrivals:
        raise ClusterError("the trace holds no request")
    return ProductionCluster(spec, arrivals).run()


@dataclass(slots=True)
class _Going:
    """A request whose prompt and answer are on different machines."""

    life: Life
    granted_s: float = math.nan
    is_computed: bool = False
    """True if all keys and values of the prompt are computed; a preemption makes it False."""
    is_sending: bool = False


class ProductionCluster:
    """Several engines behind a router. It hears of its machines' events at the simulated instant of each."""

    def __init__(self, spec: ClusterSpec, arrivals: Sequence[Arrival]) -> None:
        """Make the idle machines of `spec`."""
        self._spec = spec
        self._timeline = Timeline()
        self._kinds = [kind for _, kind in spec.machines]
        longest = max(arrival.prompt_tokens + arrival.output_tokens for arrival in arrivals)
        self._machines = [
            ProductionMachine(
                index,
                kind.steps,
                _limits(kind, longest, spec),
                kind.kv_slots,
                kind.tpot_ms,
                self._timeline,
                self,
                spec.tells_prefixes,
            )
            for index, kind in enumerate(self._kinds)
        ]
        machines: list[tuple[Role, int]] = [(role, kind.kv_slots) for role, kind in spec.machines]
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
        """A step begins that computes a part of the request's prompt, perhaps again after a preemption."""
        life, going = self._lives[request_id], self._going.get(request_id)
        if going is not None:
            going.is_computed = False
        if not math.isnan(life.prompt_start_s):
            return
        life.prompt_start_s = self._timeline.now_s
        if going is not None:
            self._submit(life.token_machine, self._request(request_id, prefill_only=False), expect=True)

    def prompt_computed(self, request_id: str) -> None:
        """All of the request's prompt is computed."""
        life = self._lives[request_id]
        if math.isnan(life.prompt_end_s):  # a paused answer has its prompt computed again
            life.prompt_end_s = self._timeline.now_s
        if request_id in self._going:
            self._going[request_id].is_computed = True
            self._send(request_id)
        else:
            self._router.prompt_done(request_id)

    def block_granted(self, request_id: str) -> None:
        """An expected request has been granted a block."""
        going = self._going[request_id]
        going.granted_s = self._timeline.now_s
        self._send(request_id)

    def told(self, index: int, token_s: float, report: HeldReport | None) -> None:
        """A machine reports its pace, and changes of its held prefixes, as instances do."""
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
        """Send a request's keys and values once its prompt is computed and its block granted; else wait."""
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
        n_bytes = life.arrival.prompt_tokens * kind.kv_bytes_per_token  # of all positions (decision 0131)
        free_s = max(going.granted_s, self._link_free_s[life.prompt_machine])
        left_s = link.last_byte_s(life, n_bytes, kind.n_layers, free_s)
        self._link_free_s[life.prompt_machine] = left_s
        arrival_s = max(left_s + link.latency_s, self._timeline.now_s)
        self._timeline.at(arrival_s, lambda: self._arrive(request_id))

    def _arrive(self, request_id: str) -> None:
        life = self._going.pop(request_id).life
        life.kv_arrival_s = self._timeline.now_s
        self._router.prompt_done(request_id)
        self._machines[life.token_machine].arrived(request_id)
        self._machines[life.prompt_machine].acknowledge(request_id)


def _limits(kind: MachineType, longest: int, spec: ClusterSpec) -> SchedulerLimits:
    if kind.kv_slots < longest:
        raise ClusterError(
            f"machine type {kind.name} has room for the keys and values of {max(0, kind.kv_slots)} tokens, "
            f"but a request of the trace has {longest}"
        )
    return SchedulerLimits(longest, kind.max_batch_tokens, kind.max_sequences, prefix_reuse=spec.prefix_reuse)


def _token_ids(arrival: Arrival, *, reuse: bool) -> tuple[int, ...]:
    """Stand-ins for a prompt's token ids; a range without prefix reuse, as they are never compared."""
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

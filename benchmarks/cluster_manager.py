"""ODMA's Cluster Manager over replicas, beside a router without one: shared bounds, and free KV weighed.

    python benchmarks/cluster_manager.py AzureLLMInferenceTrace_code.csv
    python benchmarks/cluster_manager.py alpaca_vicuna7b_lengths_train10k.csv --column L_t0.0

Zou et al. let the pools of several devices have one set of learnt bounds, and give a request to a device by
load and free memory together. Here replicas (the production scheduler, pool and pacing on simulated time)
serve Poisson arrivals, at a rate that fills their memory (`full`) and at one below it. A request states a
high max_tokens, as clients do, and ends where the trace says. Each round has other arrivals, every way the
same ones. `jsq` is the fewest pending tokens; `jsq+N` adds N times the tokens that a replica holds or will
hold, as the front counts them (by the estimate of each answer, else a guess); `told+N` N times the slots that
it says are in use. With `shared` its bounds are those that all have learnt.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import numpy as np
from typer import Argument, Option

from benchmarks.harness import Rounds, Row, Spread, Yielded, commands, listed, note
from phasewise.cluster.real.attempts import DEFAULT_ANSWER_TOKENS
from phasewise.cluster.simulated.arrivals import poisson
from phasewise.cluster.simulated.machines import EngineSettings, ProductionMachine
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.cluster.simulated.steps import Curve, StepTimes
from phasewise.cluster.simulated.timeline import Timeline
from phasewise.serving.batch import SequenceSlice
from phasewise.serving.pools.buckets import LearntSizes
from phasewise.serving.pools.contiguous import ContiguousPool
from phasewise.serving.pools.contract import Estimate, PoolSettings
from phasewise.serving.scheduling.request import Request
from phasewise.serving.scheduling.scheduler import Scheduler
from phasewise.serving.scheduling.scheduler_terms import SchedulerLimits
from phasewise.tuner.config.lengths import RequestLengths
from phasewise.workflows.bench.kv.inputs import TraceRequest, estimates_for, read_samples, requests_of
from phasewise.workflows.bench.kv.settings import TraceSelection

STEPS = StepTimes(
    Curve([(16, 0.060), (512, 0.400)]),
    Curve([(512, 0.030), (65536, 0.060)]),
    Curve([(1, 0.0), (64, 0.030)]),
)
"""A replica as the example of docs/guide/planning-capacity.md, with rows that cost something."""
END = 1
MOST_LENGTHS = 10_000
FULL, BELOW = 1.5, 0.8
"""Rates, as multiples of what the replicas could serve if memory were no bound."""


class Replica(ProductionMachine):
    """A machine whose answers end where the trace says, whatever max_tokens allows.

    ends_at: positions of each request at its end.
    """

    def __init__(
        self,
        index: int,
        settings: EngineSettings,
        sizes: LearntSizes,
        timeline: Timeline,
        listener: Cluster,
        ends_at: Mapping[str, int],
    ) -> None:
        super().__init__(index, STEPS, settings, timeline, listener)
        self.scheduler = Scheduler(ContiguousPool(settings.kv_slots, sizes), settings.limits)
        self._ends_at = ends_at

    def tokens_of(self, request_id: str, piece: SequenceSlice) -> list[int]:
        is_last = piece.start + len(piece.token_ids) + 1 >= self._ends_at[request_id]
        return [END] if is_last else super().tokens_of(request_id, piece)

    @property
    def kv_slots_used(self) -> int:
        return self.scheduler.pool.stats().slots_used


@dataclass(frozen=True)
class Way:
    """A way of sharing replicas among requests. weight: of memory beside pending tokens; is_told: memory in
    use, as replicas say it, and not what the router counts."""

    weight: float
    is_told: bool
    is_shared: bool

    @classmethod
    def of(cls, text: str) -> Way:
        placement, _, shared = text.partition("/")
        kind, _, weight = placement.partition("+")
        return cls(float(weight or 0), kind == "told", bool(shared))


class Cluster:
    """Replicas behind a router that gives each request to one of them."""

    def __init__(
        self, way: Way, n_replicas: int, settings: EngineSettings, arrivals: Sequence[Arrival]
    ) -> None:
        self.timeline = Timeline()
        self._way = way
        self._arrivals = {str(arrival.request_id): arrival for arrival in arrivals}
        ends_at = {
            name: arrival.prompt_tokens + arrival.output_tokens for name, arrival in self._arrivals.items()
        }
        pool = PoolSettings(longest_request=settings.limits.context_length)
        one_for_all = LearntSizes(pool)
        self.replicas = [
            Replica(
                index,
                settings,
                one_for_all if way.is_shared else LearntSizes(pool),
                self.timeline,
                self,
                ends_at,
            )
            for index in range(n_replicas)
        ]
        self._pending = [0] * n_replicas
        self._held = [0] * n_replicas
        self._expected: dict[str, int] = {}
        self._place: dict[str, int] = {}
        self._is_computed: set[str] = set()
        self.ended_s: dict[str, float] = {}

    def run(self, max_tokens: int, estimates: Sequence[Estimate | None]) -> None:
        for name, arrival in self._arrivals.items():
            request = Request(
                name,
                tuple(range(arrival.prompt_tokens)),
                max_tokens,
                frozenset({END}),
                estimates[arrival.request_id],
            )
            self.timeline.at(arrival.at_s, partial(self._take, request))
        self.timeline.run()
        assert self.ended_s.keys() == self._arrivals.keys()

    def _take(self, request: Request) -> None:
        name, weight = request.request_id, self._way.weight
        held = [replica.kv_slots_used for replica in self.replicas] if self._way.is_told else self._held
        loads = [pending + weight * tokens for pending, tokens in zip(self._pending, held, strict=True)]
        index = loads.index(min(loads))
        self._place[name] = index
        guess = DEFAULT_ANSWER_TOKENS if request.estimate is None else int(request.estimate.output_tokens)
        self._expected[name] = len(request.prompt_token_ids) + min(guess, request.max_tokens)
        self._held[index] += self._expected[name]
        self._pending[index] += len(request.prompt_token_ids) + 1
        self.replicas[index].submit(request)

    def prompt_step_begins(self, request_id: str) -> None:
        """Nothing to do."""

    def prompt_computed(self, request_id: str) -> None:
        if request_id not in self._is_computed:  # a paused answer has its prompt computed again
            self._is_computed.add(request_id)
            self._pending[self._place[request_id]] -= self._arrivals[request_id].prompt_tokens

    def block_granted(self, request_id: str) -> None:
        """No request is expected from elsewhere."""

    def token_made(self, request_id: str, n_generated: int, *, is_last: bool) -> None:
        if is_last:
            self.ended_s[request_id] = self.timeline.now_s
            self._pending[self._place[request_id]] -= 1
            self._held[self._place[request_id]] -= self._expected.pop(request_id)


@dataclass(frozen=True)
class Outcome:
    """tokens_per_s: of prompts and answers of requests that ended while others still arrived. All but
    `preemptions` of requests that came after the first `warm`."""

    tokens_per_s: float
    mean_e2e_s: float
    p99_e2e_s: float
    preemptions: int


def serve(
    way: Way,
    n_replicas: int,
    settings: EngineSettings,
    arrivals: Sequence[Arrival],
    max_tokens: int,
    estimates: Sequence[Estimate | None],
    warm: int,
) -> Outcome:
    cluster = Cluster(way, n_replicas, settings, arrivals)
    cluster.run(max_tokens, estimates)
    ended_s = {arrival.request_id: cluster.ended_s[str(arrival.request_id)] for arrival in arrivals}
    first_s, last_s = arrivals[warm].at_s, arrivals[-1].at_s
    served = [arrival for arrival in arrivals if first_s < ended_s[arrival.request_id] <= last_s]
    e2e_s = [ended_s[arrival.request_id] - arrival.at_s for arrival in arrivals[warm:]]
    return Outcome(
        sum(arrival.prompt_tokens + arrival.output_tokens for arrival in served) / (last_s - first_s),
        statistics.fmean(e2e_s),
        float(np.percentile(e2e_s, 99)),
        sum(replica.scheduler.counts.preemptions for replica in cluster.replicas),
    )


def unbounded_rate(lengths: Sequence[tuple[int, int]], n_replicas: int, max_sequences: int) -> float:
    """Requests/s if every step were full."""
    prompts = statistics.fmean(prompt for prompt, _ in lengths)
    outputs = statistics.fmean(output for _, output in lengths)
    step_s = STEPS.decode_s(max_sequences, round(max_sequences * (prompts + outputs / 2)))
    return n_replicas / (STEPS.prefill_s(round(prompts)) + outputs * step_s / max_sequences)


def rows_of(load: str, taken: Mapping[str, list[Outcome]]) -> Iterator[Row]:
    """The first way is what the others are compared with, round by round."""
    first = next(iter(taken.values()))
    for name, own in taken.items():
        pairs = list(zip(own, first, strict=True))
        yield {
            "load": load,
            "way": name,
            "tokens/s": Spread.of([outcome.tokens_per_s for outcome in own]),
            "gain, %": Spread.of(
                [100 * (outcome.tokens_per_s / base.tokens_per_s - 1) for outcome, base in pairs]
            ),
            "E2E, s": statistics.fmean(outcome.mean_e2e_s for outcome in own),
            "less, %": Spread.of(
                [100 * (1 - outcome.mean_e2e_s / base.mean_e2e_s) for outcome, base in pairs]
            ),
            "P99, s": statistics.fmean(outcome.p99_e2e_s for outcome in own),
            "preemptions": statistics.fmean(outcome.preemptions for outcome in own),
        }


def cluster_manager(
    trace: Annotated[str, Argument(help="a file of lengths, or a distribution, as `bench kv` reads them")],
    column: Annotated[str | None, Option(help="of a CSV file without prompts")] = None,
    prompt_tokens: Annotated[int, Option(help="of each request of such a file")] = 48,
    replicas: int = 4,
    sequences: Annotated[float, Option(help="mean requests that fit into a replica's memory")] = 12.0,
    longest: Annotated[int, Option(help="tokens of prompt and answer; longer requests are left out")] = 3072,
    requests: Annotated[int, Option(help="in each round")] = 400,
    warm: Annotated[int, Option(help="requests that come before what is counted")] = 0,
    max_tokens: Annotated[int, Option(help="that each request states")] = 1024,
    estimate: Annotated[str, Option(help="none, or as `bench kv` has it")] = "error:0.3",
    ways: str = "jsq,jsq/shared,jsq+0.1,jsq+0.3,jsq+1,told+0.3,jsq+0.3/shared",
    rounds: Rounds = 5,
) -> Yielded:
    samples = requests_of(read_samples(trace, TraceSelection(column, prompt_tokens, MOST_LENGTHS)))
    lengths = [(request.prompt_tokens, request.output_tokens) for request in samples]
    lengths = [pair for pair in lengths if sum(pair) <= longest and pair[1] < max_tokens]
    context = max(prompt for prompt, _ in lengths) + max_tokens
    slots = max(2 * context, round(sequences * statistics.fmean(sum(pair) for pair in lengths)))
    settings = EngineSettings(SchedulerLimits(context, max_sequences=64, prefix_reuse=False), slots)
    rate = unbounded_rate(lengths, replicas, 64)
    yield f"{len(lengths)} lengths, {replicas} replicas of {slots} slots, {rate:.3g} requests/s unbounded"
    for load, share in (("full", FULL), ("below", BELOW)):
        taken: dict[str, list[Outcome]] = defaultdict(list)
        for number in range(rounds):
            arrivals = poisson(lengths, share * rate, requests / (share * rate), number)
            drawn = [
                TraceRequest(RequestLengths(arrival.prompt_tokens, arrival.output_tokens))
                for arrival in arrivals
            ]
            guessed = estimates_for(estimate, tuple(drawn), number)
            for name in listed(ways):
                own = serve(Way.of(name), replicas, settings, arrivals, max_tokens, guessed, warm)
                taken[name].append(own)
            note(f"{load}, round {number + 1} of {rounds}")
        yield from rows_of(load, taken)


app = commands(__doc__, cluster_manager)

if __name__ == "__main__":
    app()

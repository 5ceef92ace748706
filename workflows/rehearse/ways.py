"""The settings of a server that a rehearsal may change, and the worth of each under some requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import fmean
from typing import TYPE_CHECKING, Literal, NamedTuple

from phasewise._words import number
from phasewise.cluster.routing import Limits
from phasewise.cluster.simulated.kv_transfer import Link
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.serving.pools.opening import DEFAULT_POLICY
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS
from phasewise.serving.scheduling.scheduler_terms import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCES
from phasewise.workflows.serve.pools import SPLIT_ABOVE_TOKENS

if TYPE_CHECKING:
    from phasewise.cluster.simulated.machines import OpenDrafter, SimulatedDrafter
    from phasewise.cluster.simulated.simulated_requests import Arrival, Life
    from phasewise.cluster.simulated.steps import StepTimes
    from phasewise.serving.drafts.logged_lookup import Looked
    from phasewise.tuner.config.simulate import Objective

IN_USE, DEFAULT_PLAN = "in use", "default"
KV_POLICIES = ("odma", "paged", "static")
TPOTS_MS = (10.0, 25.0, 50.0, 100.0, 200.0, 400.0, 1000.0)
BATCH_TOKENS = (256, 512, 1024, 2048)
DraftTokens = int | Literal["auto"] | None
"""Tokens of a draft by lookup; None: nothing is drafted."""
DRAFT_TOKENS: tuple[DraftTokens, ...] = (None, "auto", 2, 4, 8, 15)
DRAFT_ROWS = 64
"""Rows of a step with drafts, as many as `serving.drafts.opening` has."""
LEAST_GAIN = 1.005
"""A setting that gains less stays as it is."""


class PoolCores(NamedTuple):
    """Cores that compute prompts, and those that compute answers, as `taskset` writes them."""

    prompt: str
    token: str


@dataclass(frozen=True)
class ServerWay:
    """Settings of `serve`; `plans`: which cores and ranks. None of `pools`: one engine computes both."""

    plans: str = IN_USE
    kv_policy: str = DEFAULT_POLICY
    tpot_ms: float = DEFAULT_TPOT_MS
    batch_tokens: int = DEFAULT_BATCH_TOKENS
    draft_tokens: DraftTokens = None
    pools: PoolCores | None = None

    def options(self, before: ServerWay) -> list[str]:
        """The options of `serve` that turn a server with `before`'s settings into one with these."""
        changed = []
        if self.kv_policy != before.kv_policy:
            changed.append(f"--kv-policy {self.kv_policy}")
        if self.tpot_ms != before.tpot_ms:
            changed.append(f"--tpot {number(self.tpot_ms)}")
        if self.batch_tokens != before.batch_tokens:
            changed.append(f"--max-batch-tokens {self.batch_tokens}")
        if self.draft_tokens != before.draft_tokens:
            changed += self._draft_options(before)
        if self.pools is not None and self.pools != before.pools:
            changed.append(f"--prompt-pool {self.pools.prompt} --token-pool {self.pools.token}")
        if self.plans != before.plans:
            changed.append("--db none.db (the default plans)")
        return changed

    def _draft_options(self, before: ServerWay) -> list[str]:
        if self.draft_tokens is None:
            return ["(without --draft)"]
        words = [] if before.draft_tokens is not None else ["--draft lookup"]
        if before.draft_tokens is not None or self.draft_tokens != "auto":
            words.append(f"--draft-tokens {self.draft_tokens}")
        return words


@dataclass(frozen=True)
class ServerRoom:
    """The memory of a server for keys and values, and what it takes at once."""

    kv_slots: int
    max_sequences: int = DEFAULT_SEQUENCES
    context_tokens: int | None = None
    """Tokens of the longest request that it takes: a static block is as long. None: that of the trace."""


class Halves(NamedTuple):
    """Steps of either pool while both compute, and what a hand-over from one to the other takes."""

    steps: StepTimes
    hand_over_s: float


@dataclass(frozen=True)
class Stage:
    """The simulated server: step times by plans, the room, and what counts. `halves`: its possible pools."""

    steps: Mapping[str, StepTimes]
    room: ServerRoom
    objective: Objective
    halves: Mapping[PoolCores, Halves] = field(default_factory=dict)

    def lives(self, way: ServerWay, arrivals: Sequence[Arrival]) -> list[Life]:
        """Simulate the requests in a server with these settings. ClusterError where one does not fit."""
        kind = MachineType(
            "here",
            self.steps[way.plans],
            memory_bytes=self.room.kv_slots,
            weight_bytes=0,
            kv_bytes_per_token=1,
            n_layers=1,
            link=Link(math.inf),
            max_batch_tokens=way.batch_tokens,
            max_sequences=self.room.max_sequences,
            tpot_ms=way.tpot_ms,
            kv_policy=way.kv_policy,
            drafts=None if way.draft_tokens is None else _opener(way.draft_tokens),
            context_tokens=self.room.context_tokens,
        )
        if way.pools is None:
            return simulate(ClusterSpec((Pool("mixed", kind, 1),)), arrivals).lives
        halves = self.halves[way.pools]
        kv_slots = self.room.kv_slots // 2
        half = replace(
            kind,
            name="half",
            steps=halves.steps,
            memory_bytes=kv_slots,
            context_tokens=None if kind.context_tokens is None else min(kind.context_tokens, kv_slots),
            link=Link(math.inf, latency_s=halves.hand_over_s),
        )
        pools = (Pool("prompt", half, 1), Pool("token", half, 1))
        limits = Limits(split_above_tokens=SPLIT_ABOVE_TOKENS)
        return simulate(ClusterSpec(pools, limits=limits), arrivals).lives

    def merit(self, way: ServerWay, arrivals: Sequence[Arrival]) -> float:
        return merit(self.objective, self.lives(way, arrivals))


def _opener(draft_tokens: DraftTokens) -> OpenDrafter:
    from phasewise.serving.drafts.logged_lookup import LoggedAnswer, drafter_again

    n_tokens = draft_tokens if isinstance(draft_tokens, int) else None

    def opened(arrivals: Mapping[str, Arrival]) -> SimulatedDrafter:
        return drafter_again(
            lambda name: LoggedAnswer(looked_of(arrivals[name].lookup)), DRAFT_ROWS, n_tokens
        )

    return opened


@lru_cache(maxsize=1024)
def looked_of(lookup: str) -> Looked:
    """A log's record of an answer's drafts."""
    from phasewise.serving.drafts.logged_lookup import Looked

    return Looked.of_text(lookup)


def merit(objective: Objective, lives: Sequence[Life]) -> float:
    """More is better: requests a second of waiting for its metric, or the share that keeps the SLO."""
    if objective.kind == "goodput":
        slo = objective.slo
        assert slo is not None
        kept = sum(
            life.ttft_s * 1e3 <= slo.bound_ms("prefill") and life.tbt_s * 1e3 <= slo.bound_ms("decode")
            for life in lives
        )
        return max(kept, 0.5) / len(lives)
    if objective.kind == "tpot":
        several = [life.tbt_s for life in lives if life.arrival.output_tokens > 1]
        return 1 / fmean(several) if several else 1.0
    return 1 / fmean(life.ttft_s if objective.kind == "ttft" else life.e2e_s for life in lives)


def _neighbours(way: ServerWay, stage: Stage, *, drafts: bool) -> list[list[ServerWay]]:
    """One setting at a time, with each of its values, the most promising first. Pools draft nothing."""
    together = replace(way, pools=None)
    return [
        [replace(together, draft_tokens=tokens) for tokens in DRAFT_TOKENS] if drafts else [],
        [together, *(replace(way, draft_tokens=None, pools=cores) for cores in stage.halves)],
        [replace(way, tpot_ms=ms) for ms in TPOTS_MS],
        [replace(way, kv_policy=policy) for policy in KV_POLICIES],
        [replace(way, batch_tokens=tokens) for tokens in BATCH_TOKENS],
        [replace(together, plans=plans) for plans in stage.steps],
    ]


def best_way(
    stage: Stage, today: ServerWay, arrivals: Sequence[Arrival], is_over: Callable[[], bool]
) -> tuple[ServerWay, dict[ServerWay, float]]:
    """Change one setting after another, twice: the best way, and the merit of all that were tried.

    is_over: asked before each try. Today's way is always tried.
    """
    tried = {today: stage.merit(today, arrivals)}
    best, drafts = today, any(arrival.lookup for arrival in arrivals)
    for _ in range(2):
        before = best
        for setting in range(len(_neighbours(best, stage, drafts=drafts))):
            others = _neighbours(best, stage, drafts=drafts)[setting]
            for way in others:
                if way not in tried and not is_over():
                    tried[way] = stage.merit(way, arrivals)
            best = _better(best, others, tried)
        if best == before:
            break
    return best, tried


def _better(best: ServerWay, others: Sequence[ServerWay], tried: Mapping[ServerWay, float]) -> ServerWay:
    """The best of them, if it gains enough."""
    first = max((way for way in others if way in tried), key=tried.__getitem__, default=best)
    return first if tried[first] > LEAST_GAIN * tried[best] else best

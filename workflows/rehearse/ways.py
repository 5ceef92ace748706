"""The settings of a server that a rehearsal may change, and the worth of each under some requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import TYPE_CHECKING

from phasewise._words import number
from phasewise.cluster.simulated.kv_transfer import Link
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, Pool, simulate
from phasewise.serving.pools.opening import DEFAULT_POLICY
from phasewise.serving.scheduling.pacing import DEFAULT_TPOT_MS
from phasewise.serving.scheduling.scheduler_terms import DEFAULT_BATCH_TOKENS, DEFAULT_SEQUENCES

if TYPE_CHECKING:
    from phasewise.cluster.simulated.simulated_requests import Arrival, Life
    from phasewise.cluster.simulated.steps import StepTimes
    from phasewise.tuner.config.simulate import Objective

IN_USE, DEFAULT_PLAN = "in use", "default"
KV_POLICIES = ("odma", "paged", "static")
TPOTS_MS = (25.0, 50.0, 100.0, 200.0, 400.0)
BATCH_TOKENS = (256, 512, 1024, 2048)
LEAST_GAIN = 1.005
"""A setting that gains less stays as it is."""


@dataclass(frozen=True)
class ServerWay:
    """Settings of `serve`; `plans`: which cores and ranks."""

    plans: str = IN_USE
    kv_policy: str = DEFAULT_POLICY
    tpot_ms: float = DEFAULT_TPOT_MS
    batch_tokens: int = DEFAULT_BATCH_TOKENS

    def options(self, before: ServerWay) -> list[str]:
        """The options of `serve` that make a server with `before`'s settings one with these."""
        changed = []
        if self.kv_policy != before.kv_policy:
            changed.append(f"--kv-policy {self.kv_policy}")
        if self.tpot_ms != before.tpot_ms:
            changed.append(f"--tpot {number(self.tpot_ms)}")
        if self.batch_tokens != before.batch_tokens:
            changed.append(f"--max-batch-tokens {self.batch_tokens}")
        if self.plans != before.plans:
            changed.append("--db none.db (the default plans)")
        return changed


@dataclass(frozen=True)
class ServerRoom:
    """The memory of a server for keys and values, and how many answers it computes at once."""

    kv_slots: int
    max_sequences: int = DEFAULT_SEQUENCES


@dataclass(frozen=True)
class Stage:
    """The simulated server: step times by plans, the room, and what counts."""

    steps: Mapping[str, StepTimes]
    room: ServerRoom
    objective: Objective

    def lives(self, way: ServerWay, arrivals: Sequence[Arrival]) -> list[Life]:
        """ClusterError where a request can run in no such server."""
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
        )
        return simulate(ClusterSpec((Pool("mixed", kind, 1),)), arrivals).lives

    def merit(self, way: ServerWay, arrivals: Sequence[Arrival]) -> float:
        return merit(self.objective, self.lives(way, arrivals))


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
        return 1 / fmean(several) if several else math.inf
    return 1 / fmean(life.ttft_s if objective.kind == "ttft" else life.e2e_s for life in lives)


def _neighbours(way: ServerWay, plans: Sequence[str]) -> Iterator[list[ServerWay]]:
    """One setting at a time, every value of it."""
    yield [replace(way, plans=plan) for plan in plans]
    yield [replace(way, tpot_ms=ms) for ms in TPOTS_MS]
    yield [replace(way, kv_policy=policy) for policy in KV_POLICIES]
    yield [replace(way, batch_tokens=tokens) for tokens in BATCH_TOKENS]


def best_way(
    stage: Stage, today: ServerWay, arrivals: Sequence[Arrival], is_over: Callable[[], bool]
) -> tuple[ServerWay, dict[ServerWay, float]]:
    """The way found by changing one setting after another, twice; and the merit of all that were tried.

    is_over: asked before each try. Today's way is always tried.
    """
    tried = {today: stage.merit(today, arrivals)}
    best = today
    for _ in range(2):
        before = best
        for setting in range(4):
            for way in [*_neighbours(best, list(stage.steps))][setting]:
                if way not in tried and not is_over():
                    tried[way] = stage.merit(way, arrivals)
            best = _better(best, [*_neighbours(best, list(stage.steps))][setting], tried)
        if best == before:
            break
    return best, tried


def _better(best: ServerWay, others: Sequence[ServerWay], tried: Mapping[ServerWay, float]) -> ServerWay:
    """The best of them, if it gains enough."""
    first = max((way for way in others if way in tried), key=tried.__getitem__, default=best)
    return first if tried[first] > LEAST_GAIN * tried[best] else best

"""`phasewise bench kv`: a trace of lengths through the engine's own scheduler and KV pools, without a model.

Every batch that the scheduler gives counts as one step, and every token is made up. Utilisation is told in
three ways:

- live/reserved: tokens that have keys and values, of the slots of the blocks that requests hold; over time;
- live/pool: the same tokens of all slots that there are; over time, while requests wait;
- final/reserved: prompt and answer, of the slots of the block at the end; over all requests that ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from phasewise.cli.kv_speeds import Speeds
from phasewise.cli.kv_trace import (
    Asked,
    Estimates,
    estimates_for,
    how_far_off,
    limit_for,
    limited,
    read_samples,
    requests_of,
    static_shares,
    unseen_by,
)
from phasewise.serving.errors import RequestError
from phasewise.serving.pools.contract import Estimate, KvPool, PoolSettings
from phasewise.serving.pools.opening import POLICIES, open_pool
from phasewise.serving.request import Request
from phasewise.serving.scheduler import Scheduler, SchedulerLimits
from phasewise.tuner.config.lengths import MAX_TOKENS, Trace
from phasewise.tuner.config.trace import describe
from phasewise.tuner.errors import TraceError

WHOLE = "odma-whole"
"""ODMA as the paper has it: the block for a request's whole bucket at once."""

KV_POLICIES = (*POLICIES, WHOLE)

UNESTIMATED = ("static", "paged")

GOES_ON, STOPS = 0, 1
"""Tokens."""


@dataclass(frozen=True)
class Replay:
    """What is replayed, and on what."""

    trace: Trace
    estimates: Mapping[str, Estimates]
    """By the name of where they come from."""
    max_tokens: int
    n_slots: int
    settings: PoolSettings
    max_sequences: int
    step_s: float | None
    """How long a step takes where requests come by arrival; None: all wait from the beginning."""
    speeds: Speeds | None = None


@dataclass(frozen=True)
class Load:
    """What the command was asked to replay, as text."""

    traces: Sequence[str]
    asked: Asked
    max_tokens: str
    """A number, `final:SHARE` or `live:SHARE`."""
    estimates: Sequence[str]
    """As `kv_trace.estimates_for` has them."""
    step_ms: float | None
    speeds: Speeds | None = None


def replay_of(load: Load, n_slots: int, max_sequences: int, settings: dict[str, Any]) -> tuple[Replay, str]:
    """The replay, and a line for people about it. `settings`: fields of PoolSettings."""
    samples = tuple(one for text in load.traces for one in read_samples(text, load.asked))
    for text in load.estimates:
        samples = unseen_by(text, samples)
    whole = requests_of(samples)
    if load.step_ms is not None and any(one.arrival_s is None for one in whole):
        raise TraceError(f"{', '.join(load.traces)}: no arrivals, so leave --step-ms out")
    limit = int(load.max_tokens) if load.max_tokens.isdecimal() else limit_for(whole, load.max_tokens)
    if not 1 <= limit <= MAX_TOKENS:
        raise TraceError(f"max_tokens must be from 1 to {MAX_TOKENS}, not {limit}")
    samples = limited(samples, limit)
    trace = requests_of(samples)
    estimates = {text: estimates_for(text, samples, load.asked.seed) for text in load.estimates}
    longest = max(one.prompt_tokens for one in trace) + limit
    off = [f"{text}: {how_far_off(trace, found)}" for text, found in estimates.items() if text != "none"]
    story = "; ".join([story_of(trace, limit, load.asked.seed), *off])
    pool = PoolSettings(longest_request=longest, answer_tokens=limit, **settings)
    step_s = None if load.step_ms is None else load.step_ms / 1000
    return Replay(trace, estimates, limit, n_slots, pool, max_sequences, step_s, load.speeds), story


def story_of(trace: Trace, max_tokens: int, seed: int) -> str:
    """What is replayed, for people."""
    shares = static_shares(trace, max_tokens)
    return (
        f"{describe(trace)}; max_tokens {max_tokens}, with which static pre-allocation fills "
        f"{shares['final']:.1%} of its blocks in the end and {shares['live']:.1%} over time; seed {seed}"
    )


@dataclass(frozen=True)
class KvRow:
    """One policy on one trace."""

    policy: str
    estimate: str
    """Where estimates came from; "-" for a policy that needs none."""
    n_requests: int
    n_slots: int
    max_tokens: int
    live_reserved: float
    live_pool: float
    final_reserved: float
    wasted_slots: int
    """Of blocks that ended: filled by nobody."""
    mean_running: float
    """Requests at once, while others wait."""
    peak_running: int
    failed: int
    migrations: int
    moved_slots: int
    """Copied so that blocks could grow, or lie elsewhere."""
    overflows: int
    preemptions: int
    recomputed_tokens: int
    to_large: int
    estimated: int
    mispredicted: int
    refreshes: int
    decode_steps: int
    prefill_steps: int
    output_tokens: int
    tokens_a_step: float
    """Of answers, over decode steps."""
    tokens_per_s: float | None
    """Of answers while requests wait, by the speeds that were given."""


@dataclass(slots=True)
class _Sums:
    live: int = 0
    reserved: int = 0
    live_waiting: int = 0
    running_waiting: int = 0
    steps_waiting: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    moved_slots: int = 0
    waiting_tokens: int = 0
    waiting_s: float = 0.0
    peak_running: int = 0
    ended: set[str] = field(default_factory=set)


def replayed(replay: Replay, policies: Sequence[str]) -> Iterator[KvRow]:
    """A row for each policy, of KV_POLICIES, and each kind of estimates that it uses."""
    for policy in policies:
        settings = replay.settings if policy != WHOLE else replace(replay.settings, climbs=False)
        for estimate in replay.estimates if policy not in UNESTIMATED else [None]:
            pool = open_pool("odma" if policy == WHOLE else policy, replay.n_slots, settings)
            yield _row(policy, estimate, replay, pool)


def _row(policy: str, estimate: str | None, replay: Replay, pool: KvPool) -> KvRow:
    longest = replay.settings.longest_request
    limits = SchedulerLimits(longest, max_sequences=replay.max_sequences, prefix_reuse=False)
    scheduler = Scheduler(pool, limits)
    sums = _Sums()
    estimates = (None,) * len(replay.trace) if estimate is None else replay.estimates[estimate]
    _run(replay, estimates, scheduler, sums)
    pool.check()
    stats = pool.stats()
    ended = sum(bucket.slots_ended for bucket in stats.buckets)
    wasted = sum(bucket.slots_wasted for bucket in stats.buckets)
    output = sum(one.output_tokens for at, one in enumerate(replay.trace) if str(at) in sums.ended)
    prompts = sum(one.prompt_tokens for at, one in enumerate(replay.trace) if str(at) in sums.ended)
    waiting = max(1, sums.steps_waiting)
    return KvRow(
        policy=policy,
        estimate=estimate or "-",
        n_requests=len(replay.trace),
        n_slots=pool.n_slots,
        max_tokens=replay.max_tokens,
        live_reserved=sums.live / max(1, sums.reserved),
        live_pool=sums.live_waiting / waiting / pool.n_slots,
        final_reserved=1 - wasted / max(1, ended),
        wasted_slots=wasted,
        mean_running=sums.running_waiting / waiting,
        peak_running=sums.peak_running,
        failed=len(replay.trace) - len(sums.ended),
        migrations=stats.migrations,
        moved_slots=sums.moved_slots,
        overflows=stats.overflows,
        preemptions=scheduler.counts.preemptions,
        recomputed_tokens=sums.prefill_tokens - prompts,
        to_large=stats.to_large,
        estimated=stats.estimated,
        mispredicted=stats.mispredicted,
        refreshes=stats.refreshes,
        decode_steps=sums.decode_steps,
        prefill_steps=sums.prefill_steps,
        output_tokens=output,
        tokens_a_step=output / max(1, sums.decode_steps),
        tokens_per_s=sums.waiting_tokens / sums.waiting_s if sums.waiting_s else None,
    )


def _run(replay: Replay, estimates: Estimates, scheduler: Scheduler, sums: _Sums) -> None:
    """Steps until nothing is left."""
    coming = list(enumerate(replay.trace))[::-1]
    step = 0
    while coming or scheduler.has_work:
        while coming and (replay.step_s is None or (coming[-1][1].arrival_s or 0) <= step * replay.step_s):
            at, _ = coming.pop()
            _add(scheduler, replay, at, estimates[at])
        _step(replay, scheduler, sums)
        scheduler.pool.refresh()
        step += 1


def _add(scheduler: Scheduler, replay: Replay, at: int, estimate: Estimate | None) -> None:
    """A request that can never run counts as failed."""
    prompt = (GOES_ON,) * replay.trace[at].prompt_tokens
    stops = frozenset({STOPS})
    with suppress(RequestError):
        scheduler.add(Request(str(at), prompt, replay.max_tokens, stops, estimate))


def _step(replay: Replay, scheduler: Scheduler, sums: _Sums) -> None:
    batch = scheduler.next_batch()
    if batch is None:
        return
    if batch.phase == "decode":
        _observe(sum(piece.start + 1 for piece in batch.slices), scheduler, sums)
    else:
        sums.prefill_steps += 1
        sums.prefill_tokens += batch.n_tokens
    sums.moved_slots += sum(copy.n_slots for copy in batch.copies)
    if scheduler.n_waiting and replay.speeds is not None:
        sums.waiting_tokens += batch.n_logits
        sums.waiting_s += replay.speeds.step_s(batch)
    tokens = []
    for request_id, piece in zip(batch.request_ids, batch.slices, strict=True):
        if piece.wants_logits:
            one = replay.trace[int(request_id)]
            answered = piece.start + len(piece.token_ids) - one.prompt_tokens + 1
            tokens.append(STOPS if answered >= one.output_tokens else GOES_ON)
    sums.ended.update(out.request_id for out in scheduler.commit(batch, tokens) if out.finish_reason)


def _observe(live: int, scheduler: Scheduler, sums: _Sums) -> None:
    """During a decode step. `live`: tokens of those that take part; what is half prefilled counts nothing."""
    placements = scheduler.pool.placements().values()
    sums.decode_steps += 1
    sums.live += live
    sums.reserved += sum(placement.n_slots for placement in placements)
    sums.peak_running = max(sums.peak_running, len(placements))
    if scheduler.n_waiting:
        sums.steps_waiting += 1
        sums.live_waiting += live
        sums.running_waiting += len(placements)

"""Replays a trace of lengths through the engine's own scheduler and KV pools, without a model.

Every batch of the scheduler counts as one step, and token ids are made up. Utilisation is reported in three
ways:

- live/reserved: tokens with keys and values, as a share of the slots of the blocks that requests hold, over
  time;
- live/pool: the same tokens as a share of all slots, over the time in which requests wait;
- final/reserved: prompt and answer as a share of the block at the end, over all requests that ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from phasewise._rows import Row, column
from phasewise._words import NOTHING, counted, percent
from phasewise.serving.errors import RequestError
from phasewise.serving.pools.pool import KvPool
from phasewise.serving.scheduling.request import Request, SchedulerLimits
from phasewise.serving.scheduling.scheduler import Scheduler
from phasewise.tuner.config.lengths import MAX_TOKENS, Trace
from phasewise.tuner.config.trace import describe
from phasewise.tuner.errors import TraceError
from phasewise.workflows.bench.kv.compared import KV_POLICIES, UNESTIMATED, ComparedSettings
from phasewise.workflows.bench.kv.inputs import (
    Estimates,
    estimates_for,
    how_far_off,
    limit_for,
    limited,
    read_samples,
    requests_of,
    slots_beside,
    static_shares,
    unseen_by,
)
from phasewise.workflows.bench.kv.settings import ReplayWish
from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report, silent

TENTHS = partial(percent, places=1)
GOES_ON, STOPS = 0, 1
"""Made-up token ids: any token of an answer, and the token that ends an answer."""


@dataclass(frozen=True)
class Replay:
    """A trace and the pool that it is replayed on."""

    trace: Trace
    estimates: Mapping[str, Estimates]
    """Estimates by the name of their source."""
    max_tokens: int
    n_slots: int
    settings: ComparedSettings
    max_sequences: int


def replay_policies(traces: Sequence[str], wish: ReplayWish, report: Report = silent) -> list[KvRow]:
    """Replay each policy with each source of estimates, one row each. Raises TraceError, UsageError."""
    names = [name.strip() for name in wish.policies.split(",")]
    if not set(names) <= set(KV_POLICIES):
        raise UsageError(f"--policies {wish.policies!r} is not a list of {', '.join(KV_POLICIES)}")
    if wish.memory_bytes is not None and wish.model is None:
        raise UsageError("--memory needs --model")
    replay, story = replay_of(traces, wish, report)
    if wish.model is not None and wish.memory_bytes is not None:
        n_slots = slots_beside(wish.model, wish.memory_bytes, wish.kv_format, report)
        replay = replace(replay, n_slots=n_slots)
    report(story)
    rows = list(replayed(replay, names))
    for row in rows:
        if row.failed:
            report(f"{row.policy}, {row.estimate}: {counted(row.failed, 'request')} failed; {row.failed_why}")
    return rows


def replay_of(traces: Sequence[str], wish: ReplayWish, report: Report = silent) -> tuple[Replay, str]:
    """Read the traces into a replay, and describe the replay in a line of text. Raises TraceError."""
    samples = tuple(sample for text in traces for sample in read_samples(text, wish, report))
    sources = [text.strip() for text in wish.estimate.split(",")]
    for text in sources:
        samples = unseen_by(text, samples)
    whole = requests_of(samples)
    limit = int(wish.max_tokens) if wish.max_tokens.isdecimal() else limit_for(whole, wish.max_tokens)
    if not 1 <= limit <= MAX_TOKENS:
        raise TraceError(f"max_tokens must be from 1 to {MAX_TOKENS}, not {limit}")
    samples = limited(samples, limit)
    trace = requests_of(samples)
    estimates = {text: estimates_for(text, samples, wish.seed) for text in sources}
    longest = max(request.prompt_tokens for request in trace) + limit
    off = [
        f"{text}: {how_far_off(trace, predicted)}" for text, predicted in estimates.items() if text != "none"
    ]
    filled = {name: percent(share, 1) for name, share in static_shares(trace, limit).items()}
    story = (
        f"{describe(trace)}; max_tokens {limit}, with which static pre-allocation fills {filled['final']} of"
        f" its blocks in the end and {filled['live']} over time; seed {wish.seed}"
    )
    pool = ComparedSettings(longest_request=longest, answer_tokens=limit)
    replay = Replay(trace, estimates, limit, wish.slots, pool, wish.max_sequences)
    return replay, "; ".join([story, *off])


class KvRow(Row):
    """Results of one policy on one trace."""

    policy: str = column("policy", left=True, narrow=True)
    estimate: str = column("estimate", lambda source: source.rsplit("/", 1)[-1][-12:], left=True, narrow=True)
    """Source of the estimates; "-" for a policy that uses none."""
    n_requests: int
    n_slots: int
    max_tokens: int
    live_reserved: float = column("live/reserved", TENTHS, narrow=True)
    live_pool: float = column("live/pool", TENTHS)
    final_reserved: float = column("final/reserved", TENTHS)
    wasted_slots: int
    """Slots of ended blocks that were never filled."""
    mean_running: float = column("at once", ".1f", narrow=True)
    """Mean number of running requests while others wait."""
    peak_running: int
    failed: int = column("failed", narrow=True)
    """Requests that can never run."""
    failed_why: str
    """The reason of the first failed request; empty where none failed."""
    migrations: int = column("migrations")
    moved_slots: int = column("slots moved")
    """Slots copied because blocks grew or moved."""
    overflows: int = column("overflows")
    preemptions: int = column("preemptions", narrow=True)
    recomputed_tokens: int = column("computed again")
    to_large: int
    estimated: int
    mispredicted: int = column(
        "mispredicted",
        of_row=lambda row: percent(row.mispredicted / row.estimated, 1) if row.estimated else NOTHING,
    )
    refreshes: int
    decode_steps: int = column("decode steps")
    prefill_steps: int
    output_tokens: int
    tokens_a_step: float = column("tokens/step", ".1f")
    """Tokens of answers per decode step."""
    steps_to_first: float = column("steps to first", ".1f")
    """Mean steps from the beginning to the first token of an answer."""


@dataclass(slots=True)
class _Sums:
    step: int = 0
    unbegun: set[str] = field(default_factory=set)
    """Requests whose answers have not begun."""
    steps_to_first: int = 0
    n_begun: int = 0
    live: int = 0
    reserved: int = 0
    live_waiting: int = 0
    running_waiting: int = 0
    steps_waiting: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    prefill_tokens: int = 0
    moved_slots: int = 0
    peak_running: int = 0
    failed_why: str = ""
    ended: set[str] = field(default_factory=set)


def replayed(replay: Replay, policies: Sequence[str]) -> Iterator[KvRow]:
    """One row for each policy (of KV_POLICIES) and each source of estimates that it uses."""
    for policy in policies:
        for estimate in replay.estimates if policy not in UNESTIMATED else [None]:
            pool = KV_POLICIES[policy](replay.n_slots, replay.settings)
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
    done = [request for index, request in enumerate(replay.trace) if str(index) in sums.ended]
    output = sum(request.output_tokens for request in done)
    waiting = max(1, sums.steps_waiting)
    return KvRow.made_of(
        sums,
        stats,
        replay,
        policy=policy,
        estimate=estimate or "-",
        n_requests=len(replay.trace),
        n_slots=pool.n_slots,
        live_reserved=sums.live / max(1, sums.reserved),
        live_pool=sums.live_waiting / waiting / pool.n_slots,
        final_reserved=1 - wasted / max(1, ended),
        wasted_slots=wasted,
        mean_running=sums.running_waiting / waiting,
        failed=len(replay.trace) - len(sums.ended),
        preemptions=scheduler.counts.preemptions,
        recomputed_tokens=sums.prefill_tokens - sum(request.prompt_tokens for request in done),
        output_tokens=output,
        tokens_a_step=output / max(1, sums.decode_steps),
        steps_to_first=sums.steps_to_first / max(1, sums.n_begun),
    )


def _run(replay: Replay, estimates: Estimates, scheduler: Scheduler, sums: _Sums) -> None:
    """Run steps until every request has ended; all requests wait from the first step on."""
    stops = frozenset({STOPS})
    for number, (request, estimate) in enumerate(zip(replay.trace, estimates, strict=True)):
        prompt = (GOES_ON,) * request.prompt_tokens
        try:
            scheduler.add(Request(str(number), prompt, replay.max_tokens, stops, estimate))
        except RequestError as error:  # it can never run
            sums.failed_why = sums.failed_why or str(error)
        sums.unbegun.add(str(number))
    while scheduler.has_work:
        _step(replay, scheduler, sums)
        scheduler.pool.refresh()
        sums.step += 1


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
    tokens = []
    for request_id, piece in zip(batch.request_ids, batch.slices, strict=True):
        if piece.wants_logits:
            request = replay.trace[int(request_id)]
            answered = piece.start + len(piece.token_ids) - request.prompt_tokens + 1
            tokens.append(STOPS if answered >= request.output_tokens else GOES_ON)
    for out in scheduler.commit(batch, tokens):
        if out.finish_reason:
            sums.ended.add(out.request_id)
        if out.request_id in sums.unbegun:
            sums.unbegun.remove(out.request_id)
            sums.steps_to_first += sums.step
            sums.n_begun += 1


def _observe(live: int, scheduler: Scheduler, sums: _Sums) -> None:
    """Count one decode step.

    live: cached tokens of the decoding sequences, without half-prefilled ones.
    """
    placements = scheduler.pool.placements().values()
    sums.decode_steps += 1
    sums.live += live
    sums.reserved += sum(placement.n_slots for placement in placements)
    sums.peak_running = max(sums.peak_running, len(placements))
    if scheduler.n_waiting:
        sums.steps_waiting += 1
        sums.live_waiting += live
        sums.running_waiting += len(placements)

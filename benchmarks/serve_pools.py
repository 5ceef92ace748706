"""Answer tokens per second of the real engine under each KV policy, all else equal, in turns:

    python benchmarks/serve_pools.py LENGTHS.csv --column L_t0.0 --max-tokens final:0.55 --slots 4096
    python benchmarks/serve_pools.py LENGTHS.jsonl --max-tokens final:0.55 --estimate error:0.3

All requests wait from the beginning (a saturating load), prompts are random tokens, and an answer ends
where it ended in the file: the model computes every step, but the end token is chosen for it. The pool has
as many slots whatever the policy. Static pre-allocation gives each request the longest prompt and `--max-
tokens`, which by `final:0.55` is so large that it fills 55 % of its blocks. Counted is the time in which
requests wait and the pool has seen `--warm` of them end, so that buckets are learnt and the last requests'
slow end is left out.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from typer import Argument, Option

from benchmarks.harness import MODEL, Rounds, Row, Spread, Yielded, commands, listed, note, ratios
from phasewise.serving.batch import Batch
from phasewise.serving.engine.engine import Engine
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import open_engine
from phasewise.serving.ranks.ranks_contract import KvSettings
from phasewise.serving.sampling.sampling import SamplingParams
from phasewise.serving.scheduling.request import SchedulerLimits
from phasewise.tuner.errors import TraceError
from phasewise.workflows.bench.kv.compared import KV_POLICIES
from phasewise.workflows.bench.kv.replay import Replay, ReplayInputs, replay_of
from phasewise.workflows.bench.kv.settings import TraceSelection
from phasewise.workflows.opening.open_model import OpenModel, Weights, open_model

POLICIES = ("odma", "static", "fixed", "paged")
PLAIN_IDS = (1000, 30000)
"""Tokens of prompts: neither special ones nor beyond the vocabulary."""


@dataclass(frozen=True)
class PoolRun:
    """One policy, once. Tokens are of answers; `running` is a mean over the counted decode steps."""

    round: int
    policy: str
    tokens_per_s: float
    whole_tokens_per_s: float
    """Over the whole run, its beginning and end too."""
    running: float
    preemptions: int
    migrations: int
    failed: int
    prompt_tokens: int
    """Tokens of all prompts, each counted once."""
    prefill_tokens: int
    """Computed in prefill steps: prompts, and again what preemptions undid."""
    prefill_s: float
    decode_s: float
    copy_s: float
    """Part of both times: moving keys and values. All times are of the whole run."""
    decode_step_ms: float
    """Median, of counted steps."""


class EndingRanks:
    """Ranks whose logits end each answer at its length, and not before; otherwise they are `ranks`."""

    def __init__(self, ranks: Any, replay: Replay, end_token_ids: frozenset[int]) -> None:
        self._ranks = ranks
        self._replay = replay
        self._end_token_ids = sorted(end_token_ids)
        self.copy_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ranks, name)

    def copy_kv(self, source_slot: int, target_slot: int, n_slots: int) -> None:
        started_s = time.perf_counter()
        self._ranks.copy_kv(source_slot, target_slot, n_slots)
        self.copy_s += time.perf_counter() - started_s

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        logits: npt.NDArray[np.float32] = self._ranks.forward(batch)
        row = 0
        for name, piece in zip(batch.request_ids, batch.slices, strict=True):
            if piece.wants_logits:
                request = self._replay.trace[int(name)]
                n_answered = piece.start + len(piece.token_ids) - request.prompt_tokens + 1
                is_end = n_answered >= request.output_tokens
                logits[row, self._end_token_ids] = np.float32(1e9 if is_end else -1e9)
                row += 1
        return logits


class Watch:
    """A watch over the engine while it runs; the counted time is that of the steps with `counts`."""

    def __init__(self, n_warm: int) -> None:
        self.n_warm = n_warm
        self.n_ended = 0
        self.n_failed = 0
        self.n_tokens = 0
        self.counted_tokens = 0
        self.counted_s = 0.0
        self.running: list[int] = []
        self.decode_steps_ms: list[float] = []
        self.phase_s = {"prefill": 0.0, "decode": 0.0}
        self.prefill_tokens = 0

    def step(self, engine: Engine) -> None:
        """One step, timed; counted where requests wait before and after it."""
        counts = self.n_ended >= self.n_warm and engine.scheduler.n_waiting > 0
        started_s = time.perf_counter()
        delivery = engine.step()
        step_s = time.perf_counter() - started_s
        answers = [out for out in delivery.outs if isinstance(out, Answer)]
        self.n_failed += len(delivery.outs) - len(answers)
        self.n_ended += sum(answer.finish_reason is not None for answer in answers)
        self.n_tokens += len(answers)
        if delivery.stats is not None:
            self.phase_s[delivery.stats.phase] += step_s
            self.prefill_tokens += delivery.stats.n_tokens * (delivery.stats.phase == "prefill")
        if counts:
            self.counted_tokens += len(answers)
            self.counted_s += step_s
            if delivery.stats is not None and delivery.stats.phase == "decode":
                self.running.append(delivery.stats.n_sequences)
                self.decode_steps_ms.append(1e3 * step_s)


def prompts_of(replay: Replay, seed: int, vocab_size: int) -> list[tuple[int, ...]]:
    """Random, so that no beginning is shared."""
    rng = random.Random(seed)
    first, end = PLAIN_IDS
    ids = range(first, end) if vocab_size >= end else range(vocab_size // 2, vocab_size)
    return [tuple(rng.choices(ids, k=arrival.prompt_tokens)) for arrival in replay.trace]


def run_policy(loaded: OpenModel, replay: Replay, policy: str, number: int, n_warm: int) -> PoolRun:
    """All requests of `replay` through an engine of its own."""
    limits = SchedulerLimits(
        replay.settings.longest_request, max_sequences=replay.max_sequences, prefix_reuse=False
    )
    size = EngineSize(limits, KvSettings(replay.n_slots))
    pool = KV_POLICIES[policy](replay.n_slots, replay.settings)
    with open_engine(loaded.model, loaded.plans, size, schedules=loaded.schedules, pool=pool) as opened:
        engine = opened.engine
        (estimates,) = replay.estimates.values()
        engine.ranks = EndingRanks(engine.ranks, replay, engine.vocabulary.end_token_ids)
        for index, prompt in enumerate(prompts_of(replay, number, loaded.model.config.vocab_size)):
            estimate = estimates[index]
            engine.submit(
                Submit(
                    str(index), prompt, replay.max_tokens, SamplingParams(temperature=0.0), estimate=estimate
                )
            )
        watch, started_s = Watch(n_warm), time.perf_counter()
        while engine.has_work:
            watch.step(engine)
        whole_s = time.perf_counter() - started_s
        pool.check()
        return _run_of(policy, number, watch, whole_s, engine, replay)


def _run_of(
    policy: str, number: int, watch: Watch, whole_s: float, engine: Engine, replay: Replay
) -> PoolRun:
    load = engine.load()
    assert isinstance(engine.ranks, EndingRanks)
    return PoolRun(
        number,
        policy,
        watch.counted_tokens / watch.counted_s if watch.counted_s else 0.0,
        watch.n_tokens / whole_s,
        statistics.fmean(watch.running) if watch.running else 0.0,
        load.preemptions,
        load.pool.migrations if load.pool else 0,
        watch.n_failed,
        sum(arrival.prompt_tokens for arrival in replay.trace),
        watch.prefill_tokens,
        watch.phase_s["prefill"],
        watch.phase_s["decode"],
        engine.ranks.copy_s,
        statistics.median(watch.decode_steps_ms) if watch.decode_steps_ms else 0.0,
    )


def rows_of(runs: Sequence[PoolRun]) -> Iterator[Row]:
    """A row a policy; the ratio is the first policy's tokens/s over its own, round by round."""
    by_policy: dict[str, list[PoolRun]] = defaultdict(list)
    for run in sorted(runs, key=lambda pool_run: pool_run.round):
        by_policy[run.policy].append(run)
    first = runs[0].policy
    speeds = {name: [run.tokens_per_s for run in own] for name, own in by_policy.items()}
    for name, own in by_policy.items():
        yield {
            "policy": name,
            "tokens/s": Spread.of(speeds[name]),
            "whole run": Spread.of([run.whole_tokens_per_s for run in own]),
            f"{first} over it": ratios(speeds[first], speeds[name]) if all(speeds[name]) else None,
            "at once": statistics.median(run.running for run in own),
            "preemptions": own[0].preemptions,
            "migrations": own[0].migrations,
            "failed": sum(run.failed for run in own),
        }


def serve_pools(
    trace: Annotated[str, Argument(help="a file of lengths, or a distribution, as `bench kv` reads them")],
    model: Annotated[str, Option()] = MODEL,
    weights: Annotated[str, Option("--format", help="of the weights")] = "native",
    column: Annotated[str | None, Option(help="of a CSV file without prompts")] = None,
    prompt_tokens: Annotated[int, Option(help="of each request of such a file")] = 48,
    max_tokens: Annotated[str, Option(help="a number, final:SHARE or live:SHARE")] = "final:0.55",
    estimate: Annotated[str, Option(help="as `bench kv` has it")] = "error:0.3",
    prompts_of: Annotated[str | None, Option(metavar="MODEL", help="whose tokens texts become")] = None,
    seed: Annotated[int, Option(help="of the requests chosen and of errors")] = 0,
    slots: int = 4096,
    requests: int = 240,
    warm: Annotated[int, Option(help="requests that end before time counts")] = 80,
    max_sequences: int = 64,
    reserve: Annotated[float | None, Option(help="odma: share of slots that no request is promised")] = None,
    policies: Annotated[str, Option(help="the first is compared with the others")] = ",".join(POLICIES),
    rounds: Rounds = 3,
    threads: Annotated[int | None, Option()] = None,
) -> Yielded:
    asked = TraceSelection(column, prompt_tokens, requests, seed=seed, model=prompts_of)
    settings = {} if reserve is None else {"reserve_share": reserve}
    try:
        wanted = ReplayInputs([trace], asked, max_tokens, [estimate], None)
        replay, story = replay_of(wanted, slots, max_sequences, settings)
    except TraceError as error:
        raise SystemExit(str(error)) from None
    note(story)
    opened = open_model(model, Weights(weights), threads)
    names, runs = listed(policies), []
    for number in range(rounds):
        for policy in names if number % 2 == 0 else names[::-1]:
            runs.append(run_policy(opened, replay, policy, number, warm))
            note(json.dumps(asdict(runs[-1])))
    yield from rows_of(runs)


app = commands(__doc__, serve_pools)

if __name__ == "__main__":
    app()

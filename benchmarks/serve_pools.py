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

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tabulate import tabulate

from phasewise.serving.batch import Batch
from phasewise.serving.engine import Engine
from phasewise.serving.engine_size import EngineSize
from phasewise.serving.messages import Answer, Submit
from phasewise.serving.open_engine import open_engine
from phasewise.serving.pools.opening import open_pool
from phasewise.serving.rank_teams import keeping_affinity
from phasewise.serving.ranks_contract import KvMemory
from phasewise.serving.sampling import SamplingParams
from phasewise.serving.scheduler_terms import SchedulerLimits
from phasewise.tuner.errors import TraceError
from phasewise.workflows.bench.kv.replay import Replay, ReplayInputs, replay_of
from phasewise.workflows.bench.kv.settings import TraceSelection
from phasewise.workflows.open_model import OpenModel, Weights, open_model

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
    """What happens while the engine runs; the counted time is that of the steps with `counts`."""

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


def prompts_of(replay: Replay, seed: int) -> list[tuple[int, ...]]:
    """Random, so that no beginning is shared."""
    rng = random.Random(seed)
    return [tuple(rng.choices(range(*PLAIN_IDS), k=one.prompt_tokens)) for one in replay.trace]


def run_policy(found: OpenModel, replay: Replay, policy: str, number: int, n_warm: int) -> PoolRun:
    """All requests of `replay` through an engine of its own."""
    limits = SchedulerLimits(
        replay.settings.longest_request, max_sequences=replay.max_sequences, prefix_reuse=False
    )
    size = EngineSize(limits, KvMemory(replay.n_slots), policy)
    pool = open_pool(policy, replay.n_slots, replay.settings)
    with (
        keeping_affinity(),
        open_engine(found.model, found.plans, size, schedules=found.schedules, pool=pool) as opened,
    ):
        engine = opened.engine
        (estimates,) = replay.estimates.values()
        engine.ranks = EndingRanks(engine.ranks, replay, engine.vocabulary.end_token_ids)
        for index, prompt in enumerate(prompts_of(replay, number)):
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
        sum(one.prompt_tokens for one in replay.trace),
        watch.prefill_tokens,
        watch.phase_s["prefill"],
        watch.phase_s["decode"],
        engine.ranks.copy_s,
        statistics.median(watch.decode_steps_ms) if watch.decode_steps_ms else 0.0,
    )


def table(runs: Sequence[PoolRun], policies: Sequence[str]) -> str:
    """A row a policy; the ratio is the first policy's tokens/s over its own, round by round."""
    by_policy = {name: [run for run in runs if run.policy == name] for name in policies}
    first = by_policy[policies[0]]
    rows = []
    for name, own in by_policy.items():
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(first, own, strict=True) if b.tokens_per_s]
        rows.append(
            [
                name,
                _middle(own, lambda run: run.tokens_per_s),
                _middle(own, lambda run: run.whole_tokens_per_s),
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else "",
                f"{statistics.median(run.running for run in own):.1f}",
                str(own[0].preemptions),
                str(own[0].migrations),
                str(sum(run.failed for run in own)),
            ]
        )
    headers = ["policy", "tokens/s (range)", "whole run", f"{policies[0]} over it", "at once"]
    headers += ["preemptions", "migrations", "failed"]
    return tabulate(rows, headers, "github", disable_numparse=True) + "\n"


def _middle(runs: Sequence[PoolRun], figure: Callable[[PoolRun], float]) -> str:
    values = [figure(run) for run in runs]
    return f"{statistics.median(values):.0f} ({min(values):.0f}-{max(values):.0f})"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", help="a file of lengths, or a distribution, as `bench kv` reads them")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--format", default="native", help="of the weights")
    parser.add_argument("--column", help="of a CSV file without prompts")
    parser.add_argument("--prompt-tokens", type=int, default=48, help="of each request of such a file")
    parser.add_argument("--max-tokens", default="final:0.55", help="a number, final:SHARE or live:SHARE")
    parser.add_argument("--estimate", default="error:0.3", help="as `bench kv` has it")
    parser.add_argument("--prompts-of", metavar="MODEL", help="whose tokens a log's texts become")
    parser.add_argument("--seed", type=int, default=0, help="of the requests chosen and of errors")
    parser.add_argument("--slots", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=240)
    parser.add_argument("--warm", type=int, default=80, help="requests that end before time counts")
    parser.add_argument("--max-sequences", type=int, default=64)
    parser.add_argument("--reserve", type=float, help="odma: share of the slots that no request is promised")
    parser.add_argument(
        "--policies", default=",".join(POLICIES), help="the first is compared with the others"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    asked = TraceSelection(
        arguments.column,
        arguments.prompt_tokens,
        arguments.requests,
        seed=arguments.seed,
        model=arguments.prompts_of,
    )
    wanted = ReplayInputs([arguments.trace], asked, arguments.max_tokens, [arguments.estimate], None)
    try:
        settings = {} if arguments.reserve is None else {"reserve_share": arguments.reserve}
        replay, story = replay_of(wanted, arguments.slots, arguments.max_sequences, settings)
    except TraceError as error:
        raise SystemExit(str(error)) from None
    print(story, file=sys.stderr)
    found = open_model(arguments.model, Weights(arguments.format), arguments.threads)
    policies = arguments.policies.split(",")
    runs = []
    for number in range(arguments.rounds):
        for policy in policies if number % 2 == 0 else policies[::-1]:
            runs.append(run_policy(found, replay, policy, number, arguments.warm))
            print(json.dumps(asdict(runs[-1])), file=sys.stderr, flush=True)
    rows: list[Mapping[str, Any]] = [asdict(run) for run in runs]
    print(json.dumps({"load": story, "runs": rows}) if arguments.json else table(runs, policies))


if __name__ == "__main__":
    main()

"""Share of the time that prompts should have where the promised time per token cannot be kept, by simulation.

The production scheduler runs on simulated time with the step times of a model that has a cliff: a 1.07 B file
in Q4_K_M on two cores, as `phasewise bench run -b` gave them, four rows in 17 ms and eight in 73.

    python benchmarks/pacing_shares.py                                        # clients that wait for answers
    python benchmarks/pacing_shares.py --trace TRACE.csv --trace TRACE.jsonl  # requests at a rate

Closed loop: for 1 to 64 clients of 128 + 48 tokens, tokens/s of answers, and the longest wait for a first
token by the work that lay before it. Traces: at a load of what the machine can do, the median and the 90th
percentile of TTFT and TPOT, and goodput: the part of requests whose first token came within five times what
it takes alone, at twice the promised time per token or less.
"""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import Row, Yielded, commands
from phasewise.cluster.simulated.machines import ProductionMachine
from phasewise.cluster.simulated.steps import Curve, StepTimes
from phasewise.serving.scheduling.pacing import Pacing
from phasewise.tuner.config.trace import load_trace
from tests.support.closed_loop import ClosedLoop

SHARES = (0.33, 0.5, 0.67, 0.75, 0.85)
CLIENTS = (1, 2, 4, 8, 16, 32, 64)
LOADS = (0.7, 0.9, 1.1)
MOST_PROMPT, MOST_ANSWER = 3000, 1000
PROMISE_MS = 100.0

DECODE_S = [
    (1, 0.0185),
    (2, 0.0149),
    (4, 0.0173),
    (6, 0.070),
    (8, 0.0734),
    (12, 0.077),
    (16, 0.0812),
    (32, 0.1397),
]
PREFILL_S = [(1, 0.0185), (4, 0.0173), (8, 0.0734), (16, 0.095), (64, 0.24), (128, 0.45), (512, 1.766)]
STEPS = StepTimes(Curve(PREFILL_S), Curve([(0, 0.0), (1, 0.0)]), Curve(DECODE_S))


def with_share(share: float) -> Callable[[ProductionMachine], None]:
    def prepare(machine: ProductionMachine) -> None:
        machine._pacing = Pacing(int(PROMISE_MS * 1e6), 2048, share)

    return prepare


def closed_loops() -> Iterator[Row]:
    for share in SHARES:
        row: dict[str, object] = {"share": share}
        for n in CLIENTS:
            lengths = itertools.repeat((128, 48))
            loop = ClosedLoop(STEPS, n, max(40, 8 * n), lengths, prepare=with_share(share))
            row[f"{n} clients: tokens/s, wait / work"] = f"{loop.tokens_per_s:.0f}, {loop.most_by_work:.2f}"
        yield row


def traces(names: list[str], n_requests: int) -> Iterator[Row]:
    for name, load, share in itertools.product(names, LOADS, SHARES):
        lengths = [
            (min(arrival.prompt_tokens, MOST_PROMPT), min(arrival.output_tokens, MOST_ANSWER))
            for arrival in load_trace(name, n_requests)
        ]
        work_s = sum(alone_s(n_prompt) + n_answer * DECODE_S[-1][1] / 32 for n_prompt, n_answer in lengths)
        draw = random.Random(name)
        at_s = sorted(draw.uniform(0, work_s / load) for _ in lengths)
        loop = ClosedLoop(STEPS, 0, len(lengths), iter(lengths), at_s=at_s, prepare=with_share(share))
        yield {"trace": Path(name).stem, "load": load, "share": share} | figures(loop)


def alone_s(n_prompt: int) -> float:
    return n_prompt * PREFILL_S[-1][1] / PREFILL_S[-1][0]


def figures(loop: ClosedLoop) -> Row:
    ttfts, tpots = sorted(loop.ttfts_s), sorted(loop.tpots_s)
    good = 0
    for sent in loop.sent.values():
        most_s = 5 * max(alone_s(len(sent.request.prompt_token_ids)), 0.1)
        tpot_s = (sent.end_s - sent.first_s) / max(1, sent.request.max_tokens - 1)
        good += sent.first_s - sent.at_s <= most_s and tpot_s <= 2 * PROMISE_MS / 1000
    ms = [1000 * tpot for tpot in tpots]
    return {
        "TTFT P50, P90 (s)": f"{statistics.median(ttfts):.1f}, {ttfts[len(ttfts) * 9 // 10]:.1f}",
        "TPOT P50, P90 (ms)": f"{statistics.median(ms):.0f}, {ms[len(ms) * 9 // 10]:.0f}",
        "goodput": f"{good / len(ttfts):.0%}",
    }


def pacing_shares(trace: Annotated[list[str] | None, Option()] = None, requests: int = 300) -> Yielded:
    yield from traces(trace, requests) if trace else closed_loops()


app = commands(__doc__, pacing_shares)

if __name__ == "__main__":
    app()

"""What share of the time prompts should have where the promised time per token cannot be kept, by simulation.

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

import argparse
import itertools
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

from phasewise.cluster.machines import ProductionMachine
from phasewise.cluster.steps import Curve, StepTimes
from phasewise.serving.pacing import Pacing
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


def closed_loops() -> None:
    print("| share | " + " | ".join(f"{n} clients: tokens/s, wait / work" for n in CLIENTS) + " |")
    print("|---" * (len(CLIENTS) + 1) + "|")
    for share in SHARES:
        cells = []
        for n in CLIENTS:
            loop = ClosedLoop(
                STEPS, n, max(40, 8 * n), itertools.repeat((128, 48)), prepare=with_share(share)
            )
            cells.append(f"{loop.tokens_per_s:.0f}, {loop.most_by_work:.2f}")
        print(f"| {share:g} | " + " | ".join(cells) + " |", flush=True)


def traces(names: list[str], n_requests: int) -> None:
    print("| trace | load | share | TTFT P50, P90 (s) | TPOT P50, P90 (ms) | goodput |")
    print("|---" * 6 + "|")
    for name, load, share in itertools.product(names, LOADS, SHARES):
        lengths = [
            (min(one.prompt_tokens, MOST_PROMPT), min(one.output_tokens, MOST_ANSWER))
            for one in load_trace(name, n_requests)
        ]
        work_s = sum(alone_s(n_prompt) + n_answer * DECODE_S[-1][1] / 32 for n_prompt, n_answer in lengths)
        draw = random.Random(name)
        at_s = sorted(draw.uniform(0, work_s / load) for _ in lengths)
        loop = ClosedLoop(STEPS, 0, len(lengths), endless(lengths), at_s=at_s, prepare=with_share(share))
        print(f"| {Path(name).stem} | {load:g} | {share:g} | {figures(loop)} |", flush=True)


def endless(lengths: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    yield from lengths


def alone_s(n_prompt: int) -> float:
    return n_prompt * PREFILL_S[-1][1] / PREFILL_S[-1][0]


def figures(loop: ClosedLoop) -> str:
    ttfts, tpots = sorted(loop.ttfts_s), sorted(loop.tpots_s)
    good = 0
    for one in loop.sent.values():
        most_s = 5 * max(alone_s(len(one.request.prompt_token_ids)), 0.1)
        tpot_s = (one.end_s - one.first_s) / max(1, one.request.max_tokens - 1)
        good += one.first_s - one.at_s <= most_s and tpot_s <= 2 * PROMISE_MS / 1000
    return (
        f"{statistics.median(ttfts):.1f}, {ttfts[len(ttfts) * 9 // 10]:.1f} | "
        f"{1000 * statistics.median(tpots):.0f}, {1000 * tpots[len(tpots) * 9 // 10]:.0f} | "
        f"{good / len(ttfts):.0%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", action="append", default=[])
    parser.add_argument("--requests", type=int, default=300)
    options = parser.parse_args()
    if options.trace:
        traces(options.trace, options.requests)
    else:
        closed_loops()


if __name__ == "__main__":
    main()

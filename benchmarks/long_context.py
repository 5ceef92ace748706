"""Decoding over a long context with keys and values in each format: tokens/s, in rounds of alternating
order.

    python benchmarks/long_context.py MODEL --context 8192 --kv-formats f16,int8,int4

A prompt of random tokens fills the context once for each format; then each format decodes a few tokens in
its turn, at the same positions again and again. Bytes a token: of the weights, and of the keys and values
that a token reads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import numpy as np


def opened(model: Any, plans: Any, context: int, kv_format: str) -> Any:
    """Ranks whose cache holds `context` random tokens."""
    from phasewise.serving.batch import Batch, SequenceSlice
    from phasewise.serving.ranks import KvMemory, LocalRanks, RankOptions

    ranks = LocalRanks(
        model, plans, RankOptions(KvMemory(context + 64, format=kv_format), 512, max_sequences=1)
    )
    ids = np.random.default_rng(0).integers(10, model.config.vocab_size, context).tolist()
    for start in range(0, context, 512):
        ranks.forward(Batch("prefill", (SequenceSlice(ids[start : start + 512], start, 0, True),)))
    return ranks


def decode_s(ranks: Any, context: int, tokens: int) -> float:
    """Seconds of a decode step, the median of `tokens` after `context`."""
    from phasewise.serving.batch import Batch, SequenceSlice

    taken = []
    for i in range(tokens):
        began = time.perf_counter()
        ranks.forward(Batch("decode", (SequenceSlice([17 + i], context + i, 0, True),)))
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def main() -> None:
    from phasewise.serving.forward import kv_bytes_per_slot
    from phasewise.serving.loaders import load_model
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import PHASES, default_plan

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv-formats", default="f16,int8,int4", help="the first is the yardstick")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8, help="of one turn")
    options = parser.parse_args()
    model = load_model(options.model, "native", report=lambda line: print(line, file=sys.stderr))
    formats = options.kv_formats.split(",")
    machine = read_machine()  # before the ranks bind this thread to a core
    plans = {phase: default_plan(machine, phase, threads=options.threads) for phase in PHASES}
    every = [opened(model, plans, options.context, one) for one in formats]
    taken: list[list[float]] = [[] for _ in formats]
    for number in range(options.rounds):
        for i in range(len(formats)) if number % 2 == 0 else reversed(range(len(formats))):
            taken[i].append(decode_s(every[i], options.context, options.tokens))
    weights = sum(weight.nbytes for weight in model.weights.values())
    print(f"{model.name}, {options.context} tokens before; weights {weights / 1e6:.0f} MB")
    print(f"{'KV':5} {'MB a token':>11} {'ms a token':>11} {'tokens/s':>9} {'over ' + formats[0]:>9}")
    for name, seconds in zip(formats, map(statistics.median, taken), strict=True):
        read = kv_bytes_per_slot(model, name) * options.context / 1e6
        gain = statistics.median(taken[0]) / seconds
        print(f"{name:5} {read:11.0f} {1e3 * seconds:11.2f} {1 / seconds:9.1f} {gain:9.2f}")


if __name__ == "__main__":
    main()

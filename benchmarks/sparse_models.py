"""Decode and prefill of a pruned model, stored dense, stored sparse and as `auto` chooses, in rounds of
alternating order.

    phasewise prune smollm2-135m-instruct --sparsity 0.5 -o DIRECTORY
    PYTHONPATH=PEERS python benchmarks/sparse_models.py DIRECTORY --torch

PEERS is a folder that holds torch and transformers, whose bf16 decode of the same directory takes its turns
with --torch. Figures: median ms of a step after --context tokens and dense over it, the same of a prefill
of --prompt tokens; bytes of all packed weights, the head among them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Turn = Callable[[], float]
"""Does one piece of work and tells its seconds."""


def ours(model: Any, plans: Any, context: int, prompt: int, tokens: int) -> tuple[Turn, Turn]:
    """Decode of a token (median of `tokens`), and prefill of `prompt` tokens."""
    from phasewise.serving.batch import Batch, SequenceSlice
    from phasewise.serving.ranks import KvMemory, LocalRanks, RankOptions

    room = max(context + tokens, prompt)
    ranks = LocalRanks(model, plans, RankOptions(KvMemory(room + 64), max(prompt, context), max_sequences=1))
    ids = np.random.default_rng(0).integers(10, model.config.vocab_size, room).tolist()

    def prefill(count: int) -> float:
        began = time.perf_counter()
        ranks.forward(Batch("prefill", (SequenceSlice(ids[:count], 0, 0, True),)))
        return time.perf_counter() - began

    def decode() -> float:
        prefill(context)
        taken = []
        for i in range(tokens):
            began = time.perf_counter()
            ranks.forward(Batch("decode", (SequenceSlice([ids[context + i]], context + i, 0, True),)))
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    return decode, lambda: prefill(prompt)


def torch_decode(directory: str, threads: int, context: int, tokens: int) -> Turn:
    """The same by transformers in bf16 with a growing cache."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    ids = torch.from_numpy(np.random.default_rng(0).integers(10, model.config.vocab_size, (1, context)))

    @torch.no_grad()
    def decode() -> float:
        cache, taken = DynamicCache(), []
        model(ids, past_key_values=cache)
        for i in range(tokens):
            began = time.perf_counter()
            model(ids[:, i : i + 1], past_key_values=cache)
            taken.append(time.perf_counter() - began)
        return statistics.median(taken)

    return decode


def in_rounds(turns: list[Turn], rounds: int) -> list[float]:
    """Median seconds of each."""
    taken: list[list[float]] = [[] for _ in turns]
    for number in range(rounds):
        for i in range(len(turns)) if number % 2 == 0 else reversed(range(len(turns))):
            time.sleep(0.005)  # threads of the one before stop spinning
            taken[i].append(turns[i]())
    return [statistics.median(seconds) for seconds in taken]


def main() -> None:
    from phasewise.serving.loaders import load_model
    from phasewise.serving.loaders.storage import StorageChoice
    from phasewise.serving.sparse_mode import SparseMode
    from phasewise.topology import read_machine
    from phasewise.tuner.plans import PHASES, default_plan

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--format", default="bf16", choices=("bf16", "int8"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=64, help="tokens before those that are decoded")
    parser.add_argument("--tokens", type=int, default=16, help="decoded in a turn")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--torch", action="store_true", help="decode by torch as well")
    options = parser.parse_args()
    machine = read_machine()  # before the ranks bind this thread to a core
    plans = {phase: default_plan(machine, phase, threads=options.threads) for phase in PHASES}
    modes: tuple[SparseMode, ...] = ("never", "always", "auto")
    models = [
        load_model(
            options.model,
            options.format,
            storage=StorageChoice(mode),
            report=lambda line: print(line, file=sys.stderr),
        )
        for mode in modes
    ]
    pairs = [ours(model, plans, options.context, options.prompt, options.tokens) for model in models]
    decodes = [decode for decode, _ in pairs]
    names = [f"phasewise, --sparse {mode}" for mode in modes]
    if options.torch:
        decodes.append(torch_decode(options.model, options.threads, options.context, options.tokens))
        names.append("torch bf16")
    decode_s = in_rounds(decodes, options.rounds)
    prefill_s = in_rounds([prefill for _, prefill in pairs], options.rounds)
    print(f"{options.model}, {options.format}, {options.threads} threads")
    print(f"{'':26} {'MB':>6} {'ms a token':>11} {'gain':>5} {'prefill ms':>11} {'gain':>5}")
    for i, (name, seconds) in enumerate(zip(names, decode_s, strict=True)):
        decoding = f"{1e3 * seconds:11.2f} {decode_s[0] / seconds:5.2f}"
        if i == len(models):
            print(f"{name:26} {'':6} {decoding}")
            continue
        megabytes = sum(weight.nbytes for weight in models[i].weights.values()) / 1e6
        filling = f"{1e3 * prefill_s[i]:11.1f} {prefill_s[0] / prefill_s[i]:5.2f}"
        print(f"{name:26} {megabytes:6.0f} {decoding} {filling}")


if __name__ == "__main__":
    main()

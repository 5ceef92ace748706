"""What a switch between the phases costs, where prefill and decode have different ranks and cores.

Run as `python benchmarks/switch.py [MODEL] [--prefill 0,1] [--decode 0 --decode 1] [-n 100] [-r 20]`; a
core list is a rank. Every step computes one token at one position, so that only who computes it changes.
Steps in turns (prefill, decode, prefill, ..) are set beside steps of each phase in a row. The difference is
the switch: waking the ranks that rested, and what their caches have lost. MODEL is `tiny` (random weights
that stay in the caches, so that a step takes little more than the switch) or any that `phasewise generate`
takes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence

import numpy as np

from phasewise.cython_kernels.packing import PackedWeight, pack_quant, quantise
from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.model import ModelConfig, PackedModel, RopeSpec
from phasewise.serving.ranks import KvMemory, RankOptions, Ranks, open_ranks
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, Phase, ServicePlan, check_fits, parse_cores, rank_on

POSITION = 64
RESAMPLES = 2000


def tiny_model() -> PackedModel:
    """Two layers and 0.6 MB of random eight-bit weights."""
    config = ModelConfig(
        architecture="llama",
        n_layers=2,
        hidden=256,
        ffn=512,
        n_heads=8,
        n_kv_heads=8,
        head_dim=32,
        vocab_size=512,
        context_length=512,
        norm_eps=1e-5,
        rope=RopeSpec(10000.0, 32),
        tied_embeddings=True,
        qk_norm=False,
        sliding_window=None,
        bos_token_id=None,
        eos_token_ids=(),
        add_bos=False,
    )
    rng = np.random.default_rng(0)

    def matrix(n: int, k: int) -> PackedWeight:
        return pack_quant(quantise(rng.standard_normal((n, k), dtype=np.float32) / k**0.5, 8, True))

    weights = {"embed": matrix(config.vocab_size, config.hidden)}
    vectors = {"final_norm": np.ones(config.hidden, np.float32)}
    for name in (f"layers.{layer}" for layer in range(config.n_layers)):
        weights[f"{name}.qkv"] = matrix(config.q_rows + 2 * config.kv_rows, config.hidden)
        weights[f"{name}.o"] = matrix(config.hidden, config.q_rows)
        weights[f"{name}.gate_up"] = matrix(2 * config.ffn, config.hidden)
        weights[f"{name}.down"] = matrix(config.hidden, config.ffn)
        vectors |= {f"{name}.{norm}": vectors["final_norm"] for norm in ("attn_norm", "ffn_norm")}
    n_bytes = sum(weight.nbytes for weight in weights.values())
    return PackedModel(config, "int8", "tiny", "", "", weights, vectors, "{}", None, n_bytes)


def named_model(name: str) -> PackedModel:
    if name == "tiny":
        return tiny_model()
    from phasewise.serving.loaders import load_model

    return load_model(name, "native")


def plan_of(phase: Phase, core_lists: Sequence[str]) -> ServicePlan:
    machine = read_machine()
    plan = ServicePlan(phase, tuple(rank_on(machine, parse_cores(cores)) for cores in core_lists), "flag")
    check_fits(plan, machine)
    return plan


def step_us(ranks: Ranks, phase: Phase) -> float:
    """One token's."""
    batch = Batch(phase, (SequenceSlice([1], POSITION, 0, True),))
    started_ns = time.perf_counter_ns()
    ranks.forward(batch)
    return (time.perf_counter_ns() - started_ns) / 1e3


def one_round(ranks: Ranks, n_steps: int) -> tuple[dict[Phase, float], dict[Phase, float]]:
    """Median step of each phase, in a row and in turns; both kinds right after one another."""
    alone: dict[Phase, float] = {}
    for phase in PHASES:
        step_us(ranks, phase)
        alone[phase] = statistics.median(step_us(ranks, phase) for _ in range(n_steps))
    turns: dict[Phase, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(n_steps):
        for phase in PHASES:
            turns[phase].append(step_us(ranks, phase))
    return alone, {phase: statistics.median(times) for phase, times in turns.items()}


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median over rounds, and 95 % of its resamples."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return statistics.median(values), medians[RESAMPLES // 40], medians[-RESAMPLES // 40]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a switch between the phases costs")
    parser.add_argument("model", nargs="?", default="tiny")
    parser.add_argument("--prefill", action="append", metavar="CORES")
    parser.add_argument("--decode", action="append", metavar="CORES")
    parser.add_argument("-n", type=int, default=100, help="steps of each kind in a round")
    parser.add_argument("-r", type=int, default=20, help="rounds")
    arguments = parser.parse_args()
    plans: dict[Phase, ServicePlan] = {
        "prefill": plan_of("prefill", arguments.prefill or ["0,1"]),
        "decode": plan_of("decode", arguments.decode or ["0", "1"]),
    }
    ranks = open_ranks(named_model(arguments.model), plans, RankOptions(KvMemory(512), 64, 1))
    try:
        step_us(ranks, "prefill")
        rounds = [one_round(ranks, arguments.n) for _ in range(arguments.r)]
    finally:
        ranks.close()
    print(f"{arguments.model}, {arguments.r} rounds of {arguments.n} steps of one token")
    for phase, before in (("prefill", "decode"), ("decode", "prefill")):
        alone = statistics.median(steady[phase] for steady, _ in rounds)
        cost, low, high = interval([turns[phase] - steady[phase] for steady, turns in rounds])
        print(f"{plans[phase].describe()}: {alone:.1f} us in a row")
        print(f"  switch from {before}: {cost:+.1f} us, 95 % interval {low:+.1f} to {high:+.1f}")


if __name__ == "__main__":
    main()

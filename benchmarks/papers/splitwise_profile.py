"""Splitwise's characterisation (section III): figures of the authors' profile and of the traces at hand."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import Row
from phasewise.cluster.simulated.arrivals import poisson
from phasewise.cluster.simulated.simulate import ClusterSpec, MachineType, MachineUse, Pool, simulate
from phasewise.cluster.simulated.steps import StepTimes

Lengths = Sequence[tuple[int, int]]
RATE = 2.0
"""Requests/s of one machine (Fig. 4)."""
PROMPT_TOKENS = (512, 1024, 1536, 2048, 3072, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
CONTEXT_TOKENS = 1500
"""Tokens before each sequence of a batch: the code trace's median prompt."""
BATCH_CONTEXTS = (512, CONTEXT_TOKENS)
POWER_OF = {"model": "llama2-70b", "hardware": "a100-80gb", "tensor_parallel": "8"}


def share_within(uses: Sequence[MachineUse], most_tokens: int, busy_s: float) -> float:
    """The share of the busy time that steps of at most `most_tokens` tokens took."""
    within_s = sum(sum(s for tokens, s in use.occupancy_s.items() if tokens <= most_tokens) for use in uses)
    return within_s / busy_s if busy_s else 0.0


def characterization(kind: MachineType, lengths: Lengths, duration_s: float, profile: Path) -> Iterator[Row]:
    """Figs. 3 to 8, of one kind of machine; the paper's are of an H100."""
    yield from _lengths(lengths)
    yield from _active_tokens(kind, lengths, duration_s)
    yield from _latencies(kind.steps, lengths)
    yield from _throughput(kind.steps)
    yield from _memory(kind)
    yield from _power(profile)


def _row(figure: str, what: str, paper: str, ours: float | str) -> Row:
    return {"figure": figure, "what": what, "paper": paper, "ours": ours}


def _lengths(lengths: Lengths) -> Iterator[Row]:
    papers = ("1500 (code), 1020 (conversation)", "13 (code), 129 (conversation)")
    for name, paper, tokens in zip(("prompt", "answer"), papers, zip(*lengths, strict=True), strict=True):
        yield _row("3", f"{name}, median of tokens", paper, float(np.median(tokens)))
        yield _row("3", f"{name}, P99 of tokens", "–", float(np.percentile(tokens, 99)))


def _active_tokens(kind: MachineType, lengths: Lengths, duration_s: float) -> Iterator[Row]:
    arrivals = poisson(lengths, RATE, duration_s, 0, "columns")
    uses = simulate(ClusterSpec((Pool("mixed", kind, 1),)), arrivals).machines
    busy_s = sum(use.busy_s for use in uses)
    for most, paper in ((1, "above 20 % (code)"), (20, "60 to 70 % (conversation)")):
        share = share_within(uses, most, busy_s)
        yield _row("4", f"busy time with at most {most} active tokens", paper, f"{share:.0%}")


def _latencies(steps: StepTimes, lengths: Lengths) -> Iterator[Row]:
    us = [1e6 * steps.prefill_s(n) / n for n in PROMPT_TOKENS]
    told = f"{min(us):.0f} to {max(us):.0f}"
    yield _row("5a", "us a prompt token, 512 to 8192 tokens", "nearly linear", told)
    for context in BATCH_CONTEXTS:
        single_s, batch_s = (steps.decode_s(n, n * context) for n in (1, 64))
        yield _row("5b", f"a step of 64 sequences after {context} over one of 1", "2", batch_s / single_s)
    n_steps = steps.prefill_s(CONTEXT_TOKENS) / steps.decode_s(1, CONTEXT_TOKENS)
    yield _row("5c", f"steps that a prompt of {CONTEXT_TOKENS} takes as long as", "6 (BLOOM)", n_steps)
    shares = [_token_share(steps, prompt, answer) for prompt, answer in lengths]
    yield _row("5c", "share of a request's time in tokens, median", "most", f"{np.median(shares):.0%}")


def _token_share(steps: StepTimes, prompt: int, answer: int) -> float:
    tokens_s = (answer - 1) * steps.decode_s(1, prompt + answer // 2)
    return tokens_s / (tokens_s + steps.prefill_s(prompt))


def _throughput(steps: StepTimes) -> Iterator[Row]:
    rates = {n: n / steps.prefill_s(n) for n in PROMPT_TOKENS}
    yield _row("6a", "prompt tokens at the highest rate", "2048", max(rates, key=rates.__getitem__))
    gains = {n: n / steps.decode_s(n, n * CONTEXT_TOKENS) for n in BATCHES}
    told = ", ".join(f"{gains[n] / gains[1]:.1f}" for n in BATCHES)
    yield _row("6b", "tokens/s of 1 to 64 sequences over 1", "grows until 64", told)


def _memory(kind: MachineType) -> Iterator[Row]:
    """Bytes by count, of weights, keys and values: a profile has times and power alone."""
    for n in (1, 64):
        n_bytes = kind.weight_bytes + n * CONTEXT_TOKENS * kind.kv_bytes_per_token
        what = f"weights, keys and values of {n} x {CONTEXT_TOKENS} tokens, GB"
        yield _row("7", what, "grows with tokens", n_bytes / 1e9)
    what = f"sequences of {CONTEXT_TOKENS} tokens that fit in {kind.memory_bytes / 1e9:.0f} GB"
    yield _row("7", what, "runs out at 64 (III-D)", kind.kv_slots // CONTEXT_TOKENS)


def _power(profile: Path) -> Iterator[Row]:
    """The profile has the peak and the mean power of whole requests, of A100s alone: prompts are the peak,
    and tokens most of the mean.
    """
    powers: dict[int, list[tuple[float, float]]] = defaultdict(list)
    with open(profile, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            power = float(row["peak_power"]), float(row["average_power"])
            if tuple(row[name] for name in POWER_OF) == tuple(POWER_OF.values()) and power[0]:
                powers[int(row["batch_size"])].append(power)
    batches = sorted(powers)
    medians = zip(*(np.median(powers[n], axis=0) for n in batches), strict=True)
    papers = ("prompts: grows", "tokens: does not vary")
    for name, paper, of_batches in zip(("peak", "mean"), papers, medians, strict=True):
        told = ", ".join(f"{power:.2f}" for power in of_batches)
        yield _row(
            "8", f"{name} power over the TDP, of {', '.join(map(str, batches))} sequences", paper, told
        )

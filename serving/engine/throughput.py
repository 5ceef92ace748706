"""The speed of a model on this machine, by phase, and its share of the machine's limits.

Measured below scheduler and sampler, as llama-bench does: a `pp` test is one prefill of every sequence, a
`tg` test is decode steps, a `pp+tg` test times both together. All begin behind `n_depth` positions computed
before.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from phasewise.serving.batch import Batch, SequenceSlice
from phasewise.serving.models.packed_model import LAYER_TABLE, ModelConfig, PackedModel
from phasewise.serving.models.parts.mixture import STACKS
from phasewise.serving.ranks.first_rank import Ranks
from phasewise.tuner.plans import Phase

COMPUTE_KIND = {"f32": "f32", "f16": "f32", "bf16": "bf16"}  # all others: int8


@dataclass(frozen=True)
class Workload:
    """One test: every sequence prefills `n_prompt` tokens, then decodes `n_gen` tokens; either may be 0."""

    n_prompt: int
    n_gen: int
    n_sequences: int
    n_depth: int = 0
    """Positions of each sequence computed before the test, not timed."""
    n_adapters: int = 0
    """Number of the model's adapters, which the sequences use in turn."""

    @property
    def name(self) -> str:
        """llama-bench's name of the test, with the number of sequences if there are several."""
        parts = [f"pp{self.n_prompt}"] if self.n_prompt else []
        parts += [f"tg{self.n_gen}"] if self.n_gen else []
        behind = f" @ d{self.n_depth}" if self.n_depth else ""
        together = "" if self.n_sequences == 1 else f" x{self.n_sequences}"
        adapted = f" lora{self.n_adapters}" if self.n_adapters else ""
        return "+".join(parts) + behind + together + adapted

    @property
    def n_tokens(self) -> int:
        """Number of tokens that are timed."""
        return self.n_sequences * (self.n_prompt + self.n_gen)

    @property
    def positions(self) -> int:
        """Positions of each sequence, those before the test included."""
        return self.n_depth + self.n_prompt + self.n_gen

    @property
    def kv_slots(self) -> int:
        """Number of slots that the test writes."""
        return self.n_sequences * self.positions


@dataclass(frozen=True)
class Throughput:
    """Durations of one test, in the order taken."""

    workload: Workload
    samples_ns: tuple[int, ...]

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each sample."""
        return [self.workload.n_tokens * 1e9 / ns for ns in self.samples_ns]

    @property
    def median_s(self) -> float:
        return statistics.median(self.samples_ns) / 1e9


def measure(
    ranks: Ranks,
    workload: Workload,
    vocab_size: int,
    max_batch_tokens: int,
    repetitions: int,
    warm_ups: int = 1,
) -> Throughput:
    """Time `repetitions` runs of `workload` after `warm_ups` uncounted ones. Positions before the test are
    computed once; each run overwrites its own positions."""
    count = workload.kv_slots
    tokens = np.random.default_rng(0).integers(0, vocab_size, size=count).tolist()
    for batch in _steps("prefill", workload, tokens, 0, workload.n_depth, max_batch_tokens):
        ranks.forward(batch)
    samples = []
    for _ in range(warm_ups + repetitions):
        batches = list(_batches(workload, tokens, max_batch_tokens))
        started_ns = time.perf_counter_ns()
        for batch in batches:
            ranks.forward(batch)
        samples.append(time.perf_counter_ns() - started_ns)
    return Throughput(workload, tuple(samples[warm_ups:]))


def _batches(workload: Workload, tokens: list[int], max_batch_tokens: int) -> Iterator[Batch]:
    first, end = workload.n_depth, workload.n_depth + workload.n_prompt
    yield from _steps("prefill", workload, tokens, first, end, max_batch_tokens)
    for position in range(end, workload.positions):
        yield from _steps("decode", workload, tokens, position, position + 1, workload.n_sequences)


def _steps(
    phase: Phase, workload: Workload, tokens: list[int], first: int, last: int, max_batch_tokens: int
) -> Iterator[Batch]:
    """Batches for positions [first, last) of every sequence."""
    pending: list[SequenceSlice] = []
    room = max_batch_tokens
    for sequence, base in enumerate(range(0, workload.kv_slots, workload.positions)):
        start = first
        while start < last:
            end = min(last, start + room)
            ids = tokens[base + start : base + end]
            adapter = 1 + sequence % workload.n_adapters if workload.n_adapters else 0
            pending.append(
                SequenceSlice(ids, start, base, wants_logits=end == last, adapter=adapter, state=sequence)
            )
            room -= end - start
            start = end
            if room == 0:
                yield Batch(phase, tuple(pending))
                pending, room = [], max_batch_tokens
    if pending:
        yield Batch(phase, tuple(pending))


def flops(model: PackedModel, workload: Workload) -> float:
    """Floating-point operations of one run: linear layers, attention, and the head where logits are made."""
    head = model.weights.get("lm_head", model.weights["embed"])
    layers = sum(
        2 * w.n * w.k * _uses(model, name)
        for name, w in model.products().items()
        if name.startswith("layers.")
    )
    logit_rows = workload.n_sequences * (workload.n_gen + (workload.n_prompt > 0))
    depth, n = workload.n_depth, workload.n_prompt + workload.n_gen
    attended = sum(part.multiplications(depth, n) for part in model.config.keeping)
    attention = 2 * workload.n_sequences * attended
    return float(layers * workload.n_tokens + 2 * head.n * head.k * logit_rows + attention)


def _unread_bytes(model: PackedModel, name: str, n_sequences: int) -> int:
    """Bytes of an expert stack that a step with `n_sequences` rows does not read."""
    experts, expert = model.config.experts, model.one_expert(name)
    if experts is None or expert is None:
        return 0
    return model.weights[name].nbytes - expert.nbytes * min(experts.chosen * n_sequences, experts.count)


def _uses(model: PackedModel, name: str) -> int:
    """Number of times that one row is multiplied by a weight of `PackedModel.products`."""
    experts = model.config.experts
    if model.one_head(name) is not None:
        return model.config.n_heads
    return experts.chosen if experts is not None and name.endswith(STACKS) else 1


def _slots_read(config: ModelConfig, first: int, n: int) -> float:
    """Slots that rows at `n` positions from `first` on read, in the mean of layers by what they keep."""
    parts = [(part.heads.n_kv_heads * part.heads.head_dim, part) for part in config.keeping]
    return sum(size * part.slots_read(first, n) for size, part in parts) / sum(size for size, _ in parts)


def streamed_bytes(model: PackedModel, workload: Workload, kv_bytes_per_slot: int) -> float:
    """Bytes that decoding must read: every weight once a step, and each sequence's own keys and values.
    Experts count as if no two sequences chose the same; adapters, those in use."""
    embedding = 0 if model.config.tied_embeddings else model.weights["embed"].nbytes
    if LAYER_TABLE in model.weights:
        embedding += model.weights[LAYER_TABLE].nbytes
    unread = sum(_unread_bytes(model, name, workload.n_sequences) for name in model.weights)
    adapters = sum(adapter.n_bytes for adapter in model.adapters[: workload.n_sequences])
    weights = model.weight_bytes - embedding - unread + (adapters if workload.n_adapters else 0)
    slots = _slots_read(model.config, workload.n_depth + workload.n_prompt, workload.n_gen)
    return float(weights * workload.n_gen + workload.n_sequences * kv_bytes_per_slot * slots)


def kv_read_rate(model: PackedModel, deep: Throughput, shallow: Throughput, kv_bytes_per_slot: int) -> float:
    """Bytes of keys and values read per second while decoding behind a depth, from the extra time over the
    same test without depth. 0: there was no extra time."""
    workload, longer_s = deep.workload, deep.median_s - shallow.median_s
    assert workload.n_prompt == 0, "of decoding alone"
    assert shallow.workload == replace(workload, n_depth=0), "the same test"
    read = (streamed_bytes(model, each.workload, kv_bytes_per_slot) for each in (deep, shallow))
    more_bytes = next(read) - next(read)
    return more_bytes / longer_s if longer_s > 0 else 0.0


def compute_kind(model: PackedModel) -> str:
    """The peak that bounds this model's prefill: that of the format with most of its layers' multiplies."""
    work: dict[str, int] = {}
    for name, weight in model.weights.items():
        if name.startswith("layers."):
            kind = COMPUTE_KIND.get(weight.kind, "int8")
            work[kind] = work.get(kind, 0) + weight.n * weight.k
    return max(work, key=lambda kind: work[kind])

"""From a model to a program: which ops a forward step is made of, and where in the arena their rows lie.

The program itself, and why its results do not depend on the batch, is in cython_kernels/program.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.division import Division
from phasewise.cython_kernels.errors import KernelError
from phasewise.cython_kernels.kv_formats import kv_slot_bytes
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.model import ModelConfig, PackedModel
from phasewise.serving.schedules import ScheduleLookup

Parts = list[tuple[PackedWeight, int]]

AUTO = "auto"

PATIENCE_S = 60.0
"""Ranks meet after every op, which takes milliseconds, or seconds while weights come from a slow disk. One
that is so late hangs, and is as good as dead."""

_ROUND_FLOATS = 16  # one cache line: rows of the arena begin on their own


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one program has room for."""

    kv_slots: int
    step_tokens: int
    sequences: int
    logit_rows: int
    threads: int
    """Threads of the largest team of this process."""
    kv_format: str = AUTO
    """How keys and values are stored: `resolve_kv_format`."""
    touched: bool = False
    """Whether all memory is to be there before the first step: `rank_teams.touch_memory`."""


@dataclass(frozen=True, slots=True)
class _Arena:
    """Offsets and row strides, in floats. Attention and feed-forward take turns in one place."""

    hidden: int
    hidden_stride: int
    qkv: int
    qkv_stride: int
    mixed: int
    mixed_stride: int
    gate_up: int
    gate_up_stride: int
    tail: int
    """Hidden rows of the last layer that want logits, and its feed-forward rows (in place of `gate_up`)."""
    logits: int


def _rounded(floats: int) -> int:
    return -(-floats // _ROUND_FLOATS) * _ROUND_FLOATS


def _lay_out(config: ModelConfig, tokens: int, logit_rows: int) -> _Arena:
    hidden_stride = _rounded(config.hidden)
    qkv_stride = _rounded(config.q_rows + 2 * config.kv_rows)
    mixed_stride = _rounded(config.q_rows)
    gate_up_stride = _rounded(2 * config.ffn)
    shared = tokens * hidden_stride
    mixed = shared + tokens * qkv_stride
    tail = max(mixed + tokens * mixed_stride, shared + max(tokens, logit_rows) * gate_up_stride)
    return _Arena(
        hidden=0,
        hidden_stride=hidden_stride,
        qkv=shared,
        qkv_stride=qkv_stride,
        mixed=mixed,
        mixed_stride=mixed_stride,
        gate_up=shared,
        gate_up_stride=gate_up_stride,
        tail=tail,
        logits=tail + logit_rows * hidden_stride,
    )


def resolve_kv_format(model: PackedModel, kv_format: str = AUTO) -> str:
    """`auto` is f16, or f32 where every weight of the layers is float32: then nothing is rounded anywhere."""
    if kv_format != AUTO:
        return kv_format
    layers = (weight for name, weight in model.weights.items() if name.startswith("layers."))
    return "f32" if all(weight.kind == "f32" for weight in layers) else "f16"


def kv_bytes_per_slot(model: PackedModel, kv_format: str = AUTO) -> int:
    """Bytes of the keys and values of one position, all layers. ModelError for a format that there is not."""
    config = model.config
    try:
        per_head = kv_slot_bytes(resolve_kv_format(model, kv_format), config.head_dim)
    except KernelError as error:
        raise ModelError(f"{model.name}: {error}") from error
    return config.n_layers * config.n_kv_heads * per_head


def build_program(
    model: PackedModel,
    capacity: Capacity,
    check_memory: Callable[[str, int, int], None] | None = None,
    schedules: Sequence[ScheduleLookup] = (),
    division: Division | None = None,
    memory: Callable[[int], memoryview] | None = None,
    patience_s: float = PATIENCE_S,
) -> Program:
    """A sealed program. ModelError if the model does not fit the kernels or the memory.

    check_memory(model name, bytes, KV slots) may refuse before anything large is allocated. schedules: one
    lookup for each table that a run may name, at most two; the first one says how every weight is computed.
    division: over ranks, None for one. memory(bytes) gives what several ranks share (Program.seal_shared).
    patience_s: how long a rank waits for another within a step.
    """
    try:
        config = model.config
        program = Program(
            _shape(config), _room(model, capacity), config.rope.inv_freq(), division, patience_s
        )
        linears = _Linears(program, schedules, max(capacity.step_tokens, capacity.logit_rows), division)
        arena = _lay_out(model.config, capacity.step_tokens, capacity.logit_rows)
        program.embed(_weight(model, "embed"), arena.hidden, arena.hidden_stride)
        for layer in range(config.n_layers):
            _add_layer(linears, model, layer, arena)
        _add_logits(linears, model, arena)
        _schedule_attention(program, model, capacity, schedules, division)
        if check_memory is not None:
            check_memory(model.name, program.bytes(), capacity.kv_slots)
        if memory is None:
            program.seal(arena.logits)
        else:
            program.seal_shared(arena.logits, memory(program.shared_bytes()))
    except KernelError as error:
        raise ModelError(f"{model.name}: {error}") from error
    return program


def _shape(config: ModelConfig) -> dict[str, int | float]:
    return {
        "n_layers": config.n_layers,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "hidden": config.hidden,
        "ffn": config.ffn,
        "vocab": config.vocab_size,
        "window": config.sliding_window or 0,
        "norm_eps": config.norm_eps,
    }


def _room(model: PackedModel, capacity: Capacity) -> dict[str, int | str]:
    return {
        "kv_slots": capacity.kv_slots,
        "max_tokens": capacity.step_tokens,
        "max_slices": capacity.sequences,
        "max_logit_rows": capacity.logit_rows,
        "max_threads": capacity.threads,
        "kv_format": resolve_kv_format(model, capacity.kv_format),
    }


@dataclass(frozen=True, slots=True)
class _Linears:
    """Adds linear ops to a program, every weight with its arithmetic and its schedules.

    The arithmetic is the whole weight's on every rank; schedules are for this rank's part of it.
    """

    program: Program
    lookups: Sequence[ScheduleLookup]
    most_rows: int
    division: Division | None

    def add(
        self,
        parts: Parts,
        source: Literal["rows", "norm", "gate"],
        from_at: int,
        from_stride: int,
        out: int,
        out_stride: int,
        **options: Any,
    ) -> None:
        """Program.linear, and what the lookups say about its weights."""
        options["arithmetics"] = [self._arithmetic(weight) for weight, _ in parts]
        op = self.program.linear(parts, source, from_at, from_stride, out, out_stride, **options)
        for table, lookup in enumerate(self.lookups):
            for part, (whole, _) in enumerate(parts):
                weight = whole if self.division is None else self.division.weight(whole, table)
                ranges = [] if weight is None else lookup.products(weight, self.most_rows)
                schedules = [(rows.last_m, rows.schedule) for rows in ranges]
                self.program.set_schedules(op, part, schedules, table)

    def _arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return self.lookups[0].arithmetic(weight) if self.lookups else (None, 1)


def _add_layer(linears: _Linears, model: PackedModel, layer: int, arena: _Arena) -> None:
    name, vectors = f"layers.{layer}", model.vectors
    last = layer == model.config.n_layers - 1
    stream, qkv = (arena.hidden, arena.hidden_stride), (arena.qkv, arena.qkv_stride)
    mixed, gate_up = (arena.mixed, arena.mixed_stride), (arena.gate_up, arena.gate_up_stride)
    after = (arena.tail, arena.hidden_stride) if last else stream
    rows = "logits" if last else "every"
    linears.add(_qkv_parts(model, name), "norm", *stream, *qkv, norm=vectors[f"{name}.attn_norm"])
    linears.program.attend(
        layer,
        *qkv,
        *mixed,
        bias=vectors.get(f"{name}.qkv_bias"),
        q_norm=vectors.get(f"{name}.q_norm"),
        k_norm=vectors.get(f"{name}.k_norm"),
        rows="gathered" if last else "every",
    )
    out, down = [(_weight(model, f"{name}.o"), 0)], [(_weight(model, f"{name}.down"), 0)]
    if last:
        linears.add(out, "rows", *mixed, *after, add=True, rows="gathered", residual=stream)
    else:
        linears.add(out, "rows", *mixed, *after, add=True)
    norm = vectors[f"{name}.ffn_norm"]
    linears.add(_gate_up_parts(model, name), "norm", *after, *gate_up, norm=norm, rows=rows)
    linears.add(down, "gate", *gate_up, *after, add=True, rows=rows)


def _add_logits(linears: _Linears, model: PackedModel, arena: _Arena) -> None:
    config = model.config
    head = _weight(model, "embed" if config.tied_embeddings else "lm_head")
    if head.n != config.vocab_size:
        raise ModelError(f"{model.name} gives {head.n} logits for a vocabulary of {config.vocab_size}")
    linears.add(
        [(head, 0)],
        "norm",
        arena.tail,
        arena.hidden_stride,
        arena.logits,
        config.vocab_size,
        norm=model.vectors["final_norm"],
        rows="logits",
    )


def _schedule_attention(
    program: Program,
    model: PackedModel,
    capacity: Capacity,
    lookups: Sequence[ScheduleLookup],
    division: Division | None,
) -> None:
    kv_heads = model.config.n_kv_heads
    for table, lookup in enumerate(lookups):
        own = kv_heads if division is None else division.heads(kv_heads, table)
        if own:
            problem = attention_problem(model, own, capacity.kv_format)
            ranges = lookup.attention(*problem, capacity.step_tokens)
            program.set_attention_schedules([(rows.last_m, rows.schedule) for rows in ranges], table)


def attention_problem(
    model: PackedModel, kv_heads: int | None = None, kv_format: str = AUTO
) -> tuple[str, int, int]:
    """Under what attention's schedules are kept: KV format, dimensions of query and of KV heads.

    Those of all heads, or of some KV heads and the query heads that use them.
    """
    config = model.config
    own = config.n_kv_heads if kv_heads is None else kv_heads
    stored = resolve_kv_format(model, kv_format)
    return stored, config.q_rows // config.n_kv_heads * own, config.head_dim * own


def _weight(model: PackedModel, name: str) -> PackedWeight:
    try:
        return model.weights[name]
    except KeyError:
        raise ModelError(f"{model.name} has no weight {name!r}") from None


def _qkv_parts(model: PackedModel, name: str) -> Parts:
    config = model.config
    if f"{name}.qkv" in model.weights:
        return [(model.weights[f"{name}.qkv"], 0)]
    columns = {"q": 0, "k": config.q_rows, "v": config.q_rows + config.kv_rows}
    return [(_weight(model, f"{name}.{part}"), column) for part, column in columns.items()]


def _gate_up_parts(model: PackedModel, name: str) -> Parts:
    if f"{name}.gate_up" in model.weights:
        return [(model.weights[f"{name}.gate_up"], 0)]
    return [(_weight(model, f"{name}.gate"), 0), (_weight(model, f"{name}.up"), model.config.ffn)]

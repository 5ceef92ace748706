"""From an embedding model to a program that gives hidden rows: of an encoder its own, of a decoder
`forward`'s.

An encoder's layer is h = N(h + A(h)), h = N(h + F(h)). Products add to the stream, and a row operation adds
their biases while it normalises. With `pre_norms` it is h = h + A(N(h)), h = h + F(N(h)), and normalised rows
lie apart from the stream. After the last layer's keys and values only rows that are wanted are computed.
Inputs that are for a task have its low-rank products on top of all others (`task_adapters`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.errors import KernelError
from phasewise.cython_kernels.exact import power
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.embedding.encoder.task_adapters import EMBED, TaskAdapters
from phasewise.serving.errors import ModelError
from phasewise.serving.models.arena import rounded
from phasewise.serving.models.encoding import Encoder
from phasewise.serving.models.forward import (
    PATIENCE_S,
    Capacity,
    build_program,
    open_program,
    schedule_attention,
)
from phasewise.serving.models.linears import Linears, Place, Rows
from phasewise.serving.models.model_parts import into_ffn_parts, qkv_parts, weight_of
from phasewise.serving.models.packed_model import PackedModel, Vector
from phasewise.serving.processes.headroom import check_memory


def build_row_program(
    model: PackedModel,
    capacity: Capacity,
    schedules: tuple[ScheduleLookup, ...] = (),
    added: TaskAdapters | None = None,
) -> Program:
    """A sealed program whose outputs are hidden rows [logit_rows, hidden]. ModelError where it cannot be.

    added: `task_adapters` of the model.
    """
    if model.config.encoder is None:
        return build_program(model, capacity, check_memory, schedules, gives="rows")
    try:
        program = open_program(model, capacity, None, PATIENCE_S, "rows")
        most_rows = max(capacity.step_tokens, capacity.logit_rows)
        linears = Linears(program, schedules, most_rows, None, () if added is None else added.adapters)
        arena = _lay_out(model, model.config.encoder, capacity, 0 if added is None else added.stride)
        _add_embedding(linears, model, arena, added)
        for layer in range(model.config.n_layers):
            _Layer(linears, model, model.config.encoder, layer, arena).add()
        schedule_attention(program, model, capacity, schedules, None)
        check_memory(model.name, program.bytes(), capacity.kv_slots)
        program.seal(arena.out)
    except KernelError as error:
        raise ModelError(f"{model.name}: {error}") from error
    return program


@dataclass(frozen=True, slots=True)
class _Arena:
    """Offsets and row strides, in floats. Attention and feed-forward take turns in one place."""

    stride: int
    """Stride of hidden rows, which begin at 0."""
    inner: int
    """Queries, keys and values, then what attention gives; or rows within the feed-forward layer."""
    qkv_stride: int
    mixed: int
    mixed_stride: int
    up_stride: int
    normed: int
    """Hidden rows that are normalised and read once."""
    tail: int
    """Hidden rows of the last layer that are wanted."""
    out: int
    """The same once they are whole, one behind the other."""


def _lay_out(model: PackedModel, encoder: Encoder, capacity: Capacity, table_stride: int) -> _Arena:
    config, tokens = model.config, capacity.step_tokens
    stride, qkv_stride = rounded(config.hidden), rounded(config.q_rows + 2 * config.kv_rows)
    mixed_stride, up_stride = rounded(config.q_rows), rounded(config.n_into_ffn * config.ffn)
    inner = tokens * stride
    mixed = inner + tokens * qkv_stride
    rows = max(tokens, capacity.logit_rows)
    normed = max(mixed + tokens * mixed_stride, inner + rows * up_stride, inner + tokens * table_stride)
    tail = normed + (rows * stride if encoder.pre_norms else 0)
    out = tail + capacity.logit_rows * stride
    return _Arena(stride, inner, qkv_stride, mixed, mixed_stride, up_stride, normed, tail, out)


def _add_embedding(linears: Linears, model: PackedModel, arena: _Arena, added: TaskAdapters | None) -> None:
    config, vectors, program = model.config, model.vectors, linears.program
    positions, segments = vectors.get("positions"), vectors.get("segments")
    program.embed(weight_of(model, "embed"), 0, arena.stride, positions=positions, segments=segments)
    if added is not None:
        place = arena.inner, added.stride
        program.embed(added.table, *place)
        linears.add([(added.nothing, 0)], {"source": "rows"}, place, (0, arena.stride), EMBED, add=True)
    program.layernorm(config.hidden, 0, arena.stride, 0, arena.stride, *_norm(model, "embed_norm"))


def _norm(model: PackedModel, name: str) -> tuple[Vector, Vector]:
    """A LayerNorm's weight and bias, which is 0 where it has none."""
    weight = model.vectors[name]
    bias = model.vectors.get(f"{name}_bias")
    return weight, np.zeros_like(weight) if bias is None else bias


def slopes_of(n_heads: int) -> Vector:
    """The loss of each head's scores for each position between (ALiBi, Press et al. 2022): powers of
    2^(-8 / n) for n heads, n a power of two; of other numbers those of the next lower power, then every
    other one of the next higher power's.
    """
    lower = 1 << (n_heads.bit_length() - 1)
    powers = [power(2.0, -8 * index, lower) for index in range(1, lower + 1)]
    powers += [power(2.0, -4 * index, lower) for index in range(1, 2 * (n_heads - lower), 2)]
    return np.array(powers, np.float32)


@dataclass(frozen=True, slots=True)
class _Layer:
    """Adds the ops of one layer."""

    linears: Linears
    model: PackedModel
    encoder: Encoder
    layer: int
    arena: _Arena

    def add(self) -> None:
        arena, last = self.arena, self.layer == self.model.config.n_layers - 1
        rows: Rows = "logits" if last else "every"
        after = (arena.tail if last else 0, arena.stride)
        whole = (arena.out, self.model.config.hidden) if last else after
        self._add_attention(after, gathered=last)
        if self.encoder.pre_norms:
            self._add_feed_forward(self._normed("ffn_norm", after, rows), after, rows)
            if last:
                self._normalise("final_norm", None, after, whole, rows)
        else:
            self._normalise(f"{self.name}.attn_norm", "o_bias", after, after, rows)
            self._add_feed_forward(after, after, rows)
            self._normalise(f"{self.name}.ffn_norm", "down_bias", after, whole, rows)

    def _add_attention(self, after: Place, *, gathered: bool) -> None:
        config, arena, stream = self.model.config, self.arena, (0, self.arena.stride)
        rows: Rows = "gathered" if gathered else "every"
        qkv, mixed = (arena.inner, arena.qkv_stride), (arena.mixed, arena.mixed_stride)
        reads = (
            self._normed("attn_norm", stream, "every") if self.encoder.pre_norms and self.layer else stream
        )
        parts = qkv_parts(self.model, self.layer)
        self.linears.add(parts, {"source": "rows"}, reads, qkv, f"{self.name}.qkv")
        self.linears.program.attend(
            0,
            *qkv,
            *mixed,
            bias=self._vector("qkv_bias"),
            rows=rows,
            kind=config.kinds.index(config.kind_of(self.layer)),
            slopes=slopes_of(config.n_heads) if self.encoder.distances else None,
        )
        how: dict[str, Any] = {"add": True, "rows": rows, "residual": stream if gathered else None}
        self.linears.add(self._part("o"), {"source": "rows"}, mixed, after, f"{self.name}.o", **how)

    def _add_feed_forward(self, reads: Place, after: Place, rows: Rows) -> None:
        inner = self.arena.inner, self.arena.up_stride
        into = into_ffn_parts(self.model, self.name, self.model.config.ffn)
        self.linears.add(into, {"source": "rows"}, reads, inner, f"{self.name}.up", rows=rows)
        down = f"{self.name}.down"
        self.linears.add(self._part("down"), self._reads_inner(), inner, after, down, add=True, rows=rows)

    def _normed(self, norm: str, source: Place, rows: Rows) -> Place:
        """Rows of the stream, normalised into a place of their own."""
        target = self.arena.normed, self.arena.stride
        self._normalise(f"{self.name}.{norm}", None, source, target, rows)
        return target

    def _reads_inner(self) -> dict[str, Any]:
        activation = self.model.config.activation
        if self.model.config.gated:
            return {"source": "gate", "gate": activation}
        return {"source": "activation", "gate": activation, "bias": self._vector("up_bias")}

    def _normalise(self, norm: str, bias: str | None, source: Place, target: Place, rows: Rows) -> None:
        own = None if bias is None else self._vector(bias)
        self.linears.program.layernorm(
            self.model.config.hidden, *source, *target, *_norm(self.model, norm), bias=own, rows=rows
        )

    @property
    def name(self) -> str:
        return f"layers.{self.layer}"

    def _part(self, name: str) -> list[Any]:
        return [(weight_of(self.model, f"{self.name}.{name}"), 0)]

    def _vector(self, name: str) -> Vector | None:
        return self.model.vectors.get(f"{self.name}.{name}")

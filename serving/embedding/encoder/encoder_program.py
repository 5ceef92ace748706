"""From an embedding model to a program that gives hidden rows: of an encoder its own, of a decoder
`forward`'s.

An encoder's layer is h = N(h + A(h)), h = N(h + F(h)). Products add to the stream, and a row operation adds
their biases while it normalises. With `pre_norms` it is h = h + A(N(h)), h = h + F(N(h)), and normalised
rows lie apart from the stream. After the last layer's keys and values only rows that are wanted are
computed.

Inputs that are for a task have its low-rank products on top of all others. What a task adds to the embedding
of a token is a product of its row of A, a few numbers, with B. The rows of all tasks are one table, looked
up as embeddings are, with a 1 behind them for what is added to the embedding of segments. An op of a weight
of zeros reads them: all that it gives comes from the adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.errors import KernelError
from phasewise.cython_kernels.packing import PackedWeight, pack_dense
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.adapter_files import adapter_of
from phasewise.serving.loaders.layout import task_shapes
from phasewise.serving.models.arena import rounded
from phasewise.serving.models.encoding import Encoder, EncoderTasks
from phasewise.serving.models.forward import (
    PATIENCE_S,
    Capacity,
    build_program,
    open_program,
    schedule_attention,
)
from phasewise.serving.models.linears import Adapter, Linears, LowRank, Place, Rows, Update, update_of
from phasewise.serving.models.packed_model import Layer, ModelConfig, PackedModel
from phasewise.serving.models.parts.site import MixingRows, Product, ReadRows, Site, Vector
from phasewise.serving.processes.headroom import check_memory

EMBED = "embed"
"""The name by which adapters call the op of the table."""

Stack = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TaskAdapters:
    """`adapters`: of the tasks, in their order. `table` [vocab, numbers]: A of every token, of one task
    behind the other, and 1. `nothing` [hidden, numbers]: zeros.
    """

    adapters: tuple[Adapter, ...]
    table: PackedWeight
    nothing: PackedWeight

    @property
    def stride(self) -> int:
        return rounded(self.table.k)


def task_adapters(model: PackedModel) -> TaskAdapters | None:
    """None for a model without tasks."""
    config = model.config
    tasks = None if config.encoder is None else config.encoder.tasks
    if tasks is None:
        return None
    stacks = {name: model.vectors[name].reshape(shape) for name, shape in task_shapes(config, tasks).items()}
    embed = stacks["task_embed_a"].transpose(1, 0, 2).reshape(config.vocab_size, -1)
    table = np.concatenate([embed, np.ones((config.vocab_size, 1), np.float32)], axis=1)
    adapters = []
    for number, name in enumerate(tasks.names):
        adapter = adapter_of(name, _products(stacks, number, config, tasks.scale), config)
        added = _of_embeddings(stacks, number, tasks)
        adapters.append(replace(adapter, updates={**adapter.updates, EMBED: added}))
    nothing = np.zeros((config.hidden, table.shape[1]), np.float32)
    return TaskAdapters(tuple(adapters), pack_dense(table, "f32"), pack_dense(nothing, "f32"))


def _products(stacks: dict[str, Stack], number: int, config: ModelConfig, scale: float) -> dict[str, LowRank]:
    """A task's part of every product, by our names of the weights."""
    parts = {}
    for index, layer in enumerate(config.layers):
        for product in layer.products:
            stem = f"layers.{index}.task_{product.reader}"
            a, b = stacks[f"{stem}_a"][number], stacks[f"{stem}_b"][number]
            for name, first in product.columns():
                rows = b[first : first + product.outputs[name]]
                parts[f"layers.{index}.{name}"] = LowRank(a, rows, scale)
    return parts


def _of_embeddings(stacks: dict[str, Stack], number: int, tasks: EncoderTasks) -> Update:
    """Its numbers of a row of the table, times B; and what it adds to the embedding of segments, times 1."""
    first, width = number * tasks.rank, len(tasks.names) * tasks.rank + 1
    places = np.eye(width, dtype=np.float32)
    own = LowRank(places[first : first + tasks.rank], stacks["task_embed_b"][number].T, tasks.scale)
    a, b = (stacks[f"task_segments_{which}"][number].astype(np.float64) for which in "ab")
    segments = LowRank(places[-1:], (tasks.scale * (a @ b)).astype(np.float32).T, 1.0)
    down = np.concatenate([own.a, segments.a])
    scales = [own.scale] * own.rank + [segments.scale]
    whole = update_of([(0, LowRank(down, np.concatenate([own.b, segments.b], axis=1), 1.0))])
    return replace(whole, scales=np.array(scales, np.float32))


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
    inner_widths = [layer.feed_forward.inner for layer in config.layers if layer.feed_forward]
    widths = config.keeping[0].widths
    stride, qkv_stride = rounded(config.hidden), rounded(widths.products)
    mixed_stride, up_stride = rounded(widths.mixed), rounded(max(inner_widths))
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
    program.embed(model.weight("embed"), 0, arena.stride, positions=positions, segments=segments)
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


@dataclass(frozen=True, slots=True)
class _Layer:
    """Adds the ops of one layer."""

    linears: Linears
    model: PackedModel
    encoder: Encoder
    number: int
    arena: _Arena

    def add(self) -> None:
        arena, last = self.arena, self.number == self.model.config.n_layers - 1
        rows: Rows = "logits" if last else "every"
        after = (arena.tail if last else 0, arena.stride)
        whole = (arena.out, self.model.config.hidden) if last else after
        self._add_attention(after, gathered=last)
        if self.encoder.pre_norms:
            self._add_feed_forward(self._normed("ffn_norm", after, rows), after, rows)
            if last:
                self._normalise("final_norm", None, after, whole, rows)
        else:
            self._normalise(f"{self.site.stem}attn_norm", "o_bias", after, after, rows)
            self._add_feed_forward(after, after, rows)
            self._normalise(f"{self.site.stem}ffn_norm", "down_bias", after, whole, rows)

    def _add_attention(self, after: Place, *, gathered: bool) -> None:
        arena, stream, (attention,) = self.arena, (0, self.arena.stride), self.layer.mixers
        rows: Rows = "gathered" if gathered else "every"
        qkv, mixed = (arena.inner, arena.qkv_stride), (arena.mixed, arena.mixed_stride)
        reads = (
            self._normed("attn_norm", stream, "every") if self.encoder.pre_norms and self.number else stream
        )
        attention.add(self.site, ReadRows(reads), MixingRows(qkv, qkv, qkv, mixed), 0, rows)
        how: dict[str, Any] = {"add": True, "rows": rows, "residual": stream if gathered else None}
        self._add_back(attention.back, {"source": "rows"}, mixed, after, **how)

    def _add_feed_forward(self, reads: Place, after: Place, rows: Rows) -> None:
        inner, part = (self.arena.inner, self.arena.up_stride), self.layer.feed_forward
        assert part is not None
        part.add(self.site, ReadRows(reads), inner, rows)
        self._add_back(part.down, part.between(self.site), inner, after, add=True, rows=rows)

    def _add_back(
        self, product: Product, reads: dict[str, Any], source: Place, after: Place, **how: Any
    ) -> None:
        parts, reader = self.site.parts(product), self.site.stem + product.reader
        self.linears.add(parts, reads, source, after, reader, **how)

    def _normed(self, norm: str, source: Place, rows: Rows) -> Place:
        """Rows of the stream, normalised into a place of their own."""
        target = self.arena.normed, self.arena.stride
        self._normalise(f"{self.site.stem}{norm}", None, source, target, rows)
        return target

    def _normalise(self, norm: str, bias: str | None, source: Place, target: Place, rows: Rows) -> None:
        own = None if bias is None else self.site.vector(bias)
        self.linears.program.layernorm(
            self.model.config.hidden, *source, *target, *_norm(self.model, norm), bias=own, rows=rows
        )

    @property
    def layer(self) -> Layer:
        return self.model.config.layers[self.number]

    @property
    def site(self) -> Site:
        return self.model.site(self.linears, f"layers.{self.number}.")

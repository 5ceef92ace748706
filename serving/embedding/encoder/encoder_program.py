"""From an embedding model to a program that gives hidden rows: of an encoder its own, of a decoder
`forward`'s.

Inputs that are for a task have its low-rank products on top of all others. What a task adds to the embedding
of a token is a product of its row of A, a few numbers, with B. The rows of all tasks are one table, looked up
as embeddings are, with a 1 behind them for what is added to the embedding of segments. An op of a weight of
zeros reads them: all that it gives comes from the adapters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import Program
from phasewise.cython_kernels.packing import PackedWeight, pack_dense
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.loaders.adapter_files import adapter_of
from phasewise.serving.loaders.layout import task_shapes
from phasewise.serving.models.arena import rounded
from phasewise.serving.models.decoder_layer import add_layer_norm
from phasewise.serving.models.encoding import EncoderTasks
from phasewise.serving.models.forward import (
    Capacity,
    build_program,
)
from phasewise.serving.models.linears import Adapter, Linears, LowRank, Update, update_of
from phasewise.serving.models.packed_model import ModelConfig, PackedModel
from phasewise.serving.models.parts.site import ActivationArena
from phasewise.serving.processes.headroom import check_memory

EMBED = "embed"
"""The name by which adapters call the op of the table."""

Stack = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TaskAdapters:
    """`adapters`: of the tasks, in their order. `table` [vocab, numbers]: A of every token, of one task
    behind the other, and 1. `nothing` [hidden, numbers]: zeros."""

    adapters: tuple[Adapter, ...]
    table: PackedWeight
    nothing: PackedWeight


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
    first, width = number * tasks.rank, tasks.numbers
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

    added: `task_adapters` of the model."""
    if added is not None:
        model = replace(model, adapters=added.adapters)
    embed = partial(_add_embedding, model, added) if model.config.encoder is not None else None
    return build_program(model, capacity, check_memory, schedules, gives="rows", embed=embed)


def _add_embedding(
    model: PackedModel, added: TaskAdapters | None, linears: Linears, arena: ActivationArena
) -> None:
    vectors, program, stream = model.vectors, linears.program, arena.hidden
    positions, segments = vectors.get("positions"), vectors.get("segments")
    program.embed(model.weight("embed"), *stream, positions=positions, segments=segments)
    if added is not None:
        place = arena.gate_up[0], rounded(added.table.k)
        program.embed(added.table, *place)
        linears.add([(added.nothing, 0)], {"source": "rows"}, place, stream, EMBED, add=True)
    add_layer_norm(program, model, "embed_norm", stream, stream, "every")

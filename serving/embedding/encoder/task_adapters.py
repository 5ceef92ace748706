"""The adapters of a model's tasks, as a program has them: low-rank products on top of all others.

What a task adds to the embedding of a token is a product of its row of A, a few numbers, with B. The rows of
all tasks are one table, looked up as embeddings are, with a 1 behind them for what is added to the embedding
of segments. An op of a weight of zeros reads them: all that it gives comes from the adapters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.packing import PackedWeight, pack_dense
from phasewise.serving.loaders.adapters.adapter_files import adapter_of
from phasewise.serving.loaders.encoders.encoder_layout import task_shapes
from phasewise.serving.models.arena import rounded
from phasewise.serving.models.encoding import EncoderTasks
from phasewise.serving.models.low_rank import Adapter, LowRank, Update, update_of
from phasewise.serving.models.packed_model import ModelConfig, PackedModel

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
    ends = np.cumsum([config.q_rows, config.kv_rows])
    parts = {}
    for layer in range(config.n_layers):
        for theirs, ours in (("qkv", ("q", "k", "v")), ("o", ("o",)), ("up", ("up",)), ("down", ("down",))):
            stem = f"layers.{layer}.task_{theirs}"
            a, b = stacks[f"{stem}_a"][number], stacks[f"{stem}_b"][number]
            for name, rows in zip(ours, np.split(b, ends) if len(ours) > 1 else [b], strict=True):
                parts[f"layers.{layer}.{name}"] = LowRank(a, rows, scale)
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

"""The tensors that an encoder's config calls for, by our names, beside those that `layout` knows of
decoders; and those of its files as such.

Weights are a decoder's. Vectors: "embed_norm", "positions" [context, hidden] and "segments" [2, hidden] row
by row where the config has them, with `pre_norms` "final_norm"; per layer "attn_norm", "ffn_norm" and biases.
Of a cross-encoder's head: "score_dense" [hidden, hidden] row by row, "score_out" [hidden]. Every norm, dense
and out has a bias of the same name with "_bias" behind it, but for norms of `pre_norms`, and with `norm_head`
for dense and its norm, "score_norm".

Of tasks, of all of them one after the other: A and B of what is added to the embeddings, "task_embed_a"
[tasks, vocab, rank] and "task_embed_b" [tasks, rank, hidden], "task_segments_a" and "_b" alike; per layer
"task_qkv_a" [tasks, rank, inputs] and "task_qkv_b" [tasks, outputs, rank], and "task_o", "task_up" and
"task_down" alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.source import Rows, SourceTensor
from phasewise.serving.models.encoding import Encoder, EncoderTasks
from phasewise.serving.models.packed_model import ModelConfig

SEGMENTS = 2


def vector_lengths(config: ModelConfig, encoder: Encoder) -> dict[str, int]:
    """Every vector outside layers, before fusing."""
    endings = ("",) if encoder.pre_norms else ("", "_bias")
    outer = ("embed_norm", "final_norm") if encoder.pre_norms else ("embed_norm",)
    lengths = {f"{norm}{ending}": config.hidden for norm in outer for ending in endings}
    if encoder.positions:
        lengths["positions"] = config.context_length * config.hidden
    if encoder.segments:
        lengths["segments"] = SEGMENTS * config.hidden
    if encoder.scores:
        lengths["score_dense"] = config.hidden**2
        lengths["score_norm" if encoder.norm_head else "score_dense_bias"] = config.hidden
        lengths |= {"score_out": config.hidden, "score_out_bias": 1}
    if encoder.tasks is not None:
        lengths |= {name: math.prod(shape) for name, shape in task_shapes(config, encoder.tasks).items()}
    return lengths


def task_shapes(config: ModelConfig, tasks: EncoderTasks) -> dict[str, tuple[int, int, int]]:
    """A and B of what tasks add to embeddings and products, as files have them."""
    count, rank, hidden = len(tasks.names), tasks.rank, config.hidden
    shapes = {
        "task_embed_a": (count, config.vocab_size, rank),
        "task_embed_b": (count, rank, hidden),
        "task_segments_a": (count, 1, rank),
        "task_segments_b": (count, rank, hidden),
    }
    products = {
        "qkv": (config.q_rows + 2 * config.kv_rows, hidden),
        "o": (hidden, config.q_rows),
        "up": (config.ffn, hidden),
        "down": (hidden, config.ffn),
    }
    for layer in range(config.n_layers):
        for name, (outputs, inputs) in products.items():
            shapes[f"layers.{layer}.task_{name}_a"] = count, rank, inputs
            shapes[f"layers.{layer}.task_{name}_b"] = count, outputs, rank
    return shapes


def flattened(tensor: SourceTensor, first_row: int, n_rows: int, what: str) -> SourceTensor:
    """`n_rows` rows of a matrix as one vector, row by row. what: the tensor, in errors."""
    if len(tensor.shape) == 1 and first_row == 0 and n_rows == 1:
        return tensor  # GGUF files leave out dimensions of one
    if len(tensor.shape) != 2 or tensor.shape[0] < first_row + n_rows or tensor.form.is_quantised:
        raise ModelError(
            f"{what} is {tensor.type_name} {tensor.shape}: {counted(n_rows, 'row')} of plain numbers from"
            f" row {first_row} on expected"
        )
    read, width = tensor.rows, tensor.shape[1]

    def rows(_start: int, _stop: int) -> Rows:
        whole = read(first_row, first_row + n_rows)
        assert isinstance(whole, np.ndarray)
        return whole.reshape(1, -1)

    n_bytes = tensor.n_bytes * n_rows // max(tensor.shape[0], 1)
    return replace(tensor, shape=(n_rows * width,), n_bytes=n_bytes, rows=rows)


def padded(tensor: SourceTensor, n_rows: int) -> SourceTensor:
    """A vector of rows, repeated `n_rows` times: one embedding for the two segments of a pair."""
    read, length = tensor.rows, tensor.shape[0]

    def rows(_start: int, _stop: int) -> Rows:
        whole = read(0, 1)
        assert isinstance(whole, np.ndarray)
        return np.tile(whole.reshape(1, -1), n_rows)

    return replace(tensor, shape=(length * n_rows,), rows=rows)


def adapted(
    tensors: Iterable[tuple[str, SourceTensor]], config: ModelConfig, first_position: int, what: str
) -> dict[str, SourceTensor]:
    """Matrices that are vectors to us are flattened; positions begin at the first that a text has.

    ModelError where a tensor is there twice or has no use.
    """
    by_name: dict[str, SourceTensor] = {}
    tasks = None if config.encoder is None else config.encoder.tasks
    of_tasks = {} if tasks is None else task_shapes(config, tasks)
    for name, tensor in tensors:
        if name in by_name:
            raise ModelError(f"{what} has the tensor for {name} twice")
        where = f"{what}: the tensor for {name}"
        if name == "positions":
            tensor = flattened(tensor, first_position, config.context_length, where)
        elif name == "segments":
            tensor = _two_segments(tensor, where)
        elif name in ("score_dense", "score_out"):
            tensor = flattened(tensor, 0, config.hidden if name == "score_dense" else 1, where)
        elif name in of_tasks:
            tensor = _stack(tensor, of_tasks[name], where)
        by_name[name] = tensor
    return by_name


def _two_segments(tensor: SourceTensor, where: str) -> SourceTensor:
    """Texts of a pair get the first two embeddings, or both the only one."""
    if len(tensor.shape) == 1 or tensor.shape[0] == 1:
        return padded(flattened(tensor, 0, 1, where), SEGMENTS)
    return flattened(tensor, 0, SEGMENTS, where)


def _stack(tensor: SourceTensor, shape: tuple[int, int, int], where: str) -> SourceTensor:
    """Matrices of tasks as one vector."""
    if tensor.shape != shape or tensor.form.is_quantised:
        raise ModelError(
            f"{where} is {tensor.type_name} {tensor.shape}: plain numbers {shape} expected of its tasks"
        )
    count, n_rows, width = shape
    flat = replace(tensor, shape=(count * n_rows, width))
    return flattened(flat, 0, count * n_rows, where)

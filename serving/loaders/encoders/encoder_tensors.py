"""Tensors of an encoder's file by our names: what both file formats do alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.encoders.encoder_layout import SEGMENTS, task_shapes
from phasewise.serving.loaders.forms import Rows
from phasewise.serving.loaders.source import SourceTensor
from phasewise.serving.models.packed_model import ModelConfig


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

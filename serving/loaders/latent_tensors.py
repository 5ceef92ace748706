"""Tensors of latent attention as files have them, and ours: views; rows are read when they are packed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families import HeadParts, HeadStack, LatentTensor, TurnedTail
from phasewise.serving.loaders.forms import F32, Rows, convert_rows
from phasewise.serving.loaders.source import SourceTensor, take_rows


def latent_tensors(
    stem: str,
    tensor: SourceTensor,
    form: LatentTensor,
    shapes: Mapping[str, tuple[int, ...]],
    turns: Mapping[str, int],
    what: str,
) -> Iterator[tuple[str, SourceTensor]]:
    """Our names and tensors of one of theirs. stem: "layers.3."; shapes: what the config calls for."""
    if isinstance(form, HeadStack):
        n_rows = math.prod(tensor.shape[:-1])
        yield stem + form.name, replace(tensor, shape=(n_rows, tensor.shape[-1]))
    elif isinstance(form, TurnedTail):
        yield (
            stem + form.name,
            _turned(tensor, turns["n_heads"] if form.by_head else 1, turns["turned"], what),
        )
    else:
        yield from _parts(stem, tensor, form, shapes, turns["n_heads"], what)


def _turned(tensor: SourceTensor, n_heads: int, turned: int, what: str) -> SourceTensor:
    """Pairs at the end of every head, side by side in the file: the first numbers of all, then the second."""
    of_head = tensor.shape[0] // n_heads
    if len(tensor.shape) != 2 or tensor.shape[0] % n_heads or not 0 < turned <= of_head or turned % 2:
        raise ModelError(
            f"{what} is {tensor.shape}: {counted(n_heads, 'head')}, each with {turned} turned rows at its"
            " end, expected"
        )
    plain = of_head - turned

    def rows(start: int, stop: int) -> Rows:
        head, row = np.divmod(np.arange(start, stop), of_head)
        second, pair = np.divmod(row - plain, turned // 2)
        wanted = head * of_head + np.where(row < plain, row, plain + 2 * pair + second)
        if len(wanted) == 0:
            return tensor.rows(start, stop)
        first = int(wanted.min())
        return take_rows(tensor.rows(first, int(wanted.max()) + 1), wanted - first)

    return replace(tensor, rows=rows)


def _parts(
    stem: str,
    tensor: SourceTensor,
    form: HeadParts,
    shapes: Mapping[str, tuple[int, ...]],
    n_heads: int,
    what: str,
) -> Iterator[tuple[str, SourceTensor]]:
    """Rows for keys of every head, which become its columns, and rows for its values."""
    keys, values = (shapes.get(stem + name) for name in (form.keys, form.values))
    if keys is None or values is None:
        raise ModelError(f"{what} belongs to latent attention, which the config does not have")
    key_dim, rank, value_dim = keys[1], values[1], values[0] // n_heads
    of_head = key_dim + value_dim
    if tensor.shape != (n_heads * of_head, rank):
        raise ModelError(f"{what} is {tensor.shape}: {(n_heads * of_head, rank)} expected by its config")

    def key_rows(start: int, stop: int) -> Rows:
        pieces = []
        for head in range(start // rank, -(-stop // rank)):
            own = convert_rows(tensor.rows(head * of_head, head * of_head + key_dim), F32, what)
            assert isinstance(own, np.ndarray)
            pieces.append(own.T[max(start - head * rank, 0) : stop - head * rank])
        return np.ascontiguousarray(np.concatenate(pieces)) if pieces else np.empty((0, key_dim), np.float32)

    def value_rows(start: int, stop: int) -> Rows:
        head, row = np.divmod(np.arange(start, stop), value_dim)
        wanted = head * of_head + key_dim + row
        if len(wanted) == 0:
            return tensor.rows(start, stop)
        return take_rows(tensor.rows(int(wanted[0]), int(wanted[-1]) + 1), wanted - wanted[0])

    plain = F32 if tensor.form.is_quantised else tensor.form  # blocks do not survive columns as rows
    share = tensor.n_bytes * key_dim // of_head
    yield stem + form.keys, replace(tensor, shape=keys, n_bytes=share, form=plain, rows=key_rows)
    yield stem + form.values, replace(tensor, shape=values, n_bytes=tensor.n_bytes - share, rows=value_rows)

"""One tensor of a file as the several tensors of ours that it holds.

Everything here is a view: rows are read from the file when the packer asks for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from decimal import Decimal, localcontext

import numpy as np

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families import ColumnCut, Names, OfLayer, OtherForm, TensorCut
from phasewise.serving.loaders.forms import Rows
from phasewise.serving.loaders.latent_tensors import latent_tensors
from phasewise.serving.loaders.source import RowReader, SourceTensor, take_columns, take_rows
from phasewise.serving.models.packed_model import ModelConfig

Shapes = Mapping[str, tuple[int, ...]]
KEYS_AND_VALUES = ("k", "v", "k_norm")


def is_beyond(stem: str, config: ModelConfig, n_more: int) -> bool:
    """True for a tensor ("layers.3.") of one of the `n_more` layers that the file has behind the model's."""
    return stem != "" and config.n_layers <= int(stem.split(".")[1]) < config.n_layers + n_more


def is_unread(ours: str, config: ModelConfig) -> bool:
    """True for keys and values of a layer that reads those of another, as some files hold them."""
    stem, _, part = ours.rpartition(".")
    if part not in KEYS_AND_VALUES or not config.shared_kv_layers or "experts" in stem:
        return False
    layer = int(stem.split(".")[1])
    return config.n_layers - config.shared_kv_layers <= layer < config.n_layers


def our_tensors(
    stem: str,
    name: str,
    names: Names,
    tensor: SourceTensor,
    shapes: Shapes,
    what: str,
    turns: Mapping[str, int] | None = None,
) -> Iterator[tuple[str, SourceTensor]]:
    """Our names and tensors of a layer's tensor `name`; KeyError where the family has no such name.

    stem: "layers.3.". shapes: what the config calls for, by our names. what: the tensor, in errors.
    turns: how many runs of rows the parts of a cut come in, by what it names.
    """
    ours = names[name]
    if isinstance(ours, OfLayer):
        ours = next((own for own in ours.names if stem + own in shapes), ours.names[0])
    if isinstance(ours, str):
        yield stem + ours, tensor
        return
    if isinstance(ours, OtherForm):
        yield stem + ours.name, _in_other_form(tensor, ours, what)
        return
    if isinstance(ours, ColumnCut):
        yield from _column_parts(stem, tensor, ours, what)
        return
    if not isinstance(ours, TensorCut):
        yield from latent_tensors(stem, tensor, ours, shapes, turns or {}, what)
        return
    if ours.turns:
        yield from _parts_in_turns(stem, tensor, ours, shapes, what, (turns or {}).get(ours.turns, 1))
        return
    if ours.stacked:
        tensor = _one_below_the_other(tensor, ours, what)
    experts = _experts_of(tensor, ours, what) if ours.of_experts else [("", tensor)]
    for place, of_one in experts:
        yield from _parts(f"{stem}{place}", of_one, ours, shapes, what)


def _one_below_the_other(tensor: SourceTensor, cut: TensorCut, what: str) -> SourceTensor:
    """The matrices of a stack [parts, outputs, inputs] as one."""
    if len(tensor.shape) != 3 or tensor.shape[0] != len(cut.parts):
        raise ModelError(
            f"{what} is {tensor.shape}: {counted(len(cut.parts), 'matrix', 'matrices')} expected"
        )
    return replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))


def _experts_of(tensor: SourceTensor, cut: TensorCut, what: str) -> list[tuple[str, SourceTensor]]:
    """The matrices of a stack [experts, outputs, inputs], or the vectors of [experts, outputs]."""
    if len(tensor.shape) < 2:
        raise ModelError(f"{what} is {tensor.shape}: one entry for every expert expected")
    n_rows = tensor.shape[1] if len(tensor.shape) == 3 else 1
    return [
        (
            f"experts.{expert}.",
            replace(
                tensor,
                shape=_turned(tensor.shape[1:], cut),
                n_bytes=tensor.n_bytes // tensor.shape[0],
                rows=_reader(tensor.rows, expert * n_rows, n_rows, cut),
            ),
        )
        for expert in range(tensor.shape[0])
    ]


def _turned(shape: tuple[int, ...], cut: TensorCut) -> tuple[int, ...]:
    return shape[::-1] if cut.transposed else shape


def _reader(rows: RowReader, first: int, n_rows: int, cut: TensorCut) -> RowReader:
    def own_rows(start: int, stop: int) -> Rows:
        return rows(first + start, first + stop)

    def columns(start: int, stop: int) -> Rows:
        whole = rows(first, first + n_rows)
        assert isinstance(whole, np.ndarray)
        return np.ascontiguousarray(whole[:, start:stop].T)

    return columns if cut.transposed else own_rows


def _parts(
    stem: str, tensor: SourceTensor, cut: TensorCut, shapes: Shapes, what: str
) -> Iterator[tuple[str, SourceTensor]]:
    wanted = [shapes.get(stem + part) for part in cut.parts]
    sizes = [shape[0] for shape in wanted if shape is not None]
    if len(sizes) != len(cut.parts) or sum(sizes) != tensor.shape[0]:
        raise ModelError(
            f"{what} has {tensor.shape[0]} rows for {stem}{' and '.join(cut.parts)}, for which the"
            f" config asks for {' and '.join(map(str, wanted))}"
        )
    if cut.alternating and len(set(sizes)) > 1:
        raise ModelError(f"{what} holds rows in turns for parts of {sizes} rows")
    start = 0
    for index, (part, size) in enumerate(zip(cut.parts, sizes, strict=True)):
        every = len(cut.parts) if cut.alternating else 1
        first = index if cut.alternating else start
        yield stem + part, _rows_of(tensor, first, size, every)
        start += size


def _parts_in_turns(
    stem: str, tensor: SourceTensor, cut: TensorCut, shapes: Shapes, what: str, n_turns: int
) -> Iterator[tuple[str, SourceTensor]]:
    sizes = [shapes.get(stem + part, (0,))[0] for part in cut.parts]
    if 0 in sizes or sum(sizes) != tensor.shape[0] or any(size % n_turns for size in sizes):
        raise ModelError(
            f"{what} has {tensor.shape[0]} rows for {stem}{' and '.join(cut.parts)} in"
            f" {counted(n_turns, 'turn')}, for which the config asks for {' and '.join(map(str, sizes))}"
        )
    begin, of_turn = 0, tensor.shape[0] // n_turns
    for part, size in zip(cut.parts, sizes, strict=True):
        turn, row = np.divmod(np.arange(size), size // n_turns)
        yield stem + part, _chosen_rows(tensor, turn * of_turn + begin + row)
        begin += size // n_turns


def _column_parts(
    stem: str, tensor: SourceTensor, cut: ColumnCut, what: str
) -> Iterator[tuple[str, SourceTensor]]:
    n_parts = len(cut.parts)
    if len(tensor.shape) != 2 or tensor.shape[1] % n_parts:
        raise ModelError(f"{what} is {tensor.shape}: expected {counted(n_parts, 'input')} of equal width")
    width = tensor.shape[1] // n_parts

    def columns_from(first: int) -> RowReader:
        def rows(start: int, stop: int) -> Rows:
            return take_columns(tensor.rows(start, stop), first, width, what)

        return rows

    for index, part in enumerate(cut.parts):
        own = replace(
            tensor,
            shape=(tensor.shape[0], width),
            n_bytes=tensor.n_bytes // n_parts,
            rows=columns_from(index * width),
        )
        yield stem + part, own


def _chosen_rows(tensor: SourceTensor, chosen: np.ndarray) -> SourceTensor:
    """The rows of a matrix that `chosen` lists, in its order, which ascends."""

    def rows(start: int, stop: int) -> Rows:
        wanted = chosen[start:stop]
        return take_rows(tensor.rows(int(wanted[0]), int(wanted[-1]) + 1), wanted - wanted[0])

    n_bytes = tensor.n_bytes * len(chosen) // tensor.shape[0]
    return replace(tensor, shape=(len(chosen), *tensor.shape[1:]), n_bytes=n_bytes, rows=rows)


def _in_other_form(tensor: SourceTensor, form: OtherForm, what: str) -> SourceTensor:
    if tensor.form.is_quantised:
        raise ModelError(f"{what} is {tensor.type_name}: plain numbers can run")
    n_numbers = math.prod(tensor.shape)
    n_rows = math.prod(tensor.shape[:-1])

    def rows(start: int, stop: int) -> Rows:
        if stop <= start:
            return np.empty((0, n_numbers), np.float32)
        numbers = tensor.rows(0, n_rows)
        assert isinstance(numbers, np.ndarray)
        flat = np.asarray(numbers, np.float32).reshape(1, -1)
        return negated_exponential(flat) if form.negated_exponential else flat

    return replace(tensor, shape=(n_numbers,) if form.vector else (1, n_numbers), rows=rows)


def negated_exponential(numbers: np.ndarray) -> np.ndarray:
    """-e^x of each number, correctly rounded: libraries differ, and an answer's bits depend on it."""
    with localcontext() as context:
        context.prec = 40
        negated = [-float(Decimal(float(x)).exp()) if -200 <= x <= 80 else math.nan for x in numbers.flat]
    return np.array(negated, np.float32).reshape(numbers.shape)


def _rows_of(tensor: SourceTensor, first: int, count: int, every: int) -> SourceTensor:
    """`count` rows from `first` on, each `every`-th; of a vector as many of its numbers."""
    shape = (count, *tensor.shape[1:])
    n_bytes = tensor.n_bytes * count // tensor.shape[0]

    def matrix_rows(start: int, stop: int) -> Rows:
        if every == 1:
            return tensor.rows(first + start, first + stop)
        span = tensor.rows(first + start * every, first + (stop - 1) * every + 1)
        return take_rows(span, np.arange(0, (stop - start) * every, every))

    def vector_row(start: int, stop: int) -> Rows:
        whole = tensor.rows(start, stop)
        assert isinstance(whole, np.ndarray)
        return whole.reshape(1, -1)[:, first : first + (count - 1) * every + 1 : every]

    return replace(tensor, shape=shape, n_bytes=n_bytes, rows=matrix_rows if len(shape) > 1 else vector_row)


def one_more(tensor: SourceTensor) -> SourceTensor:
    """A vector of numbers that the file holds less one."""

    def rows(start: int, stop: int) -> Rows:
        less = tensor.rows(start, stop)
        assert isinstance(less, np.ndarray)
        return less + np.float32(1)

    return replace(tensor, rows=rows)

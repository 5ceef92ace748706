"""Conversions of a file's tensors to ours: files may join several, and have other orders or forms. Everything
here is a view: rows are read from the file when the packer asks for them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, localcontext

import numpy as np

from phasewise._words import counted
from phasewise.cython_kernels.packing import Array
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.source import F32, Rows, SourceTensor, convert_rows, take_columns, take_rows

Shapes = Mapping[str, tuple[int, ...]]
Parts = Iterable[tuple[str, SourceTensor]]


@dataclass(frozen=True)
class CutFor:
    """The layer and the config that a tensor is cut for. `stem`: the beginning of the layer's names,
    "layers.3.". `shapes`: of the config's tensors by our names. `what`: the tensor, in errors. `turns`:
    `ModelConfig.turns`."""

    stem: str
    shapes: Shapes
    what: str
    turns: Mapping[str, int] = field(default_factory=dict)

    def shape(self, part: str) -> tuple[int, ...] | None:
        return self.shapes.get(self.stem + part)


class Cut(ABC):
    """A conversion of one tensor of a file to one or more of ours."""

    @abstractmethod
    def parts_of(self, tensor: SourceTensor, cut_for: CutFor) -> Parts:
        """Our tensors, by their names within a layer. Raises ModelError for a tensor of another shape."""


Names = Mapping[str, str | Cut]
"""A map of a file's names of a layer's tensors to ours; "{e}" in both stands for an expert's number."""
UNUSED = ""
"""Our name of a tensor that has no use."""


def our_tensors(
    name: str, names: Names, tensor: SourceTensor, cut_for: CutFor, family: str
) -> Iterator[tuple[str, SourceTensor]]:
    """Yield our names and tensors of a file's tensor. Raises ModelError for a name that the family lacks."""
    ours = names.get(name)
    if ours is None:
        raise ModelError(f"{cut_for.what} {family} models do not use")
    parts: Parts = [(ours, tensor)] if isinstance(ours, str) else ours.parts_of(tensor, cut_for)
    for part, own in () if ours == UNUSED else parts:
        yield cut_for.stem + part, own


def picked(tensor: SourceTensor, count: int, row_of: Callable[[Array], Array]) -> SourceTensor:
    """Pick `count` rows of a matrix, or numbers of a vector: the i-th is the file's `row_of(i)`."""

    def rows(start: int, stop: int) -> Rows:
        if len(tensor.shape) == 1:
            return _plain(tensor.rows(start, stop)).reshape(1, -1)[:, row_of(np.arange(count))]
        wanted = row_of(np.arange(start, stop))
        if len(wanted) == 0:
            return tensor.rows(start, stop)
        first = int(wanted.min())
        span = tensor.rows(first, int(wanted.max()) + 1)
        return span if (np.diff(wanted) == 1).all() else take_rows(span, wanted - first)

    n_bytes = tensor.n_bytes * count // tensor.shape[0]
    return replace(tensor, shape=(count, *tensor.shape[1:]), n_bytes=n_bytes, rows=rows)


def _plain(rows: Rows) -> Array:
    assert isinstance(rows, np.ndarray)
    return rows


@dataclass(frozen=True)
class TensorCut(Cut):
    """Cuts a file's tensor that holds several of ours: its rows are those of `parts`, one after the other.

    `of_experts`: True if the first dimension counts experts, each with all parts. `stacked`: True if the
    first dimension counts parts. `alternating`: True if rows of the parts take turns. `transposed`: True if
    inputs come before outputs. `turns`: key in `ModelConfig.turns` of the number of runs of rows in which
    parts take turns."""

    parts: tuple[str, ...]
    of_experts: bool = False
    alternating: bool = False
    transposed: bool = False
    turns: str = ""
    stacked: bool = False

    def parts_of(self, tensor: SourceTensor, cut_for: CutFor) -> Parts:
        if self.stacked:
            if len(tensor.shape) != 3 or tensor.shape[0] != len(self.parts):
                n_parts = counted(len(self.parts), "matrix", "matrices")
                raise ModelError(f"{cut_for.what} is {tensor.shape}: {n_parts} expected")
            tensor = replace(tensor, shape=(tensor.shape[0] * tensor.shape[1], tensor.shape[2]))
        if not self.of_experts:
            yield from self._rows_of(tensor, cut_for, "")
            return
        if len(tensor.shape) < 2:
            raise ModelError(f"{cut_for.what} is {tensor.shape}: one entry for every expert expected")
        for expert in range(tensor.shape[0]):
            yield from self._rows_of(self._expert(tensor, expert), cut_for, f"experts.{expert}.")

    def _expert(self, tensor: SourceTensor, expert: int) -> SourceTensor:
        """The expert's matrix of a stack [experts, outputs, inputs], or its vector of [experts, outputs]."""
        n_rows = tensor.shape[1] if len(tensor.shape) == 3 else 1
        first, shape = expert * n_rows, tensor.shape[1:]

        def own_rows(start: int, stop: int) -> Rows:
            return tensor.rows(first + start, first + stop)

        def columns(start: int, stop: int) -> Rows:
            return np.ascontiguousarray(_plain(tensor.rows(first, first + n_rows))[:, start:stop].T)

        n_bytes = tensor.n_bytes // tensor.shape[0]
        if self.transposed:
            return replace(tensor, shape=shape[::-1], n_bytes=n_bytes, rows=columns)
        return replace(tensor, shape=shape, n_bytes=n_bytes, rows=own_rows)

    def _rows_of(self, tensor: SourceTensor, cut_for: CutFor, place: str) -> Parts:
        n_turns = cut_for.turns.get(self.turns, 1) if self.turns else 1
        wanted = [cut_for.shape(place + part) for part in self.parts]
        sizes = [shape[0] for shape in wanted if shape is not None]
        if len(sizes) != len(self.parts) or sum(sizes) != tensor.shape[0] or any(n % n_turns for n in sizes):
            turns = f" in {counted(n_turns, 'turn')}" if self.turns else ""
            raise ModelError(
                f"{cut_for.what} has {tensor.shape[0]} rows for"
                f" {cut_for.stem}{place}{' and '.join(self.parts)}{turns}, for which the config asks for"
                f" {' and '.join(map(str, wanted))}"
            )
        if self.alternating and len(set(sizes)) > 1:
            raise ModelError(f"{cut_for.what} holds rows in turns for parts of {sizes} rows")
        n_turns = sizes[0] if self.alternating else n_turns
        begin, of_turn = 0, tensor.shape[0] // n_turns
        for part, size in zip(self.parts, sizes, strict=True):
            yield place + part, picked(tensor, size, _in_turns(begin, of_turn, size // n_turns))
            begin += size // n_turns


def _in_turns(begin: int, of_turn: int, own: int) -> Callable[[Array], Array]:
    """The file's row of a part's i-th row, where every run of `of_turn` rows has `own` rows of the part, from
    `begin` on."""

    def row_of(i: Array) -> Array:
        turn, row = np.divmod(i, own)
        return turn * of_turn + begin + row

    return row_of


@dataclass(frozen=True)
class ColumnCut(Cut):
    """Cuts the columns of a file's matrix, which reads several inputs, into `parts` of equal width."""

    parts: tuple[str, ...]

    def parts_of(self, tensor: SourceTensor, cut_for: CutFor) -> Parts:
        n_parts, what = len(self.parts), cut_for.what
        if len(tensor.shape) != 2 or tensor.shape[1] % n_parts:
            raise ModelError(f"{what} is {tensor.shape}: expected {counted(n_parts, 'input')} of equal width")
        width = tensor.shape[1] // n_parts
        whole = replace(tensor, shape=(tensor.shape[0], width), n_bytes=tensor.n_bytes // n_parts)
        for index, part in enumerate(self.parts):

            def columns(start: int, stop: int, first: int = index * width) -> Rows:
                return take_columns(tensor.rows(start, stop), first, width, what)

            yield part, replace(whole, rows=columns)


@dataclass(frozen=True)
class OtherForm(Cut):
    """Reshapes a tensor: to a `vector` of all its numbers, else to a matrix of one row.
    `negated_exponential`: True if our numbers are -e^x of the file's x."""

    name: str
    vector: bool = True
    negated_exponential: bool = False

    def parts_of(self, tensor: SourceTensor, cut_for: CutFor) -> Parts:
        if tensor.form.is_quantised:
            raise ModelError(f"{cut_for.what} is {tensor.type_name}: plain numbers can run")
        n_numbers, n_rows = math.prod(tensor.shape), math.prod(tensor.shape[:-1])

        def rows(start: int, stop: int) -> Rows:
            if stop <= start:
                return np.empty((0, n_numbers), np.float32)
            flat = np.asarray(_plain(tensor.rows(0, n_rows)), np.float32).reshape(1, -1)
            return negated_exponential(flat) if self.negated_exponential else flat

        yield self.name, replace(tensor, shape=(n_numbers,) if self.vector else (1, n_numbers), rows=rows)


def negated_exponential(numbers: Array) -> Array:
    """-e^x of each number, correctly rounded: libraries differ, and an answer's bits depend on it."""
    with localcontext() as context:
        context.prec = 40
        negated = [-float(Decimal(float(x)).exp()) if -200 <= x <= 80 else math.nan for x in numbers.flat]
    return np.array(negated, np.float32).reshape(numbers.shape)


@dataclass(frozen=True)
class OfLayer(Cut):
    """Names a tensor by its layer: the first of `names` that the layer has."""

    names: tuple[str, ...]

    def parts_of(self, tensor: SourceTensor, cut_for: CutFor) -> Parts:
        yield next((own for own in self.names if cut_for.shape(own)), self.names[0]), tensor


@dataclass(frozen=True)
class HeadStack(Cut):
    """Joins the matrices of all heads to one matrix, one below the other."""

    name: str

    def parts_of(self, tensor: SourceTensor, cut_for: CutFor) -> Parts:
        yield self.name, replace(tensor, shape=(math.prod(tensor.shape[:-1]), tensor.shape[-1]))


@dataclass(frozen=True)
class Turned(Cut):
    """Reorders rotated rows of latent attention, the last ones of every head or the first: the file has pairs
    side by side, ours the first rows of all pairs, then the second ones. `heads`: key in `ModelConfig.turns`
    of their number; "": one."""

    name: str
    heads: str = ""
    is_tail: bool = True

    def parts_of(self, tensor: SourceTensor, cut_for: CutFor) -> Parts:
        n_heads, turned = cut_for.turns[self.heads] if self.heads else 1, cut_for.turns["turned"]
        n_rows = tensor.shape[0] if len(tensor.shape) in (1, 2) else 0
        of_head = n_rows // n_heads
        if n_rows % n_heads or not 0 < turned <= of_head or turned % 2:
            raise ModelError(
                f"{cut_for.what} is {tensor.shape}: {counted(n_heads, 'head')}, each with {turned} turned"
                " rows, expected"
            )
        first = of_head - turned if self.is_tail else 0

        def row_of(i: Array) -> Array:
            head, row = np.divmod(i, of_head)
            second, pair = np.divmod(row - first, turned // 2)
            is_turned = (first <= row) & (row < first + turned)
            return head * of_head + np.where(is_turned, first + 2 * pair + second, row)

        yield self.name, picked(tensor, tensor.shape[0], row_of)


@dataclass(frozen=True)
class HeadParts(Cut):
    """Cuts the rows of every head into two tensors of ours: `keys`, transposed, and `values`."""

    keys: str
    values: str

    def parts_of(self, tensor: SourceTensor, cut_for: CutFor) -> Parts:
        keys, values, what = cut_for.shape(self.keys), cut_for.shape(self.values), cut_for.what
        if keys is None or values is None:
            raise ModelError(f"{what} belongs to latent attention, which the config does not have")
        n_heads, key_dim, rank = cut_for.turns["n_heads"], keys[1], values[1]
        value_dim = values[0] // n_heads
        of_head = key_dim + value_dim
        if tensor.shape != (n_heads * of_head, rank):
            raise ModelError(f"{what} is {tensor.shape}: {(n_heads * of_head, rank)} expected by its config")

        def key_rows(start: int, stop: int) -> Rows:
            pieces = []
            for head in range(start // rank, -(-stop // rank)):
                own = _plain(convert_rows(tensor.rows(head * of_head, head * of_head + key_dim), F32, what))
                pieces.append(own.T[max(start - head * rank, 0) : stop - head * rank])
            empty = np.empty((0, key_dim), np.float32)
            return np.ascontiguousarray(np.concatenate(pieces)) if pieces else empty

        plain = F32 if tensor.form.is_quantised else tensor.form  # blocks do not survive columns as rows
        share = tensor.n_bytes * key_dim // of_head
        yield self.keys, replace(tensor, shape=keys, n_bytes=share, form=plain, rows=key_rows)
        yield self.values, picked(tensor, values[0], _in_turns(key_dim, of_head, value_dim))


def one_more(tensor: SourceTensor) -> SourceTensor:
    """Add 1 to a vector whose numbers the file holds less one."""

    def rows(start: int, stop: int) -> Rows:
        return _plain(tensor.rows(start, stop)) + np.float32(1)

    return replace(tensor, rows=rows)

"""The tensors that one quantised weight is made of: found by the ends of their names, checked, and read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

from phasewise._safetensors import TensorEntry
from phasewise.cython_kernels.packing import Array, from_bf16
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.source import SourceFile

Found = tuple[SourceFile, TensorEntry]
Parts = Mapping[str, Found]
Opened = Iterable[tuple[SourceFile, Mapping[str, TensorEntry]]]

PARTS = (
    "weight_packed", "weight_scale", "weight_scale_inv", "weight_zero_point", "weight_shape", "weight_g_idx",
    "weight_global_scale", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
SPARSE = ("compressed", "bitmask", "shape", "row_offsets")
OF_INPUTS = ("input_scale", "input_zero_point", "input_global_scale")
"""Scales of inputs that others round once and for all; here rows are rounded one by one, or not at all."""
FLOATS = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
MAX_DIM = 1 << 31


def parts_in(opened: Opened, ends: Iterable[str], mark: str = ".") -> dict[str, dict[str, Found]]:
    """Tensors whose names end in one of these, behind a mark, by what stands before it. ModelError for one
    that is there twice."""
    parts: dict[str, dict[str, Found]] = {}
    for file, entries in opened:
        for theirs, entry in entries.items():
            stem, _, last = theirs.rpartition(mark)
            if last not in ends:
                continue
            own = parts.setdefault(stem, {})
            if last in own:
                raise ModelError(f"{file.path} has the tensor {theirs!r:.80} twice")
            own[last] = file, entry
    return parts


class PartReader:
    """Checked access to the parts of one weight. `what` names it in errors."""

    def __init__(self, name: str, parts: Parts, allowed: Iterable[str]) -> None:
        self.what = f"the quantised tensor {name!r:.80}"
        self._parts = parts
        unknown = set(parts) - set(allowed)
        if unknown:
            raise ModelError(f"{self.what} has a part {min(unknown)}, with which it cannot be read")

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    @property
    def n_bytes(self) -> int:
        return sum(entry.n_bytes for _, entry in self._parts.values())

    def entry(
        self, part: str, dtypes: Iterable[str], n_dims: Iterable[int] = (2,), *, may_be_empty: bool = False
    ) -> TensorEntry:
        """The part's entry, of one of these types and numbers of dimensions."""
        if part not in self._parts:
            raise ModelError(f"{self.what} lacks its {part}: the file is damaged")
        entry = self._parts[part][1]
        if (
            entry.dtype not in dtypes
            or len(entry.shape) not in n_dims
            or (0 in entry.shape and not may_be_empty)
        ):
            raise ModelError(
                f"{self.what} has {part} as {entry.dtype} {entry.shape}: {', '.join(dtypes)} expected"
            )
        if max(entry.shape, default=1) >= MAX_DIM:
            raise ModelError(f"{self.what} has {part} as {entry.shape}: sizes below {MAX_DIM} expected")
        return entry

    def expect(self, part: str, shape: tuple[int, ...]) -> None:
        actual = self._parts[part][1].shape
        if actual != shape:
            raise ModelError(f"{self.what} has {part} as {actual}: {shape} expected")

    def raw(self, part: str, dtype: str, start: int = 0, stop: int | None = None) -> Array:
        """Rows of a part as numpy has them; of a vector or a number, all of it."""
        file, entry = self._parts[part]
        if len(entry.shape) < 2 or stop is None:
            return np.frombuffer(file.read(entry.offset, entry.n_bytes), dtype).reshape(entry.shape)
        row_bytes = entry.n_bytes // entry.shape[0]
        data = file.read(entry.offset + start * row_bytes, (stop - start) * row_bytes)
        return np.frombuffer(data, dtype).reshape(stop - start, *entry.shape[1:])

    def floats(self, part: str) -> Array:
        """All of a part of plain numbers, as float32."""
        entry = self.entry(part, FLOATS, (0, 1, 2))
        return self.some_floats(part, 0, math.prod(entry.shape)).reshape(entry.shape)

    def some_floats(self, part: str, first: int, count: int) -> Array:
        """`count` numbers of the part, from number `first` on."""
        dtype = self._parts[part][1].dtype
        numbers = self.some(part, FLOATS[dtype], first, count)
        return from_bf16(numbers) if dtype == "BF16" else numbers.astype(np.float32)

    def some(self, part: str, dtype: str, first: int, count: int) -> Array:
        """Entries of a part from one on, without their places in rows. ModelError where there are fewer."""
        (file, entry), size = self._parts[part], np.dtype(dtype).itemsize
        if (first + count) * size > entry.n_bytes:
            raise ModelError(f"{self.what} has too few numbers in {part}")
        return np.frombuffer(file.read(entry.offset + first * size, count * size), dtype)

    def stated_shape(self, part: str) -> tuple[int, int]:
        """Two sizes, which a part holds."""
        entry = self.entry(part, ("I64", "I32"), (1, 2))
        sizes = self.raw(part, "<i8" if entry.dtype == "I64" else "<i4").ravel().tolist()
        if len(sizes) != 2 or not all(1 <= size < MAX_DIM for size in sizes):
            raise ModelError(f"{self.what} says that it is {sizes!r:.60}: two sizes expected")
        return int(sizes[0]), int(sizes[1])

    def group_order(self, part: str, k: int, groups: int) -> Array | None:
        """The group of each input; None where one is -1: compressed-tensors' word for runs."""
        self.entry(part, ("I32", "I64"), (1,))
        self.expect(part, (k,))
        dtype = "<i4" if self._parts[part][1].dtype == "I32" else "<i8"
        order = self.raw(part, dtype).astype(np.int64)
        if (order == -1).any():
            return None
        if order.min() < 0 or order.max() >= groups:
            raise ModelError(
                f"{self.what} has inputs in groups {order.min()} to {order.max()}: 0 to {groups - 1} expected"
            )
        return order


def in_order(order: Array, group: int) -> bool:
    """True if groups are runs of `group` inputs, one after the other."""
    return bool((order == np.arange(order.size) // group).all())


def unpacked(words: Array, bits: int, count: int) -> Array:
    """uint8 [rows, count] of codes from int32 [rows, words], the lowest bits first, without gaps."""
    raw = np.ascontiguousarray(words, dtype="<i4").view(np.uint8)
    if bits == 8:
        return raw[:, :count]
    if bits == 4:
        return np.stack([raw & 15, raw >> 4], axis=-1).reshape(raw.shape[0], -1)[:, :count]
    flags = np.unpackbits(raw, axis=1, bitorder="little")[:, : bits * count].reshape(
        raw.shape[0], count, bits
    )
    weights = (1 << np.arange(bits, dtype=np.uint8)).astype(np.uint8)
    codes: Array = (flags * weights).sum(axis=2, dtype=np.uint8)
    return codes

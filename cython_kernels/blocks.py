"""Weights in the blocks that GGUF files have them in, packed at their own size: K-quants and their kin.

A block is `inputs` consecutive inputs of one output: codes of 2 to 6 bits and what scales them. With the
levels that a kind has, an input is worth

    w = scale * sub_scale[g] * (table[code] or code - zero_point)  -  min * sub_min[g],       g = i // group

where the scale is float16, or a power of two (MXFP4), and sub-scales are small integers. NVFP4 has
sub-scales in e4m3 and a factor for each output, a sum of two float32 numbers that lies beside the blocks,
[P, 2, 16]. Codes of fp8 are numbers in e4m3, and its scale is a float32 below 2^7. Packed, the blocks of a
panel's 16 outputs lie together, [P, k / inputs, block bytes], each in this order:

- the low bits of the codes, 8, 4 or 2 each: of eight or four bits, rows of 64 bytes as in q8 or q4; of two
  bits, rows of 64 bytes for 16 inputs, byte j of a column holding inputs j, 4 + j, 8 + j and 12 + j, the
  first one lowest;
- the high bits, 2 or 1 each: two bits as above; one bit in rows of 64 bytes for 32 inputs, bit q of byte j
  being input 4 q + j;
- sub-scales, then sub-minima, a byte each, [inputs / group, 16]; q2_k has both in the halves of one byte;
- scales, then minima, float16 [16]; of mxfp4 the exponents, a byte each; of fp8 float32; of nvfp4 none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Scaling = Literal["half", "half_mins", "exponent", "float", "e4m3", "super", "super_mins", "super_halves"]

PANEL = 16
SUPER_BLOCK = 256
SMALL_BLOCK = 32
NOT_A_NUMBER = 255  # as the exponent of an mxfp4 block,
E4M3_NOT_A_NUMBER = 127  # and as an e4m3 number without its sign
LOOKED_UP_ZERO = 128  # what looked-up values are stored above, to be unsigned

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled


@dataclass(frozen=True)
class BlockFormat:
    """The layout of a kind of block in memory, and the meaning of its numbers."""

    inputs: int
    group: int
    """Inputs that share a sub-scale, or a scale where there are none."""
    low_bits: int
    high_bits: int
    zero_point: int
    """The code that stands for zero, or its place among looked-up values."""
    scaling: Scaling
    sub_zero: int = 0
    """The sub-scale that stands for zero."""
    table: tuple[int, ...] | None = None

    @property
    def groups(self) -> int:
        return self.inputs // self.group

    @property
    def code_bits(self) -> int:
        return self.low_bits + self.high_bits

    @property
    def has_mins(self) -> bool:
        return self.scaling in ("half_mins", "super_mins", "super_halves")

    @property
    def has_subs(self) -> bool:
        return self.scaling.startswith("super")

    @property
    def is_float(self) -> bool:
        return self.scaling == "float"

    @property
    def has_factors(self) -> bool:
        return self.scaling == "e4m3"

    @property
    def block_bytes(self) -> int:
        """Size of one panel's block."""
        codes = self.inputs * self.code_bits // 8
        subs = {"e4m3": 1, "super": 1, "super_mins": 2, "super_halves": 1}.get(self.scaling, 0) * self.groups
        top = {"exponent": 1, "float": 4, "e4m3": 0}.get(self.scaling, 4 if self.has_mins else 2)
        return PANEL * (codes + subs + top)


BLOCKS: dict[str, BlockFormat] = {
    "q2_k": BlockFormat(SUPER_BLOCK, 16, 2, 0, 0, "super_halves"),
    "q3_k": BlockFormat(SUPER_BLOCK, 16, 2, 1, 4, "super", 32),
    "q4_k": BlockFormat(SUPER_BLOCK, 32, 4, 0, 0, "super_mins"),
    "q5_k": BlockFormat(SUPER_BLOCK, 32, 4, 1, 0, "super_mins"),
    "q6_k": BlockFormat(SUPER_BLOCK, 16, 4, 2, 32, "super", 128),
    "iq4_xs": BlockFormat(SUPER_BLOCK, 32, 4, 0, LOOKED_UP_ZERO, "super", 32, IQ4_VALUES),
    "iq4_nl": BlockFormat(SMALL_BLOCK, 32, 4, 0, LOOKED_UP_ZERO, "half", 0, IQ4_VALUES),
    "mxfp4": BlockFormat(SMALL_BLOCK, 32, 4, 0, LOOKED_UP_ZERO, "exponent", 0, FP4_VALUES),
    "nvfp4": BlockFormat(SMALL_BLOCK, 16, 4, 0, LOOKED_UP_ZERO, "e4m3", 0, FP4_VALUES),
    "fp8": BlockFormat(128, 32, 8, 0, 0, "float"),
    "q5_0": BlockFormat(SMALL_BLOCK, 32, 4, 1, 16, "half"),
    "q5_1": BlockFormat(SMALL_BLOCK, 32, 4, 1, 0, "half_mins"),
}


@dataclass(frozen=True)
class BlockRows:
    """Rows of blocks before packing; everything is as the file has it, nothing is multiplied out."""

    kind: str
    codes: Array
    """Codes of the inputs: uint8 [n, k]."""
    scales: Array
    """Scales of the blocks: float16 [n, k / inputs]; of fp8 float32, of mxfp4 the exponents, uint8; of nvfp4
    the factors of the outputs, float32 [n, 2]."""
    mins: Array | None
    """Minima of the blocks, of the shape and type of `scales`; None where the kind has none."""
    sub_scales: Array | None
    """Sub-scales of the groups: uint8 [n, k / group], counted from sub_zero; for nvfp4 in e4m3, above 0."""
    sub_mins: Array | None

    def __post_init__(self) -> None:
        form, (n, k) = BLOCKS[self.kind], self.codes.shape
        if k % form.inputs:
            raise ValueError(f"rows of {k} inputs are not whole blocks of {form.inputs}")
        subs = (n, k // form.group) if form.has_subs or form.has_factors else None
        expected = (
            ("scales", self.scales, (n, 2) if form.has_factors else (n, k // form.inputs)),
            ("mins", self.mins, (n, k // form.inputs) if form.has_mins else None),
            ("sub_scales", self.sub_scales, subs),
            ("sub_mins", self.sub_mins, subs if form.has_mins else None),
        )
        for name, array, shape in expected:
            if (None if array is None else array.shape) != shape:
                raise ValueError(f"{name} of {self.kind} rows must have the shape {shape}")

    @property
    def format(self) -> BlockFormat:
        return BLOCKS[self.kind]

    @property
    def is_finite(self) -> bool:
        """True if every scale and minimum is a number."""
        if self.format.scaling == "exponent":
            return bool((self.scales != NOT_A_NUMBER).all())
        in_e4m3 = {"float": self.codes, "e4m3": self.sub_scales}.get(self.format.scaling)
        if in_e4m3 is not None and (in_e4m3 & 127 == E4M3_NOT_A_NUMBER).any():
            return False
        return all(bool(np.isfinite(array).all()) for array in (self.scales, self.mins) if array is not None)

    def columns(self, start: int, stop: int) -> BlockRows | None:
        """Every row's inputs from `start` to `stop`; None where that would divide a block."""
        inputs, n_inputs = self.format.inputs, self.codes.shape[1]
        if start % inputs or stop % inputs:
            return None

        def cut(array: Array) -> Array:
            if array is self.scales and self.format.has_factors:
                return array
            each = n_inputs // array.shape[1]
            return np.ascontiguousarray(array[:, start // each : stop // each])

        return self._with_each(cut)

    def taken(self, order: Array) -> BlockRows:
        """The rows in this order, which may name some of them only."""
        return self._with_each(lambda array: array[order])

    def _with_each(self, change: Callable[[Array], Array]) -> BlockRows:
        arrays: dict[str, Any] = {name: change(getattr(self, name)) for name in self.array_names}
        return replace(self, **arrays)

    @property
    def array_names(self) -> list[str]:
        return [field.name for field in fields(self)[1:] if getattr(self, field.name) is not None]


def joined(pieces: list[BlockRows]) -> BlockRows:
    """The rows of several pieces of one kind, one below the other."""
    first, arrays = pieces[0], dict[str, Any]()
    for name in first.array_names:
        arrays[name] = np.concatenate([getattr(piece, name) for piece in pieces])
    return replace(first, **arrays)


def values_shape(kind: str, n: int, k: int) -> tuple[int, int, int]:
    """Shape of packed values; k must be whole blocks (ValueError)."""
    form = BLOCKS[kind]
    if k % form.inputs:
        raise ValueError(f"a {kind} weight has whole blocks of {form.inputs} inputs, not {k}")
    return -(-n // PANEL), k // form.inputs, form.block_bytes


def scale_values(rows: BlockRows) -> tuple[Array, Array | None]:
    """float32 scales and minima of each group, [n, k / group]; exact."""
    form = rows.format
    if form.scaling == "exponent":
        exponents = np.maximum(rows.scales.astype(np.uint32) << 23, np.uint32(0x00400000))
        return exponents.view(np.float32) * np.float32(0.5), None
    if form.has_factors:
        assert rows.sub_scales is not None
        halves = e4m3_numbers(rows.sub_scales) * np.float32(0.5)  # codes stand for doubles
        product = halves.astype(np.float64) * rows.scales[:, :1] + halves * rows.scales[:, 1:]
        return product.astype(np.float32), None
    scales = rows.scales.astype(np.float32)
    sign = np.float32(1 if form.scaling == "half_mins" else -1)  # which minima are added with
    mins = None if rows.mins is None else sign * rows.mins.astype(np.float32)
    if rows.sub_scales is not None:
        subs = rows.sub_scales.astype(np.float32) - np.float32(form.sub_zero)
        scales = np.repeat(scales, form.groups, axis=1) * subs
    if mins is not None and rows.sub_mins is not None:
        mins = np.repeat(mins, form.groups, axis=1) * rows.sub_mins.astype(np.float32)
    return scales, mins


def factors_of(numbers: Array) -> Array:
    """Factors of outputs, float32 [n, 2], whose sums are these float64 numbers to 48 bits: of 1 / x, x a
    float32, they make of an e4m3 number what a division by x does (tried for every x)."""
    high = numbers.astype(np.float32)
    return np.stack([high, (numbers - high).astype(np.float32)], axis=-1)


def e4m3_numbers(codes: Array) -> Array:
    """Numbers in e4m3 as float32, NaN as 480."""
    wide = codes.astype(np.uint32)
    return ((wide & 128) << 24 | (wide & 127) << 20).view(np.float32) * np.float32(2.0**120)


def looked_up(rows: BlockRows) -> Array:
    """Codes by the format's table: uint8 [n, k], from which zero_point is still to be taken."""
    table = rows.format.table
    if table is None:
        return rows.codes
    shifted: Array = (np.array(table, np.int16) + LOOKED_UP_ZERO).astype(np.uint8)[rows.codes]
    return shifted


def pack_values(rows: BlockRows) -> Array:
    """Packed values of rows: uint8 [P, k / inputs, block bytes]; padded outputs have scale 0."""
    form, (n, k) = rows.format, rows.codes.shape
    panels, blocks, end = -(-n // PANEL), k // form.inputs, 0
    packed: Array = np.zeros((panels, blocks, form.block_bytes), np.uint8)

    def put(array: Array) -> None:
        """Append [n, anything] to each panel's blocks: what a column has of a block, column by column."""
        nonlocal end
        each, whole = array.shape[1] // blocks, n // PANEL
        begin, end = end, end + PANEL * each * array.itemsize
        part = packed[:, :, begin:end].view(array.dtype).reshape(panels, blocks, each, PANEL)
        part[:whole] = array[: whole * PANEL].reshape(whole, PANEL, blocks, each).transpose(0, 2, 3, 1)
        if n % PANEL:
            last = array[whole * PANEL :].reshape(-1, blocks, each)
            part[whole, :, :, : n % PANEL] = last.transpose(1, 2, 0)

    put(merged(rows.codes, form.low_bits))
    if form.high_bits:
        put(merged(rows.codes >> form.low_bits, form.high_bits))
    if rows.sub_scales is not None:
        subs = rows.sub_scales
        if form.scaling == "super_halves":
            assert rows.sub_mins is not None
            subs = subs | rows.sub_mins << 4
        put(subs)
    if rows.sub_mins is not None and form.scaling == "super_mins":
        put(rows.sub_mins)
    for scales in () if form.has_factors else (rows.scales, rows.mins):
        if scales is not None:
            put(scales)
    return packed


def merged(codes: Array, bits: int) -> Array:
    """Codes uint8 [n, k] cut to 1, 2 or 4 bits, 8 / bits quads in each word, the first quad lowest: uint32
    [n, k * bits / 32]."""
    words = np.ascontiguousarray(codes) & np.uint8((1 << bits) - 1)
    while bits < 8:
        pairs = words.view(np.uint64)
        words = (pairs | pairs >> np.uint64(32 - bits)).astype(np.uint32)  # the second quad above the first
        bits *= 2
    return words.view(np.uint32)


def unpack_values(kind: str, values: Array, n: int, factors: Array | None) -> BlockRows:
    """The rows that `pack_values` was given. `factors`: those of the rows, where the kind has them."""
    form = BLOCKS[kind]
    panels, blocks, _ = values.shape
    offset = 0

    def take(count: int) -> Array:
        nonlocal offset
        taken = values[:, :, offset : offset + count]
        offset += count
        return taken

    def by_row(array: Array) -> Array:
        """The array reordered from [P, blocks, each, 16] to [n, blocks * each]."""
        rows: Array = array.transpose(0, 3, 1, 2).reshape(panels * PANEL, -1)[:n]
        return np.ascontiguousarray(rows)

    def subs() -> Array:
        return by_row(take(PANEL * form.groups).reshape(panels, blocks, form.groups, PANEL))

    codes = _from_plane(take(PANEL * form.inputs * form.low_bits // 8), form.inputs, form.low_bits)
    if form.high_bits:
        high = take(PANEL * form.inputs * form.high_bits // 8)
        codes = codes | _from_plane(high, form.inputs, form.high_bits) << form.low_bits
    sub_scales = sub_mins = mins = None
    if form.has_subs or form.has_factors:
        sub_scales = subs()
        if form.scaling == "super_mins":
            sub_mins = subs()
        if form.scaling == "super_halves":
            sub_scales, sub_mins = sub_scales & 15, sub_scales >> 4
    dtype = np.dtype({"exponent": np.uint8, "float": np.float32}.get(form.scaling, np.float16))

    def scales() -> Array:
        stored = np.ascontiguousarray(take(PANEL * dtype.itemsize)).view(dtype)
        return by_row(stored.reshape(panels, blocks, 1, PANEL))

    top = scales() if factors is None else factors
    if form.has_mins:
        mins = scales()
    return BlockRows(kind, by_row(codes), top, mins, sub_scales, sub_mins)


def _from_plane(plane: Array, inputs: int, bits: int) -> Array:
    """The codes [P, blocks, inputs, 16] that a plane [P, blocks, bytes] holds."""
    panels, blocks, _ = plane.shape
    rows = plane.reshape(panels, blocks, -1, 1, PANEL, 4)
    shifts = (np.arange(8 // bits, dtype=np.uint8) * bits).reshape(-1, 1, 1)
    quads = (rows >> shifts) & np.uint8((1 << bits) - 1)
    codes: Array = quads.transpose(0, 1, 2, 3, 5, 4).reshape(panels, blocks, inputs, PANEL)
    return codes

"""Weights in the panel layouts that the kernels read, and the plain numpy reference for them.

A weight is W[n, k] (n outputs, k inputs), y = x W^T. Sixteen outputs make a panel, k runs inside it, so a
split of n over threads is a range of panels and one packed copy serves every thread grid. n is padded to a
multiple of 16, k to a multiple of 32; padded columns have scale 0. With P panels and Kp padded inputs:

- f32:  values float32 [P, Kp, 16]
- f16:  values float16 [P, Kp, 16]
- bf16: values uint16 [P, Kp/2, 16, 2], pairs along k
- q8:   values uint8 [P, Kp/4, 16, 4], quads along k
- q4:   values uint8 [P, Kp/8, 16, 4]: byte j of a column holds k = 8i + j low and k = 8i + 4 + j high
- kinds in blocks (q4_k and its kin): uint8 [P, k / inputs of a block, bytes of a panel's block]: blocks.py
- bf16 and q8 may be stored sparse: sparse.py

q8 and q4 carry scales (and maybe mins) [P, Kp/group, 16] with w = scale * (q - zero_point) + min. For q8,
group 0 is all of k: scales [P, 1, 16] and no mins; rows of x have one scale each too. nvfp4's are the factors
of outputs, float32 [P, 2, 16].
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import blocks
from phasewise.cython_kernels.blocks import BLOCKS, BlockRows

PANEL = 16  # output columns per panel, for every format and instruction set
K_MULTIPLE = 32
SLOT_INPUTS = 64  # of a sparse weight (sparse.h): inputs that have an offset of their own,
SLOT_UNIT = 2  # bytes of one unit in which it counts,
SPARSE_TAIL = 2240  # and bytes behind the last one
DEFAULT_GROUP = 32
COLUMN_GROUP = 0  # one group for all of k
NOT_FINITE = 255  # the exponent field of infinities and NaN
PACKING_VERSION = 4  # change with any layout above: packed files of another version are rebuilt

_MINUS_ZERO = np.uint16(0x8000)

Array = npt.NDArray[Any]
Kind = Literal[
    "f32", "bf16", "f16", "q8", "q4",
    "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_xs", "iq4_nl", "mxfp4", "nvfp4", "fp8", "q5_0", "q5_1",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)

BLOCK_KINDS: dict[str, Kind] = {kind: kind for kind in KINDS if kind in BLOCKS}

DENSE_KINDS: tuple[Kind, ...] = ("f32", "bf16", "f16")
"""The kinds of weights that are plain numbers, without scales."""

_FORMS: dict[str, tuple[npt.DTypeLike, int]] = {
    "f32": (np.float32, 1), "bf16": (np.uint16, 2), "f16": (np.float16, 1), "q8": (np.uint8, 4),
    "q4": (np.uint8, 8),
}  # fmt: skip
"""The type of packed values, and how many inputs lie together, of kinds that are no blocks."""


@dataclass(frozen=True)
class QuantRows:
    """Quantised rows before packing: w = scales * (q - zero_point) + mins, each group sharing a scale.

    q uint8 [n, k]; scales float16 or float32 [n, groups_of(k, group)]; mins None or like scales.
    """

    q: Array
    scales: Array
    mins: Array | None
    zero_point: int
    group: int
    bits: int

    def __post_init__(self) -> None:
        n, k = self.q.shape
        expected = (n, groups_of(k, self.group))
        if self.scales.shape != expected:
            raise ValueError(f"scales have shape {self.scales.shape}, {expected} expected")
        if self.mins is not None and (self.mins.shape, self.mins.dtype) != (expected, self.scales.dtype):
            raise ValueError("mins must have the shape and dtype of scales")
        if self.q.dtype != np.uint8 or self.scales.dtype not in (np.float16, np.float32):
            raise ValueError(f"q is {self.q.dtype} and scales {self.scales.dtype}: uint8 and float expected")
        if (self.bits, self.group) not in ((4, 32), (8, 32), (8, 16), (8, COLUMN_GROUP)):
            raise ValueError(f"no kernel reads {self.bits} bits in groups of {self.group}")
        if self.group == COLUMN_GROUP and self.mins is not None:
            raise ValueError("a column with one scale has no mins")

    @property
    def kind(self) -> Kind:
        return "q4" if self.bits == 4 else "q8"


@dataclass(frozen=True)
class PackedWeight:
    """One weight as a kernel reads it: numpy views, maybe over a mapped file. n and k are before padding."""

    kind: Kind
    n: int
    k: int
    group: int
    zero_point: int
    values: Array
    scales: Array | None
    mins: Array | None
    top_exponent: int = 0
    """The exponent field of a bf16 weight's largest magnitude, 0..254, or NOT_FINITE.

    Of the whole weight, also in a view of some columns.
    """
    offsets: Array | None = None
    """Positions in `values` where slots begin, of sparse storage (sparse.py): uint32 [P, slots]; None: dense.

    Of a view of some columns `values` is still the stream of the whole weight.
    """

    @property
    def is_sparse(self) -> bool:
        return self.offsets is not None

    @property
    def panels(self) -> int:
        return padded_n(self.n) // PANEL

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays; of a view of a sparse weight, of its own panels (to a slot)."""
        if self.offsets is None or self.offsets.size == 1:
            return sum(array.nbytes for array in self.arrays)
        span = SLOT_UNIT * (int(self.offsets[-1, -1]) - int(self.offsets[0, 0]))
        stream = span * self.offsets.size // (self.offsets.size - 1)
        return stream + sum(array.nbytes for array in self.arrays[1:])

    @property
    def arrays(self) -> list[Array]:
        """The weight's arrays: values, then scales and mins, then offsets, as far as it has them."""
        arrays = (self.values, self.scales, self.mins, self.offsets)
        return [array for array in arrays if array is not None]


def padded_n(n: int) -> int:
    return -(-n // PANEL) * PANEL


def padded_k(k: int) -> int:
    return -(-k // K_MULTIPLE) * K_MULTIPLE


def groups_of(k: int, group: int) -> int:
    """The number of groups that k inputs fall into."""
    return 1 if group == COLUMN_GROUP else -(-k // group)


def values_shape(kind: Kind, n: int, k: int) -> tuple[int, ...]:
    """Shape of `PackedWeight.values`."""
    return blocks.values_shape(kind, n, k) if kind in BLOCKS else thin_shape(kind, n, padded_k(k))


def values_dtype(kind: Kind) -> np.dtype[Any]:
    return np.dtype(_FORMS[kind][0] if kind in _FORMS else np.uint8)


def offsets_shape(n: int, k: int) -> tuple[int, int]:
    """Shape of `PackedWeight.offsets`."""
    return padded_n(n) // PANEL, -(-k // SLOT_INPUTS)


def scales_shape(kind: Kind, n: int, k: int, group: int) -> tuple[int, int, int]:
    """Shape of `PackedWeight.scales` and `.mins`."""
    return padded_n(n) // PANEL, 2 if kind in BLOCKS else groups_of(padded_k(k), group), PANEL


def to_bf16(x: Array) -> Array:
    """float32 numbers as bfloat16 bits (uint16), rounded to nearest even; NaN stays NaN, infinities stay."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    if not (bits & np.uint32(0xFFFF)).any():
        return (bits >> np.uint32(16)).astype(np.uint16)
    rounded = ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), rounded)


def from_bf16(bits: Array) -> Array:
    """The float32 numbers of bfloat16 bits (uint16), exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack_dense(w: Array, kind: Kind) -> PackedWeight:
    """Pack float32 [n, k] to panels of a dense kind (bf16, f16: round to nearest even; too large is
    infinite)."""
    if kind not in DENSE_KINDS or w.ndim != 2:
        raise ValueError(
            f"dense packing takes a matrix and {', '.join(DENSE_KINDS)}, not {w.ndim} dimensions and {kind}"
        )
    n, k = w.shape
    with np.errstate(over="ignore"):
        rows = to_bf16(w) if kind == "bf16" else np.asarray(w, dtype=values_dtype(kind))
    if kind == "bf16":
        rows[rows == _MINUS_ZERO] = 0  # a masked weight may be -0, and storage must not tell them apart
    values = _panels(rows, _FORMS[kind][1], 0, K_MULTIPLE)
    top = bf16_top_exponent(values) if kind == "bf16" else 0
    return PackedWeight(kind, n, k, 0, 0, values, None, None, top)


def thin_shape(kind: Kind, n: int, k: int) -> tuple[int, ...]:
    """Shape of the values that `pack_thin` gives."""
    panels, inner = padded_n(n) // PANEL, _FORMS[kind][1]
    steps = -(-k // inner)
    return (panels, steps, PANEL) if inner == 1 else (panels, steps, PANEL, min(inner, 4))


def pack_thin(w: Array, kind: Kind) -> PackedWeight:
    """Pack float32 [n, k] as `pack_dense` does, with k padded to a pair at most: few inputs or outputs, for
    `add_low_rank`."""
    packed = pack_dense(w, kind)
    return replace(packed, values=np.ascontiguousarray(packed.values[:, : thin_shape(kind, *w.shape)[1]]))


def bf16_top_exponent(bits: Array) -> int:
    """The exponent of the largest magnitude among bf16 bits (uint16): see `PackedWeight.top_exponent`."""
    return int((bits & np.uint16(0x7FFF)).max(initial=0)) >> 7


def pack_quant(rows: QuantRows) -> PackedWeight:
    """Pack quantised rows to q8 or q4 panels; nothing is rounded."""
    n, k = rows.q.shape
    if rows.kind == "q8":
        values = _panels(rows.q, 4, rows.zero_point, K_MULTIPLE)
    else:
        filled = np.pad(rows.q, ((0, 0), (0, -k % K_MULTIPLE)), constant_values=rows.zero_point)
        words = _panels(blocks.merged(filled, 4), 1, rows.zero_point * 0x11111111, 1)
        values = words.view(np.uint8).reshape(*words.shape, 4)
    groups = 1 if rows.group == COLUMN_GROUP else K_MULTIPLE // rows.group
    scales = _panels(rows.scales, 1, 0, groups)
    mins = None if rows.mins is None else _panels(rows.mins, 1, 0, groups)
    return PackedWeight(rows.kind, n, k, rows.group, rows.zero_point, values, scales, mins)


def pack_blocks(rows: BlockRows) -> PackedWeight:
    """Pack rows of blocks to panels of blocks; nothing is rounded or multiplied out."""
    form, (n, k) = rows.format, rows.codes.shape
    values = blocks.pack_values(rows)
    factors = _panels(rows.scales, 1, 0, 1) if form.has_factors else None
    return PackedWeight(BLOCK_KINDS[rows.kind], n, k, form.group, form.zero_point, values, factors, None)


def widened(rows: BlockRows) -> QuantRows:
    """The same rows of integers with a byte for each and float32 scales and minima; nothing is rounded."""
    scales, mins = blocks.scale_values(rows)
    return QuantRows(blocks.looked_up(rows), scales, mins, rows.format.zero_point, rows.format.group, 8)


def numbers(rows: QuantRows | BlockRows | Array) -> Array:
    """Rows in any form as float32 [n, k]; scales are applied as `dequantise` does."""
    if isinstance(rows, BlockRows) and rows.format.is_float:
        product: Array = blocks.e4m3_numbers(rows.codes) * np.repeat(rows.scales, rows.format.inputs, axis=1)
        return product
    if isinstance(rows, BlockRows):
        rows = widened(rows)
    return dequantise(rows) if isinstance(rows, QuantRows) else rows


def quantise(w: Array, bits: int, symmetric: bool) -> QuantRows:
    """Quantise float32 [n, k] in groups of 32 along k with float16 scales; q is rounded against the stored
    scale. Symmetric: zero_point 2^(bits-1) and no mins. Otherwise: zero_point 0 and float16 mins. Values must
    be finite and small enough that a group's scale is a finite float16 (ValueError)."""
    n, k = w.shape
    group, top = DEFAULT_GROUP, (1 << bits) - 1
    padded = np.pad(np.asarray(w, dtype=np.float32), ((0, 0), (0, -k % group)), mode="edge")
    blocks = padded.reshape(n, -1, group)
    with np.errstate(over="ignore", invalid="ignore"):
        scales, mins, zero_point = (_symmetric if symmetric else _with_minimum)(blocks, bits)
    if not (np.isfinite(scales).all() and (mins is None or np.isfinite(mins).all())):
        raise ValueError("a weight is not finite, or too large for a float16 scale")
    step = scales.astype(np.float32)[..., None]
    offset = np.float32(0) if mins is None else mins.astype(np.float32)[..., None]
    steps = np.divide(blocks - offset, step, out=np.zeros_like(blocks), where=step != 0)
    lowest = 1 if symmetric and bits == 8 else 0
    q = np.clip(np.rint(steps) + zero_point, lowest, top).astype(np.uint8).reshape(n, -1)[:, :k]
    return QuantRows(q, scales, mins, zero_point, group, bits)


def dequantise(rows: QuantRows) -> Array:
    """The rows as float32 [n, k]: scale * (q - zero_point), then + min, each in float32."""
    k = rows.q.shape[1]
    group = rows.group or k
    scales = np.repeat(rows.scales.astype(np.float32), group, axis=1)[:, :k]
    w = (rows.q.astype(np.float32) - np.float32(rows.zero_point)) * scales
    if rows.mins is not None:
        w += np.repeat(rows.mins.astype(np.float32), group, axis=1)[:, :k]
    return w


def to_dense(weight: PackedWeight) -> PackedWeight:
    """The same weight stored dense."""
    if weight.offsets is None:
        return weight
    from phasewise.cython_kernels import _native  # packing alone needs no compiled kernels

    dense = _native.sparse_unpack(weight.values, weight.offsets, weight.kind, weight.zero_point, weight.k)
    values = dense.view(values_dtype(weight.kind)).reshape(values_shape(weight.kind, weight.n, weight.k))
    return replace(weight, values=values, offsets=None)


def unpack(p: PackedWeight) -> Array:
    """The packed weight as float32 [n, k]: the reference for every kernel."""
    if p.is_sparse:
        return unpack(to_dense(p))
    if p.kind in ("f32", "f16"):
        return np.ascontiguousarray(_rows(p.values, p.n, p.k), dtype=np.float32)
    if p.kind == "bf16":
        return from_bf16(_rows(p.values, p.n, p.k))
    return numbers(unpack_blocks(p) if p.kind in BLOCKS else unpack_quant(p))


def unpack_quant(p: PackedWeight) -> QuantRows:
    """The rows that `pack_quant` was given; for a weight of blocks, those that `widened` gives."""
    if p.kind in BLOCKS:
        return widened(unpack_blocks(p))
    assert p.scales is not None
    values = p.values
    if p.kind == "q4":
        values = np.concatenate([values & 0x0F, values >> 4], axis=-1)
    groups = groups_of(p.k, p.group)
    scales = _rows(p.scales, p.n, groups)
    mins = None if p.mins is None else _rows(p.mins, p.n, groups)
    return QuantRows(_rows(values, p.n, p.k), scales, mins, p.zero_point, p.group, 4 if p.kind == "q4" else 8)


def unpack_blocks(p: PackedWeight) -> BlockRows:
    """The rows that `pack_blocks` was given."""
    return blocks.unpack_values(p.kind, p.values, p.n, None if p.scales is None else _rows(p.scales, p.n, 2))


def _symmetric(blocks: Array, bits: int) -> tuple[Array, None, int]:
    zero_point = 1 << (bits - 1)
    if bits == 8:
        return (np.abs(blocks).max(axis=2) / np.float32(127)).astype(np.float16), None, zero_point
    # Four bits are asymmetric around zero (-8..7): the end of larger magnitude takes -8.
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=2)[..., None], axis=2)[..., 0]
    return (extreme / np.float32(-zero_point)).astype(np.float16), None, zero_point


def _with_minimum(blocks: Array, bits: int) -> tuple[Array, Array, int]:
    low, high = blocks.min(axis=2), blocks.max(axis=2)
    mins = low.astype(np.float16)
    scales = ((high - mins.astype(np.float32)) / np.float32((1 << bits) - 1)).astype(np.float16)
    return np.maximum(scales, np.float16(0)), mins, 0


def _panels(rows: Array, inner: int, fill: int, k_multiple: int) -> Array:
    """The rows [n, k] as contiguous panels [P, Kp/inner, 16(, inner)], padded with `fill`."""
    n, k = rows.shape
    n_pad, k_pad = -n % PANEL, -k % k_multiple
    if n_pad or k_pad:
        rows = np.pad(rows, ((0, n_pad), (0, k_pad)), constant_values=fill)
    runs = np.ascontiguousarray(rows).view(f"u{inner * rows.itemsize}")
    panels = np.ascontiguousarray(runs.reshape(-1, PANEL, runs.shape[1]).transpose(0, 2, 1)).view(rows.dtype)
    return panels if inner == 1 else panels.reshape(*panels.shape[:2], PANEL, inner)


def _rows(panels: Array, n: int, k: int) -> Array:
    """The inverse of `_panels`, without the padding."""
    if panels.ndim == 3:
        panels = panels[..., None]
    rows = panels.transpose(0, 2, 1, 3).reshape(panels.shape[0] * PANEL, -1)
    return rows[:n, :k]

"""The product y = x W^T in float64, and how far each kernel may be from it (families/gemm_*.c)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels.blocks import BLOCKS, BlockRows, factors_of
from phasewise.cython_kernels.packing import KINDS, PackedWeight, QuantRows

Array = npt.NDArray[Any]
UNIT = 2.0**-24
PLAIN_KINDS = tuple(kind for kind in KINDS if kind not in BLOCKS)
FORMATS = (
    *("f32", "f16", "bf16", "q8", "q8 f32", "q8 min", "q8 group 16", "q8 column", "q4", "q4 min"),
    "q4 min f32",
)


def quantise_columns(w: Array) -> QuantRows:
    """float32 [n, k] to eight bits with one float32 scale for each output: 127 is its largest magnitude.

    Values must be finite (ValueError).
    """
    rows = np.asarray(w, dtype=np.float32)
    if not np.isfinite(rows).all():
        raise ValueError("a weight is not finite")
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(127)
    steps = np.divide(rows, scales, out=np.zeros_like(rows), where=scales != 0)
    q = (np.clip(np.rint(steps), -127, 127) + 128).astype(np.uint8)
    return QuantRows(q, scales, None, 128, packing.COLUMN_GROUP, 8)


def make_weight(fmt: str, n: int, k: int, rng: np.random.Generator) -> PackedWeight:
    """A random weight; `fmt` names the kind, then what differs from zero_point and float16 scales of 32."""
    if fmt in packing.DENSE_KINDS:
        return packing.pack_dense(rng.standard_normal((n, k), dtype=np.float32), fmt)  # type: ignore[arg-type]
    bits, group = (8 if fmt.startswith("q8") else 4), (16 if "16" in fmt else 0 if "column" in fmt else 32)
    dtype = np.float32 if "f32" in fmt else np.float16
    q = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    groups = packing.groups_of(k, group)
    scales = rng.standard_normal((n, groups)).astype(dtype)
    mins = rng.standard_normal((n, groups)).astype(dtype) if "min" in fmt else None
    zero_point = 0 if mins is not None else int(rng.choice([1 << (bits - 1), 1, 255 if bits == 8 else 15]))
    return packing.pack_quant(QuantRows(q, scales, mins, zero_point, group, bits))


DENSITIES = (0.0, 1 / 64, 0.5, 1.0)
"""Kept shares at which sparse storage is tested."""


def pruned(w: PackedWeight, density: float, rng: np.random.Generator) -> PackedWeight:
    """The weight with about `density` of its numbers left; below 1 its second panel has none."""
    zero = w.zero_point if w.kind == "q8" else 0
    values = np.where(rng.random(w.values.shape) < density, w.values, w.values.dtype.type(zero))
    if density < 1:
        values[1:2] = zero
    return replace(w, values=values)


def random_blocks(kind: str, n: int, k: int, rng: np.random.Generator) -> BlockRows:
    """Random codes, sub-scales and scales of a kind in blocks; k is whole blocks."""
    form = BLOCKS[kind]
    blocks = (n, k // form.inputs)

    def halves() -> Array:
        return rng.standard_normal(blocks).astype(np.float16)

    def scales() -> Array:
        if form.has_factors:
            return factors_of(rng.standard_normal(n))
        if form.is_float:
            return rng.standard_normal(blocks, dtype=np.float32)
        return rng.integers(90, 140, blocks, dtype=np.uint8) if form.scaling == "exponent" else halves()

    def bytes_below(top: int, shape: tuple[int, int]) -> Array:
        return rng.integers(0, top, shape, dtype=np.uint8)

    sub_top = {"super_halves": 16, "super_mins": 64, "e4m3": 127}.get(form.scaling, 2 * form.sub_zero)
    groups = (n, k // form.group)
    signs = bytes_below(2, (n, k)) << 7 if form.is_float else np.uint8(0)
    return BlockRows(
        kind,
        bytes_below(127 if form.is_float else 1 << form.code_bits, (n, k)) | signs,
        scales(),
        halves() if form.has_mins else None,
        bytes_below(sub_top, groups) if form.has_subs or form.has_factors else None,
        bytes_below(sub_top, groups) if form.has_subs and form.has_mins else None,
    )


def quantise_rows(x: Array, group: int) -> tuple[Array, Array]:
    """q int [m, k] and scales float32 [m, groups], as families/quantise.c says."""
    m, k = x.shape
    group = group or k
    blocks = np.pad(x, ((0, 0), (0, -k % group))).reshape(m, -1, group)
    top = np.abs(blocks).max(axis=2)
    small = top < np.float32(2.0**-100)
    safe = np.where(small, np.float32(1), top)
    q = np.rint(blocks * (np.float32(127) / safe)[..., None]).astype(np.int64)
    q[small] = 0
    return q.reshape(m, -1)[:, :k], np.where(small, np.float32(0), top / np.float32(127))


def gamma(n: int, unit: float = UNIT) -> float:
    return n * unit / (1 - n * unit)


def rounded(x: Array) -> Array:
    return packing.from_bf16(packing.to_bf16(x))


def expected(x: Array, w: PackedWeight, k_parts: int = 1, path: str | None = None) -> tuple[Array, Array]:
    """(y float64 [m, n] of the x that the kernel sees, the bound of |got - y|).

    path None: the default of the instruction set in use.
    """
    if w.kind == "bf16" and (path or _native.compute_paths("bf16")[0]) == "f16_fma":
        return _expected_halves(x, packing.unpack(w), k_parts)
    if w.kind in packing.DENSE_KINDS or w.kind == "fp8":
        return _expected_dense(rounded(x) if w.kind == "bf16" else x, packing.unpack(w))
    if path == "fma":
        return _expected_dense(x, packing.unpack(w))
    if path in ("bf16_dot", "bf16_tile"):
        return _expected_dense(rounded(x), rounded(packing.unpack(w)))
    if path == "int8_block" and w.kind in BLOCKS and BLOCKS[w.kind].has_subs:
        return _expected_blocks(x, w)
    return _expected_columns(x, w, k_parts) if w.group == packing.COLUMN_GROUP else _expected_groups(x, w)


def _expected_dense(x: Array, matrix: Array) -> tuple[Array, Array]:
    seen, weights, k = x.astype(np.float64), matrix.astype(np.float64), x.shape[1]
    tiny = 2.0**-126 * (k + np.abs(seen).sum(axis=1)[:, None] + np.abs(weights).sum(axis=1))
    return seen @ weights.T, gamma(k + 1) * (np.abs(seen) @ np.abs(weights).T) + tiny


def _expected_halves(x: Array, matrix: Array, k_parts: int) -> tuple[Array, Array]:
    """families/gemm_f16.c: of the x that are given."""
    seen, weights, k = x.astype(np.float64), matrix.astype(np.float64), x.shape[1]
    row_tops = np.maximum(np.abs(seen).max(axis=1), 2.0**-125)[:, None]
    top = max(float(np.abs(weights).max()), 2.0**-106)
    dust = 2.0**-21 * top * np.abs(seen).sum(axis=1)[:, None] + 2.0**-26 * row_tops * np.abs(weights).sum(
        axis=1
    )
    dust += 2.0**-32 * k * row_tops * top
    relative = gamma(19, 2.0**-11) + gamma(-(-k // 64) + 2 * k_parts)
    bound = relative * (np.abs(seen) @ np.abs(weights).T) + (1 + relative) * dust + 2.0**-148
    return seen @ weights.T, bound


def _expected_groups(x: Array, w: PackedWeight) -> tuple[Array, Array]:
    rows = packing.unpack_quant(w)
    q, a = quantise_rows(x, w.group)
    groups = a.shape[1]
    y, size = np.zeros((2, x.shape[0], w.n))
    for g in range(groups):
        k = slice(g * w.group, (g + 1) * w.group)
        dot = q[:, k] @ (rows.q[:, k].astype(np.int64) - w.zero_point).T
        term = a[:, g, None].astype(np.float64) * rows.scales[:, g].astype(np.float64) * dot
        y, size = y + term, size + np.abs(term)
        if rows.mins is not None:
            low = (a[:, g].astype(np.float64) * q[:, k].sum(axis=1))[:, None] * rows.mins[:, g].astype(
                np.float64
            )
            y, size = y + low, size + np.abs(low)
    return y, gamma(2 * groups + 2) * size + 1e-40


def _expected_blocks(x: Array, w: PackedWeight) -> tuple[Array, Array]:
    """families/gemm_blockwise.c: the minima of a block are a term of their own."""
    form, rows = BLOCKS[w.kind], packing.unpack_blocks(w)
    q, a = quantise_rows(x, form.inputs)
    levels = (rows.codes if form.table is None else np.array(form.table)[rows.codes]).astype(np.int64)
    assert rows.sub_scales is not None
    steps = levels - (form.zero_point if form.table is None else 0)
    factors = rows.sub_scales.astype(np.int64) - form.sub_zero
    y, size = np.zeros((2, x.shape[0], w.n))
    for b in range(a.shape[1]):
        k, groups = slice(b * 256, (b + 1) * 256), slice(b * form.groups, (b + 1) * form.groups)
        scaled = steps[:, k] * np.repeat(factors[:, groups], form.group, axis=1)
        scale = a[:, b, None].astype(np.float64)
        terms = [scale * rows.scales[:, b].astype(np.float64) * (q[:, k] @ scaled.T)]
        if rows.mins is not None and rows.sub_mins is not None:
            lowest = np.repeat(rows.sub_mins[:, groups].astype(np.int64), form.group, axis=1)
            terms.append(-scale * rows.mins[:, b].astype(np.float64) * (q[:, k] @ lowest.T))
        y, size = y + sum(terms), size + sum(np.abs(term) for term in terms)
    return y, gamma(2 * a.shape[1] + 3) * size + 1e-40


def k_part_ends(k: int, k_parts: int) -> list[int]:
    """Ends of the parts of k, which are nearly equal and cut at multiples of 32."""
    units = packing.padded_k(k) // packing.K_MULTIPLE
    return [min(k, units * (part + 1) // k_parts * packing.K_MULTIPLE) for part in range(k_parts)]


def _expected_columns(x: Array, w: PackedWeight, k_parts: int) -> tuple[Array, Array]:
    rows = packing.unpack_quant(w)
    q, a = quantise_rows(x, w.group)
    scale = a.astype(np.float64) * rows.scales[:, 0].astype(np.float64)
    y, size, begin = *np.zeros((2, x.shape[0], w.n)), 0
    for end in k_part_ends(w.k, k_parts):
        term = scale * (q[:, begin:end] @ (rows.q[:, begin:end].astype(np.int64) - w.zero_point).T)
        y, size, begin = y + term, size + np.abs(term), end
    return y, gamma(k_parts + 2) * size + 1e-40


def assert_bound_and_bits(
    isa_name: str, w: PackedWeight, x: Array, path: str, k_parts: int = 1, **schedule: int
) -> None:
    """By any schedule a product keeps its bound, and its rows have the bits that each has alone."""
    with isa.using(isa_name):
        fields = _native.default_schedule(w, len(x), path=path) | schedule
        together = _native.gemm(x, w, fields, path=path, k_parts=k_parts)
        alone = np.concatenate([_native.gemm(row[None], w, path=path, k_parts=k_parts) for row in x])
    y, bound = expected(x, w, path=path)

    assert np.array_equal(together, alone)
    assert (np.abs(together - y) <= bound).all()

"""GGUF's block formats as quantised rows, without a second rounding.

Every decoder takes uint8 [rows, blocks, bytes per block]. The layouts are those of `gguf.quants`, whose
float output ours equals exactly: products of a 16-bit scale and a 6- or 8-bit sub-scale fit in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from phasewise.cython_kernels.packing import Array, QuantRows, from_bf16
from phasewise.serving.loaders.forms import BF16, F32, WeightForm, form_of
from phasewise.serving.loaders.source import Rows


@dataclass(frozen=True)
class BlockType:
    """A GGUF tensor type that we read: `values` per block, in `block_bytes`."""

    values: int
    block_bytes: int
    form: WeightForm
    decode: Callable[[Array], Rows]


def _half(raw: Array) -> Array:
    """float16 [rows, blocks] from uint8 [rows, blocks, 2]."""
    return np.ascontiguousarray(raw).view(np.float16)[..., 0]


def _nibbles(raw: Array) -> Array:
    """Low nibbles, then high ones, along the last axis."""
    return np.concatenate([raw & 0x0F, raw >> 4], axis=-1)


def _rows(q: Array) -> Array:
    return q.reshape(q.shape[0], -1)


def _q4_0(raw: Array) -> QuantRows:
    return QuantRows(_rows(_nibbles(raw[..., 2:])), _half(raw[..., :2]), None, 8, 32, 4)


def _q4_1(raw: Array) -> QuantRows:
    return QuantRows(_rows(_nibbles(raw[..., 4:])), _half(raw[..., :2]), _half(raw[..., 2:4]), 0, 32, 4)


def _fifth_bits(raw: Array) -> Array:
    """The fifth bit of 32 values from 4 bytes, moved to its place."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(raw: Array) -> QuantRows:
    q = _nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
    return QuantRows(_rows(q), _half(raw[..., :2]), None, 16, 32, 8)


def _q5_1(raw: Array) -> QuantRows:
    q = _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    return QuantRows(_rows(q), _half(raw[..., :2]), _half(raw[..., 2:4]), 0, 32, 8)


def _q8_0(raw: Array) -> QuantRows:
    return QuantRows(_rows(raw[..., 2:] ^ np.uint8(0x80)), _half(raw[..., :2]), None, 128, 32, 8)


def _k_scales(raw: Array) -> tuple[Array, Array]:
    """Scales and minima, float32 [rows, 8 per block], from the 16 leading bytes of a Q4_K or Q5_K block."""
    d, dmin = (_half(raw[..., at : at + 2]).astype(np.float32)[..., None] for at in (0, 2))
    low, mid, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=-1)
    mins = np.concatenate([mid & 0x3F, (high >> 4) | ((mid >> 2) & 0x30)], axis=-1)
    return _rows(d * scales.astype(np.float32)), _rows(-(dmin * mins.astype(np.float32)))


def _k_nibbles(raw: Array) -> Array:
    """128 bytes to 8 sub-blocks of 32: each 32 bytes hold a sub-block low and the next one high."""
    quads = raw.reshape(*raw.shape[:2], 4, 1, 32)
    return np.concatenate([quads & 0x0F, quads >> 4], axis=-2).reshape(*raw.shape[:2], 8, 32)


def _q4_k(raw: Array) -> QuantRows:
    scales, mins = _k_scales(raw)
    return QuantRows(_rows(_k_nibbles(raw[..., 16:])), scales, mins, 0, 32, 4)


def _q5_k(raw: Array) -> QuantRows:
    scales, mins = _k_scales(raw)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((raw[..., 16:48][..., None, :] >> shifts) & 1) << 4
    return QuantRows(_rows(_k_nibbles(raw[..., 48:]) | fifth), scales, mins, 0, 32, 8)


def _q6_k(raw: Array) -> QuantRows:
    rows, blocks = raw.shape[:2]
    low = raw[..., :128].reshape(rows, blocks, 2, 1, 64) >> np.array([[0], [4]], dtype=np.uint8)
    high = raw[..., 128:192].reshape(rows, blocks, 2, 1, 32) >> np.array([[0], [2], [4], [6]], dtype=np.uint8)
    q = (low & 0x0F).reshape(rows, blocks, 256) | ((high & 3) << 4).reshape(rows, blocks, 256)
    d = _half(raw[..., 208:210]).astype(np.float32)[..., None]
    scales = d * np.ascontiguousarray(raw[..., 192:208]).view(np.int8).astype(np.float32)
    return QuantRows(_rows(q), _rows(scales), None, 32, 16, 8)


def _f32(raw: Array) -> Array:
    return _rows(np.ascontiguousarray(raw)).view(np.float32)


def _f16(raw: Array) -> Array:
    return _rows(np.ascontiguousarray(raw)).view(np.float16).astype(np.float32)


def _bf16(raw: Array) -> Array:
    return from_bf16(_rows(np.ascontiguousarray(raw)).view(np.uint16))


def _quantised(values: int, block_bytes: int, decode: Callable[[Array], QuantRows]) -> BlockType:
    form = form_of(decode(np.zeros((1, 1, block_bytes), np.uint8)))
    return BlockType(values, block_bytes, form, decode)


BLOCK_TYPES: dict[str, BlockType] = {
    "F32": BlockType(1, 4, F32, _f32),
    "F16": BlockType(1, 2, F32, _f16),
    "BF16": BlockType(1, 2, BF16, _bf16),
    "Q4_0": _quantised(32, 18, _q4_0),
    "Q4_1": _quantised(32, 20, _q4_1),
    "Q5_0": _quantised(32, 22, _q5_0),
    "Q5_1": _quantised(32, 24, _q5_1),
    "Q8_0": _quantised(32, 34, _q8_0),
    "Q4_K": _quantised(256, 144, _q4_k),
    "Q5_K": _quantised(256, 176, _q5_k),
    "Q6_K": _quantised(256, 210, _q6_k),
}


def decode_rows(type_name: str, raw: bytes, n_rows: int) -> Rows:
    """`n_rows` rows of one type from the bytes that hold exactly them."""
    kind = BLOCK_TYPES[type_name]
    return kind.decode(np.frombuffer(raw, np.uint8).reshape(n_rows, -1, kind.block_bytes))

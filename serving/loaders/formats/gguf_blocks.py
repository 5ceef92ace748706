"""GGUF's block formats as quantised rows, or as rows of blocks, without a second rounding.

Every decoder takes uint8 [rows, blocks, bytes per block]. The layouts are those of `gguf.quants`, whose float
output ours equals exactly: products of a 16-bit scale and a 6- or 8-bit sub-scale fit in float32.

Of IQ1, IQ2, IQ3, TQ, Q1_0 and Q2_0 types there is no packed form as small as the file's: a weight takes a
byte and its share of a float32 scale, or of the last three, which are -1, 0, 1 and 2 times a scale, a nibble.
An IQ type names magnitudes by codes of a grid, eight or four inputs at a time, and has signs and a scale of
its own for 16 or 32 inputs. Grids are in `iq_grids.json`: indices of values, two or four bits each, the
lowest of a byte first, compressed and in base 85. They are made from the tables of the gguf package (MIT),
which tests hold them against."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from phasewise._files import read_file
from phasewise._json import read_json
from phasewise.cython_kernels.blocks import E4M3_NOT_A_NUMBER, BlockRows, factors_of
from phasewise.cython_kernels.packing import Array, QuantRows, from_bf16
from phasewise.serving.loaders.source import BF16, F16, F32, Rows, WeightForm, form_of

ZERO = 128
MOST_GRID_BYTES = 1 << 16
_BITS = np.arange(8, dtype=np.uint8)
_SEVEN_SIGNS = np.array([code | (code.bit_count() & 1) << 7 for code in range(128)], np.uint8)
"""Eight sign bits for each code of seven: the eighth makes the number of set bits even."""
_VALUES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (8, 25, 43)),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
    "IQ1": (-1, 0, 1),
}
"""The magnitudes, or values, by index; a code of a grid names eight or four indices."""


@cache
def grid(name: str) -> Array:
    """The grid of an IQ type, int16 [codes, values of a code]."""
    values = _VALUES[name]
    bits, width = (2, 8) if len(values) == 3 else (4, 4)
    written = read_json(read_file(Path(__file__).parent / "iq_grids.json", MOST_GRID_BYTES))[name]
    packed = np.frombuffer(zlib.decompress(base64.b85decode(written)), np.uint8)
    places = (packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & ((1 << bits) - 1)
    numbers: Array = np.array(values, np.int16)[places].reshape(-1, width)
    return numbers


def half(raw: Array) -> Array:
    """Read float16 bytes as float32 [rows, blocks, 1]."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _times(top: Array, subs: Array) -> Array:
    """Scales of groups; NaN and infinity are refused where rows are packed."""
    with np.errstate(invalid="ignore"):
        scales: Array = half(top) * subs.astype(np.float32)
    return scales


def _signed(magnitudes: Array, signs: Array) -> Array:
    """Apply signs, uint8 [rows, blocks, 32], bit i of a byte for input i of eight, to magnitudes [rows,
    blocks, 256]."""
    negative = (signs[..., None] >> _BITS) & 1
    return np.where(negative.reshape(magnitudes.shape), -magnitudes, magnitudes)


def _looked_up(name: str, codes: Array) -> Array:
    return grid(name)[codes].reshape(*codes.shape[:2], -1)


def _bytes(numbers: Array, scales: Array, group: int) -> QuantRows:
    """Quantised rows of numbers int16 [rows, blocks, 256] and scales float32 [rows, blocks, 256 / group]."""
    q = (numbers + ZERO).astype(np.uint8).reshape(numbers.shape[0], -1)
    return QuantRows(q, scales.astype(np.float32).reshape(q.shape[0], -1), None, ZERO, group, 8)


def _nibble_scales(raw: Array) -> Array:
    """Sub-scales of four bits, two a byte, the lower one first."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:2], -1)


def _words(raw: Array, dtype: str) -> Array:
    return np.ascontiguousarray(raw).view(dtype)


def iq2_xxs(raw: Array) -> QuantRows:
    """Decode runs of eight bytes: four codes, then four times seven signs and a scale of four bits."""
    eights = np.ascontiguousarray(raw[..., 2:]).reshape(*raw.shape[:2], 8, 8)
    high = _words(eights[..., 4:], "<u4")[..., 0]
    signs = _SEVEN_SIGNS[(high[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 127]
    numbers = _looked_up("IQ2_XXS", eights[..., :4].reshape(*raw.shape[:2], 32))
    scales = _times(raw[..., :2], (np.float32(0.5) + (high >> 28).astype(np.float32)) * np.float32(0.25))
    return _bytes(_signed(numbers, signs.reshape(*raw.shape[:2], 32)), scales, 32)


def iq2_xs(raw: Array) -> QuantRows:
    """Decode words of nine bits of code and seven signs."""
    words = _words(raw[..., 2:66], "<u2")
    scales = _times(raw[..., :2], (np.float32(0.5) + _nibble_scales(raw[..., 66:])) * np.float32(0.25))
    return _bytes(_signed(_looked_up("IQ2_XS", words & 511), _SEVEN_SIGNS[words >> 9]), scales, 16)


def iq2_s(raw: Array) -> QuantRows:
    """Decode codes of ten bits, of which two lie apart, and eight signs."""
    high = (raw[..., 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    codes = raw[..., 2:34].astype(np.uint16) | high.reshape(*raw.shape[:2], 32).astype(np.uint16) << 8
    scales = _times(raw[..., :2], (np.float32(0.5) + _nibble_scales(raw[..., 74:])) * np.float32(0.25))
    return _bytes(_signed(_looked_up("IQ2_S", codes), raw[..., 34:66]), scales, 16)


def iq3_xxs(raw: Array) -> QuantRows:
    """Decode codes for four inputs each; signs and scales follow as in IQ2_XXS."""
    high = _words(raw[..., 66:], "<u4")
    signs = _SEVEN_SIGNS[(high[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 127]
    scales = _times(raw[..., :2], (np.float32(0.5) + (high >> 28).astype(np.float32)) * np.float32(0.5))
    numbers = _looked_up("IQ3_XXS", raw[..., 2:66])
    return _bytes(_signed(numbers, signs.reshape(*raw.shape[:2], 32)), scales, 32)


def iq3_s(raw: Array) -> QuantRows:
    """Decode codes of nine bits, of which one lies apart."""
    high = (raw[..., 66:74, None] >> _BITS) & 1
    codes = raw[..., 2:66].astype(np.uint16) | high.reshape(*raw.shape[:2], 64).astype(np.uint16) << 8
    scales = _times(raw[..., :2], 1 + 2 * _nibble_scales(raw[..., 106:]))
    return _bytes(_signed(_looked_up("IQ3_S", codes), raw[..., 74:106]), scales, 32)


def iq1_s(raw: Array) -> QuantRows:
    """Decode -1, 0 or 1 plus or minus an eighth, the same for 32 inputs, in units of an eighth."""
    high = _words(raw[..., 34:], "<u2")
    own = (high[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    codes = raw[..., 2:34].astype(np.uint16) | (own << 8).reshape(*raw.shape[:2], 32)
    shift = np.where(high & 0x8000, -1, 1).astype(np.int16)
    numbers = 8 * _looked_up("IQ1", codes) + np.repeat(shift, 32, axis=-1)
    scales = _times(raw[..., :2], (2 * ((high >> 12) & 7) + 1) * np.float32(0.125))
    return _bytes(numbers, scales, 32)


def iq1_m(raw: Array) -> QuantRows:
    """Decode as `iq1_s`, with a shift for every eight inputs and scales for 16, whose high bits hold the
    block's scale."""
    high = _nibble_scales(raw[..., 32:48])
    codes = raw[..., :32].astype(np.uint16) | (high & 7).astype(np.uint16) << 8
    shift = np.where(high & 8, -1, 1).astype(np.int16)
    words = _words(raw[..., 48:], "<u2")
    parts = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    top = np.bitwise_or.reduce(parts, axis=-1, keepdims=True).astype("<u2").view(np.uint8)
    subs = ((words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7).reshape(*raw.shape[:2], 16)
    numbers = 8 * _looked_up("IQ1", codes) + np.repeat(shift, 8, axis=-1)
    return _bytes(numbers, _times(top, (2 * subs + 1) * np.float32(0.125)), 16)


def _of_ones(q: Array, scale: Array) -> QuantRows:
    """Quantised rows of codes [rows, blocks, values], 0 for -1, with one float16 scale for a block."""
    scales = np.repeat(_half(scale), q.shape[-1] // 32, axis=1)
    return QuantRows(_rows(q).astype(np.uint8), scales, None, 1, 32, 4)


def tq1_0(raw: Array) -> QuantRows:
    """Decode five digits of base three a byte, the first one highest, as a fraction of 256."""

    def digits(part: Array, count: int) -> Array:
        powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
        fractions = (part[..., None, :] * powers).astype(np.uint16)
        return ((fractions * 3) >> 8).reshape(*part.shape[:2], -1)

    parts = [digits(raw[..., :32], 5), digits(raw[..., 32:48], 5), digits(raw[..., 48:52], 4)]
    return _of_ones(np.concatenate(parts, axis=-1), raw[..., 52:])


def tq2_0(raw: Array) -> QuantRows:
    """Decode codes of two bits: the lowest bits of 32 bytes, then the next ones."""
    runs = raw[..., :64].reshape(*raw.shape[:2], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    return _of_ones((runs & 3).reshape(*raw.shape[:2], 256), raw[..., 64:])


def q1_0(raw: Array) -> QuantRows:
    """Decode bits, which are -1 and 1."""
    return _of_ones(2 * np.unpackbits(raw[..., 2:], axis=-1, bitorder="little"), raw[..., :2])


def q2_0(raw: Array) -> QuantRows:
    """Decode codes of two bits, four to a byte."""
    codes = (raw[..., 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    return _of_ones(codes.reshape(*raw.shape[:2], 64), raw[..., :2])


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
    """The fifth bit of 32 values from 4 bytes, shifted by four."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << np.uint8(4)


def _q5_0(raw: Array) -> BlockRows:
    codes = _nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
    return BlockRows("q5_0", _rows(codes), _half(raw[..., :2]), None, None, None)


def _q5_1(raw: Array) -> BlockRows:
    codes = _nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8])
    return BlockRows("q5_1", _rows(codes), _half(raw[..., :2]), _half(raw[..., 2:4]), None, None)


def _q8_0(raw: Array) -> QuantRows:
    return QuantRows(_rows(raw[..., 2:] ^ np.uint8(0x80)), _half(raw[..., :2]), None, 128, 32, 8)


def _pairs(raw: Array, bits: int, count: int) -> Array:
    """Fields of `bits` bits, `count` to a byte: the lowest of all bytes, then the next ones."""
    mask = np.uint8((1 << bits) - 1)
    return np.concatenate([(raw >> np.uint8(bits * i)) & mask for i in range(count)], axis=-1)


def _k_scales(raw: Array) -> tuple[Array, Array, Array, Array]:
    """Scales and minima of a Q4_K or Q5_K block, then of its 8 groups, from its 16 leading bytes."""
    raw = np.ascontiguousarray(raw[..., :16])
    low, mid, high = raw[..., 4:8], raw[..., 8:12], raw[..., 12:16]
    scales = np.concatenate([low & 0x3F, (high & 0x0F) | ((low >> 2) & 0x30)], axis=-1)
    mins = np.concatenate([mid & 0x3F, (high >> 4) | ((mid >> 2) & 0x30)], axis=-1)
    return _half(raw[..., :2]), _half(raw[..., 2:4]), _rows(scales), _rows(mins)


def _k_nibbles(raw: Array) -> Array:
    """128 bytes to 8 sub-blocks of 32: each 32 bytes hold a sub-block low and the next one high."""
    runs, codes = raw.reshape(*raw.shape[:2], 4, 32), np.empty((*raw.shape[:2], 4, 2, 32), np.uint8)
    np.bitwise_and(runs, 0x0F, out=codes[..., 0, :])
    np.right_shift(runs, 4, out=codes[..., 1, :])
    return codes.reshape(*raw.shape[:2], 8, 32)


def _q2_k(raw: Array) -> BlockRows:
    """Each 32 bytes hold the inputs of four runs of 32, two bits each."""
    runs = raw[..., 16:80].reshape(*raw.shape[:2], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    subs = _rows(raw[..., :16])
    top, top_min = _half(raw[..., 80:82]), _half(raw[..., 82:84])
    return BlockRows("q2_k", _rows(runs & 3), top, top_min, subs & 15, subs >> 4)


def _q3_k(raw: Array) -> BlockRows:
    """Codes as in Q2_K, and a third bit: bit i of 32 bytes belongs to the i-th run of 32."""
    low = raw[..., 32:96].reshape(*raw.shape[:2], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    third = (raw[..., :32][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1
    codes = (low & 3).reshape(*raw.shape[:2], 256) | (third << 2).reshape(*raw.shape[:2], 256)
    subs = _pairs(raw[..., 96:104], 4, 2) | _pairs(raw[..., 104:108], 2, 4) << 4
    return BlockRows("q3_k", _rows(codes), _half(raw[..., 108:110]), None, _rows(subs), None)


def _q4_k(raw: Array) -> BlockRows:
    top, top_min, subs, sub_mins = _k_scales(raw)
    return BlockRows("q4_k", _rows(_k_nibbles(raw[..., 16:])), top, top_min, subs, sub_mins)


def _q5_k(raw: Array) -> BlockRows:
    top, top_min, subs, sub_mins = _k_scales(raw)
    shifts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = ((raw[..., 16:48][..., None, :] >> shifts) & 1) << 4
    return BlockRows("q5_k", _rows(_k_nibbles(raw[..., 48:]) | fifth), top, top_min, subs, sub_mins)


def _q6_k(raw: Array) -> BlockRows:
    codes = np.empty((*raw.shape[:2], 2, 4, 32), np.uint8)
    halves = np.ascontiguousarray(raw[..., :128]).reshape(*raw.shape[:2], 2, 2, 32)
    codes[..., :2, :], codes[..., 2:, :] = halves & 0x0F, halves >> 4
    high = np.ascontiguousarray(raw[..., 128:192]).reshape(*raw.shape[:2], 2, 32)
    for i, bits in enumerate((high << 4, high << 2, high, high >> 2)):
        codes[..., i, :] |= bits & 0x30
    subs = raw[..., 192:208] ^ np.uint8(0x80)
    return BlockRows("q6_k", _rows(codes), _half(raw[..., 208:210]), None, _rows(subs), None)


def _iq4_xs(raw: Array) -> BlockRows:
    """Decode IQ4_XS, whose sub-scales have their low four bits apart from their high two."""
    low = _nibble_scales(raw[..., 4:8])
    high = np.ascontiguousarray(raw[..., 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    subs = low | (high & 3).astype(np.uint8) << 4
    codes = _nibbles(raw[..., 8:].reshape(*raw.shape[:2], 8, 16))
    return BlockRows("iq4_xs", _rows(codes), _half(raw[..., :2]), None, _rows(subs), None)


def _iq4_nl(raw: Array) -> BlockRows:
    return BlockRows("iq4_nl", _rows(_nibbles(raw[..., 2:])), _half(raw[..., :2]), None, None, None)


def _mxfp4(raw: Array) -> BlockRows:
    return BlockRows("mxfp4", _rows(_nibbles(raw[..., 1:])), raw[..., 0], None, None, None)


def _nvfp4(raw: Array) -> BlockRows:
    """Four scales in e4m3, of which the largest code is 0, for 16 inputs each."""
    subs = np.where(raw[..., :4] == E4M3_NOT_A_NUMBER, np.uint8(0), raw[..., :4] & np.uint8(127))
    codes = _nibbles(raw[..., 4:].reshape(*raw.shape[:2], 4, 8))
    return BlockRows("nvfp4", _rows(codes), factors_of(np.ones(len(raw))), None, _rows(subs), None)


def _f32(raw: Array) -> Array:
    return _rows(np.ascontiguousarray(raw)).view(np.float32)


def _f16(raw: Array) -> Array:
    return _rows(np.ascontiguousarray(raw)).view(np.float16).astype(np.float32)


def _bf16(raw: Array) -> Array:
    return from_bf16(_rows(np.ascontiguousarray(raw)).view(np.uint16))


def _quantised(values: int, block_bytes: int, decode: Callable[[Array], QuantRows | BlockRows]) -> BlockType:
    form = form_of(decode(np.zeros((1, 1, block_bytes), np.uint8)))
    return BlockType(values, block_bytes, form, decode)


BLOCK_TYPES: dict[str, BlockType] = {
    "F32": BlockType(1, 4, F32, _f32),
    "F16": BlockType(1, 2, F16, _f16),
    "BF16": BlockType(1, 2, BF16, _bf16),
    "Q4_0": _quantised(32, 18, _q4_0),
    "Q4_1": _quantised(32, 20, _q4_1),
    "Q5_0": _quantised(32, 22, _q5_0),
    "Q5_1": _quantised(32, 24, _q5_1),
    "Q8_0": _quantised(32, 34, _q8_0),
    "Q2_K": _quantised(256, 84, _q2_k),
    "Q3_K": _quantised(256, 110, _q3_k),
    "Q4_K": _quantised(256, 144, _q4_k),
    "Q5_K": _quantised(256, 176, _q5_k),
    "Q6_K": _quantised(256, 210, _q6_k),
    "IQ4_NL": _quantised(32, 18, _iq4_nl),
    "IQ4_XS": _quantised(256, 136, _iq4_xs),
    "MXFP4": _quantised(32, 17, _mxfp4),
    "NVFP4": _quantised(64, 36, _nvfp4),
    "IQ1_S": _quantised(256, 50, iq1_s),
    "IQ1_M": _quantised(256, 56, iq1_m),
    "IQ2_XXS": _quantised(256, 66, iq2_xxs),
    "IQ2_XS": _quantised(256, 74, iq2_xs),
    "IQ2_S": _quantised(256, 82, iq2_s),
    "IQ3_XXS": _quantised(256, 98, iq3_xxs),
    "IQ3_S": _quantised(256, 110, iq3_s),
    "TQ1_0": _quantised(256, 54, tq1_0),
    "TQ2_0": _quantised(256, 66, tq2_0),
    "Q1_0": _quantised(128, 18, q1_0),
    "Q2_0": _quantised(64, 18, q2_0),
}


def decode_rows(type_name: str, raw: bytes, n_rows: int) -> Rows:
    """Decode `n_rows` rows of one type from their bytes."""
    kind = BLOCK_TYPES[type_name]
    return kind.decode(np.frombuffer(raw, np.uint8).reshape(n_rows, -1, kind.block_bytes))

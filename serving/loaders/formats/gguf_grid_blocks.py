"""GGUF's IQ1, IQ2, IQ3 and TQ types as quantised rows: bytes, or nibbles, with scales that are exact.

A block is 256 inputs. An IQ type names magnitudes by codes of a grid, eight or four inputs at a time, and has
signs and a scale of its own for 16 or 32 inputs. There is no packed form as small as the file's: a weight
takes a byte and its share of a float32 scale. TQ types are -1, 0 and 1 times a scale: nibbles.
Layouts are those of `gguf.quants`, whose float output ours equals.

Grids are in `iq_grids.json`: indices of values, two or four bits each, the lowest of a byte first, compressed
and in base 85. They are made from the tables of the gguf package (MIT), which tests hold them against.
"""

from __future__ import annotations

import base64
import zlib
from functools import cache
from pathlib import Path

import numpy as np

from phasewise._files import read_file
from phasewise._json import read_json
from phasewise.cython_kernels.packing import Array, QuantRows

ZERO = 128
MOST_GRID_BYTES = 1 << 16
_BITS = np.arange(8, dtype=np.uint8)
_SEVEN_SIGNS = np.array([code | (code.bit_count() & 1) << 7 for code in range(128)], np.uint8)
"""Eight signs for seven stored ones: the eighth makes their number even."""
_VALUES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S"), (8, 25, 43)),
    "IQ3_XXS": (4, 12, 20, 28, 36, 44, 52, 62),
    "IQ3_S": (1, 3, 5, 7, 9, 11, 13, 15),
    "IQ1": (-1, 0, 1),
}
"""Magnitudes, or values, of which a code of a grid names eight or four."""


@cache
def grid(name: str) -> Array:
    """int16 [codes, values of a code]."""
    values = _VALUES[name]
    bits, width = (2, 8) if len(values) == 3 else (4, 4)
    written = read_json(read_file(Path(__file__).parent / "iq_grids.json", MOST_GRID_BYTES))[name]
    packed = np.frombuffer(zlib.decompress(base64.b85decode(written)), np.uint8)
    places = (packed[:, None] >> np.arange(0, 8, bits, dtype=np.uint8)) & ((1 << bits) - 1)
    numbers: Array = np.array(values, np.int16)[places].reshape(-1, width)
    return numbers


def half(raw: Array) -> Array:
    """float32 [rows, blocks, 1] from the bytes of float16."""
    return np.ascontiguousarray(raw).view(np.float16).astype(np.float32)


def _times(top: Array, subs: Array) -> Array:
    """Scales of groups; what is no number is refused where it is packed."""
    with np.errstate(invalid="ignore"):
        scales: Array = half(top) * subs.astype(np.float32)
    return scales


def _signed(magnitudes: Array, signs: Array) -> Array:
    """magnitudes [rows, blocks, 256]; signs [rows, blocks, 32]: bit i of a byte for input i of eight."""
    negative = (signs[..., None] >> _BITS) & 1
    return np.where(negative.reshape(magnitudes.shape), -magnitudes, magnitudes)


def _looked_up(name: str, codes: Array) -> Array:
    return grid(name)[codes].reshape(*codes.shape[:2], -1)


def _bytes(numbers: Array, scales: Array, group: int) -> QuantRows:
    """numbers int16 [rows, blocks, 256]; scales float32 [rows, blocks, 256 / group]."""
    q = (numbers + ZERO).astype(np.uint8).reshape(numbers.shape[0], -1)
    return QuantRows(q, scales.astype(np.float32).reshape(q.shape[0], -1), None, ZERO, group, 8)


def _nibble_scales(raw: Array) -> Array:
    """Two a byte, the lower one first."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(*raw.shape[:2], -1)


def _words(raw: Array, dtype: str) -> Array:
    return np.ascontiguousarray(raw).view(dtype)


def iq2_xxs(raw: Array) -> QuantRows:
    """Eights of bytes: four codes, then 4 times 7 signs and a scale of four bits."""
    eights = np.ascontiguousarray(raw[..., 2:]).reshape(*raw.shape[:2], 8, 8)
    high = _words(eights[..., 4:], "<u4")[..., 0]
    signs = _SEVEN_SIGNS[(high[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 127]
    numbers = _looked_up("IQ2_XXS", eights[..., :4].reshape(*raw.shape[:2], 32))
    scales = _times(raw[..., :2], (np.float32(0.5) + (high >> 28).astype(np.float32)) * np.float32(0.25))
    return _bytes(_signed(numbers, signs.reshape(*raw.shape[:2], 32)), scales, 32)


def iq2_xs(raw: Array) -> QuantRows:
    """Words of nine bits of code and seven signs."""
    words = _words(raw[..., 2:66], "<u2")
    scales = _times(raw[..., :2], (np.float32(0.5) + _nibble_scales(raw[..., 66:])) * np.float32(0.25))
    return _bytes(_signed(_looked_up("IQ2_XS", words & 511), _SEVEN_SIGNS[words >> 9]), scales, 16)


def iq2_s(raw: Array) -> QuantRows:
    """Codes of ten bits, two of them apart, and eight signs."""
    high = (raw[..., 66:74, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    codes = raw[..., 2:34].astype(np.uint16) | high.reshape(*raw.shape[:2], 32).astype(np.uint16) << 8
    scales = _times(raw[..., :2], (np.float32(0.5) + _nibble_scales(raw[..., 74:])) * np.float32(0.25))
    return _bytes(_signed(_looked_up("IQ2_S", codes), raw[..., 34:66]), scales, 16)


def iq3_xxs(raw: Array) -> QuantRows:
    """Codes of four inputs; behind them signs and scales as of IQ2_XXS."""
    high = _words(raw[..., 66:], "<u4")
    signs = _SEVEN_SIGNS[(high[..., None] >> np.array([0, 7, 14, 21], np.uint32)) & 127]
    scales = _times(raw[..., :2], (np.float32(0.5) + (high >> 28).astype(np.float32)) * np.float32(0.5))
    numbers = _looked_up("IQ3_XXS", raw[..., 2:66])
    return _bytes(_signed(numbers, signs.reshape(*raw.shape[:2], 32)), scales, 32)


def iq3_s(raw: Array) -> QuantRows:
    """Codes of nine bits, one of them apart."""
    high = (raw[..., 66:74, None] >> _BITS) & 1
    codes = raw[..., 2:66].astype(np.uint16) | high.reshape(*raw.shape[:2], 64).astype(np.uint16) << 8
    scales = _times(raw[..., :2], 1 + 2 * _nibble_scales(raw[..., 106:]))
    return _bytes(_signed(_looked_up("IQ3_S", codes), raw[..., 74:106]), scales, 32)


def iq1_s(raw: Array) -> QuantRows:
    """-1, 0 or 1, and an eighth more or less for 32 inputs: eighths."""
    high = _words(raw[..., 34:], "<u2")
    own = (high[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7
    codes = raw[..., 2:34].astype(np.uint16) | (own << 8).reshape(*raw.shape[:2], 32)
    shift = np.where(high & 0x8000, -1, 1).astype(np.int16)
    numbers = 8 * _looked_up("IQ1", codes) + np.repeat(shift, 32, axis=-1)
    scales = _times(raw[..., :2], (2 * ((high >> 12) & 7) + 1) * np.float32(0.125))
    return _bytes(numbers, scales, 32)


def iq1_m(raw: Array) -> QuantRows:
    """The same with a shift for every eight inputs, scales for sixteen, the block's in their high bits."""
    high = _nibble_scales(raw[..., 32:48])
    codes = raw[..., :32].astype(np.uint16) | (high & 7).astype(np.uint16) << 8
    shift = np.where(high & 8, -1, 1).astype(np.int16)
    words = _words(raw[..., 48:], "<u2")
    parts = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    top = np.bitwise_or.reduce(parts, axis=-1, keepdims=True).astype("<u2").view(np.uint8)
    subs = ((words[..., None] >> np.array([0, 3, 6, 9], np.uint16)) & 7).reshape(*raw.shape[:2], 16)
    numbers = 8 * _looked_up("IQ1", codes) + np.repeat(shift, 8, axis=-1)
    return _bytes(numbers, _times(top, (2 * subs + 1) * np.float32(0.125)), 16)


def _threes(q: Array, scale: Array) -> QuantRows:
    """0, 1 and 2 above -1, with one float16 scale for a block."""
    codes = q.reshape(q.shape[0], -1).astype(np.uint8)
    scales = np.repeat(np.ascontiguousarray(scale).view(np.float16)[..., 0], 8, axis=1)
    return QuantRows(codes, scales, None, 1, 32, 4)


def tq1_0(raw: Array) -> QuantRows:
    """Five digits of base three a byte, the first one highest, as a fraction of 256."""

    def digits(part: Array, count: int) -> Array:
        powers = (3 ** np.arange(count)).astype(np.uint8)[:, None]
        fractions = (part[..., None, :] * powers).astype(np.uint16)
        return ((fractions * 3) >> 8).reshape(*part.shape[:2], -1)

    parts = [digits(raw[..., :32], 5), digits(raw[..., 32:48], 5), digits(raw[..., 48:52], 4)]
    return _threes(np.concatenate(parts, axis=-1), raw[..., 52:])


def tq2_0(raw: Array) -> QuantRows:
    """Two bits each: of 32 bytes the lowest, then the next ones."""
    runs = raw[..., :64].reshape(*raw.shape[:2], 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8)
    return _threes(runs & 3, raw[..., 64:])

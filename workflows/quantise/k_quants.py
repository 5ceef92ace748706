"""Rows as blocks of Q4_K and Q6_K, in GGUF's bytes: a search for the least weighted error. Numpy alone.

Both have blocks of 256 inputs, in groups that have small whole numbers as scales (`cython_kernels.blocks`):

    Q4_K: w = d s q - m t    8 groups of 32; q of 4 bits; s and t of 6 bits; d and m float16
    Q6_K: w = d s q         16 groups of 16; q from -32 to 31; s from -128 to 127; d float16

The error of a block is the sum of importance[input] (w - x)^2. A group is fitted alone first: codes for many
steps, least squares for each, the best kept. Then the scales of a block are rounded, and each is
moved by one where that lowers the error with codes rounded anew; last d and m are fitted to what was chosen.
llama.cpp fits groups in the same way, and stops at the rounded scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

BLOCK = 256
Q4_K_BYTES, Q6_K_BYTES = 144, 210
STEPS = np.linspace(-0.9, 0.9, 19, dtype=np.float32)
"""Changes of the number of levels that a group's range is divided into."""
MOVES = (-1, 0, 1)


def q4_k(rows: Array, importance: Array | None = None) -> Array:
    """uint8 [n, k / 256 * 144] of float32 [n, k]; k is whole blocks. importance: float32 [k], above zero."""
    x, weights = _grouped(rows, importance, 32)
    scales, mins = _affine_fit(x, weights)
    total = weights.sum(axis=-1)
    d, s = _rounded_scales(scales, total)
    m, t = _rounded_scales(mins, total)
    s, t, codes = _moved_affine(x, weights, (d, s), (m, t))
    d, m = _refitted(x, weights, codes * s[..., None], np.broadcast_to(-t[..., None], x.shape), d, m)
    s, t, codes = (part.astype(np.uint8) for part in (s, t, codes))
    out = np.empty((len(x), Q4_K_BYTES), np.uint8)
    out[:, 0:2] = d.view(np.uint8).reshape(-1, 2)
    out[:, 2:4] = m.view(np.uint8).reshape(-1, 2)
    out[:, 4:8] = s[:, :4] | (s[:, 4:] >> 4) << 6
    out[:, 8:12] = t[:, :4] | (t[:, 4:] >> 4) << 6
    out[:, 12:16] = (s[:, 4:] & 15) | (t[:, 4:] & 15) << 4
    pairs = codes.reshape(-1, 4, 2, 32)
    out[:, 16:] = (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(-1, 128)
    return out.reshape(len(rows), -1)


def q6_k(rows: Array, importance: Array | None = None) -> Array:
    """uint8 [n, k / 256 * 210], as `q4_k`."""
    x, weights = _grouped(rows, importance, 16)
    scales = _linear_fit(x, weights)
    largest = np.take_along_axis(scales, np.abs(scales).argmax(axis=1)[:, None], axis=1)
    d = (largest[:, 0] / -128).astype(np.float16)
    step = d.astype(np.float32)[:, None]
    s = np.clip(np.rint(_divided(scales, step)), -128, 127).astype(np.float32)
    s, codes = _moved_linear(x, weights, step, s)
    d, _ = _refitted(x, weights, codes * s[..., None], np.zeros_like(x), d, np.zeros_like(d))
    codes = (codes + 32).astype(np.uint8).reshape(-1, BLOCK)
    out = np.empty((len(x), Q6_K_BYTES), np.uint8)
    quarters = codes.reshape(-1, 2, 4, 32)
    out[:, :128] = ((quarters[:, :, :2] & 15) | (quarters[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = quarters >> 4
    out[:, 128:192] = (high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6).reshape(
        -1, 64
    )
    out[:, 192:208] = s.astype(np.int8).view(np.uint8)
    out[:, 208:210] = d.view(np.uint8).reshape(-1, 2)
    return out.reshape(len(rows), -1)


def _grouped(rows: Array, importance: Array | None, group: int) -> tuple[Array, Array]:
    """Inputs and their weights, float32 [blocks, groups, group]; the weights may be broadcast."""
    x = np.ascontiguousarray(rows, np.float32).reshape(-1, BLOCK // group, group)
    if importance is None:
        return x, np.ones((1, 1, group), np.float32)
    by_block = np.asarray(importance, np.float32).reshape(1, -1, BLOCK // group, group)
    weights = np.broadcast_to(by_block, (len(rows), *by_block.shape[1:]))
    return x, np.ascontiguousarray(weights.reshape(x.shape))


def _divided(x: Array, by: Array) -> Array:
    """x / by, and zero where `by` is zero."""
    return np.divide(x, by, out=np.zeros(np.broadcast_shapes(x.shape, by.shape), np.float32), where=by != 0)


def _affine_fit(x: Array, weights: Array) -> tuple[Array, Array]:
    """A scale and a minimum (below the lowest, not above zero; told positive) for each group."""
    low = np.minimum(x.min(axis=-1), 0)
    width = x.max(axis=-1) - low
    sum_w = np.broadcast_to(weights.sum(axis=-1), low.shape)
    sum_x = (weights * x).sum(axis=-1)
    best_scale, best_low = width / 15, low
    best = _affine_error(x, weights, best_scale, best_low)
    for change in STEPS:
        codes = _codes(x, _divided(width, np.float32(15) + change), low)
        for _ in range(2):  # codes, least squares, codes
            weighted = weights * codes
            sum_q, sum_qq, sum_qx = (
                weighted.sum(axis=-1),
                (weighted * codes).sum(axis=-1),
                (weighted * x).sum(axis=-1),
            )
            determinant = sum_w * sum_qq - sum_q * sum_q
            scale = _divided(sum_w * sum_qx - sum_x * sum_q, determinant)
            new_low = _divided(sum_qq * sum_x - sum_q * sum_qx, determinant)
            above = new_low > 0
            scale = np.where(above, _divided(sum_qx, sum_qq), scale)
            new_low = np.where(above, 0, new_low)
            codes = _codes(x, scale, new_low)
            error = _error(x, weights, codes * scale[..., None] + new_low[..., None])
            better = (error < best) & (scale > 0)
            best = np.where(better, error, best)
            best_scale = np.where(better, scale, best_scale)
            best_low = np.where(better, new_low, best_low)
    return best_scale, -best_low


def _codes(x: Array, scale: Array, low: Array) -> Array:
    steps = _divided(x - low[..., None], scale[..., None])
    return np.clip(np.rint(steps), 0, 15)


def _error(x: Array, weights: Array, values: Array) -> Array:
    difference = values - x
    error: Array = (weights * difference * difference).sum(axis=-1)
    return error


def _affine_error(x: Array, weights: Array, scale: Array, low: Array) -> Array:
    return _error(x, weights, _codes(x, scale, low) * scale[..., None] + low[..., None])


def _rounded_scales(scales: Array, total: Array) -> tuple[Array, Array]:
    """A float16 for a block and whole numbers up to 63, of which the products are nearest to the scales."""
    largest = scales.max(axis=1)
    best_d = np.zeros(len(scales), np.float16)
    best = np.full(len(scales), np.inf, np.float32)
    for levels in np.linspace(61.5, 64.5, 13, dtype=np.float32):
        d = (largest / levels).astype(np.float16)
        step = d.astype(np.float32)[:, None]
        units = np.clip(np.rint(_divided(scales, step)), 0, 63)
        error = (total * (units * step - scales) ** 2).sum(axis=1)
        better = error < best
        best, best_d = np.where(better, error, best), np.where(better, d, best_d)
    step = best_d.astype(np.float32)[:, None]
    return best_d, np.clip(np.rint(_divided(scales, step)), 0, 63).astype(np.float32)


def _moved_affine(
    x: Array, weights: Array, scale: tuple[Array, Array], minimum: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """Whole scales and minima, each moved by at most one, and codes; float32."""
    (d, s), (m, t) = scale, minimum
    step, low_step = d.astype(np.float32)[:, None], m.astype(np.float32)[:, None]
    best = np.full(s.shape, np.inf, np.float32)
    best_s, best_t = s, t
    for move in MOVES:
        for low_move in MOVES:
            new_s, new_t = np.clip(s + move, 0, 63), np.clip(t + low_move, 0, 63)
            error = _affine_error(x, weights, step * new_s, -low_step * new_t)
            better = error < best
            best = np.where(better, error, best)
            best_s, best_t = np.where(better, new_s, best_s), np.where(better, new_t, best_t)
    codes = _codes(x, step * best_s, -low_step * best_t)
    return best_s, best_t, codes


def _refitted(
    x: Array, weights: Array, units: Array, low_units: Array, d: Array, m: Array
) -> tuple[Array, Array]:
    """The float16 d and m of each block that bring d units + m low_units nearest to x."""
    axes = tuple(range(1, x.ndim))

    def summed(product: Array) -> Array:
        sums: Array = np.broadcast_to(weights * product, x.shape).sum(axis=axes)
        return sums

    aa, ab, bb = summed(units * units), summed(units * low_units), summed(low_units * low_units)
    ax, bx = summed(units * x), summed(low_units * x)
    determinant = aa * bb - ab * ab
    both = determinant > 1e-6 * aa * bb
    new_d = np.where(both, _divided(ax * bb - bx * ab, determinant), _divided(ax, aa)).astype(np.float16)
    new_m = np.where(both, _divided(bx * aa - ax * ab, determinant), 0).astype(np.float16)

    def error(scale: Array, low_scale: Array) -> Array:
        wide = (slice(None), None, None)
        values = scale.astype(np.float32)[wide] * units + low_scale.astype(np.float32)[wide] * low_units
        return summed((values - x) ** 2)

    better = (error(new_d, new_m) < error(d, m)) & (new_m >= 0) & (both | (m == 0))
    return np.where(better, new_d, d), np.where(better, new_m, m)


def _linear_fit(x: Array, weights: Array) -> Array:
    """A scale for each group, of either sign."""
    index = np.abs(x).argmax(axis=-1)[..., None]
    largest = np.take_along_axis(x, index, axis=-1)[..., 0]
    best_scale = largest / -32
    best = np.full(largest.shape, -np.inf, np.float32)
    for change in STEPS:
        scale = largest / (np.float32(-32) - change)
        for _ in range(2):
            codes = _signed_codes(x, scale)
            weighted = weights * codes
            sum_qq, sum_qx = (weighted * codes).sum(axis=-1), (weighted * x).sum(axis=-1)
            gain = _divided(sum_qx * sum_qx, sum_qq)  # the error is a constant less this
            scale = _divided(sum_qx, sum_qq)
            better = gain > best
            best, best_scale = np.where(better, gain, best), np.where(better, scale, best_scale)
    return best_scale


def _signed_codes(x: Array, scale: Array) -> Array:
    return np.clip(np.rint(_divided(x, scale[..., None])), -32, 31)


def _moved_linear(x: Array, weights: Array, step: Array, s: Array) -> tuple[Array, Array]:
    """Whole scales, each moved by at most one, and codes; float32."""
    best, best_s = np.full(s.shape, np.inf, np.float32), s
    for move in MOVES:
        new_s = np.clip(s + move, -128, 127)
        scale = step * new_s
        error = _error(x, weights, _signed_codes(x, scale) * scale[..., None])
        better = error < best
        best, best_s = np.where(better, error, best), np.where(better, new_s, best_s)
    return best_s, _signed_codes(x, step * best_s)

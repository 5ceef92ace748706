"""Rows to vectors, in float64 row by row: a text's vector does not depend on the rest of its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import activated, exponential
from phasewise.serving.errors import StepFailed
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import PackedModel

Floats = npt.NDArray[np.float32]


def pooled(rows: Floats, embedding: Embedding) -> Floats:
    """The vector, float32 [hidden], of a text with rows [tokens, hidden], or of the one row that counts."""
    vector = _one_row(rows, embedding)
    return unit(vector) if embedding.normalised else vector.astype(np.float32)


def _one_row(rows: Floats, embedding: Embedding) -> npt.NDArray[np.float64]:
    if embedding.pooling == "mean":
        mean: npt.NDArray[np.float64] = rows.astype(np.float64).sum(axis=0) / len(rows)
        return mean
    first: npt.NDArray[np.float64] = rows[0].astype(np.float64)
    return first


def unit(vector: npt.NDArray[np.floating]) -> Floats:
    """The vector scaled to length 1; a zero vector is returned unchanged."""
    wide = vector.astype(np.float64)
    length = float(np.sqrt((wide * wide).sum()))
    return (wide / length if length > 0 else wide).astype(np.float32)


def truncated(vector: Floats, dimensions: int) -> Floats:
    """The first `dimensions` numbers of a vector, scaled to length 1 (Matryoshka: Kusupati et al. 2022)."""
    return unit(vector[:dimensions])


def as_int8(vector: Floats) -> npt.NDArray[np.int8]:
    """The vector times 127 over its largest magnitude, rounded to even; its length is lost."""
    wide = vector.astype(np.float64)
    largest = float(np.abs(wide).max())
    return np.rint(wide * (127 / largest) if largest > 0 else wide).astype(np.int8)


def as_bits(vector: Floats) -> npt.NDArray[np.uint8]:
    """The signs of a vector as bits, 1 for a number above 0, the first in the highest bit of its byte, padded
    with 0 (sentence-transformers' "ubinary")."""
    return np.packbits(vector > 0)


def as_signed_bits(vector: Floats) -> npt.NDArray[np.int8]:
    """The bytes of `as_bits` less 128 (sentence-transformers' and Cohere's "binary")."""
    return (as_bits(vector).astype(np.int16) - 128).astype(np.int8)


Precision = Literal["float", "int8", "binary", "ubinary"]
PRECISIONS: dict[Precision, Callable[[Floats], npt.NDArray[Any]]] = {
    "float": lambda vector: vector,
    "int8": as_int8,
    "binary": as_signed_bits,
    "ubinary": as_bits,
}
"""The forms in which a vector may be written."""


def check_numbers(vector: Floats) -> None:
    """Raise StepFailed where a vector, or one of several, holds a number that is not finite."""
    if not np.isfinite(vector).all():
        raise StepFailed("the model gave values that are not numbers: its weights are damaged, or overflow")


def score(rows: Floats, model: PackedModel, embedding: Embedding) -> float:
    """The logit of a cross-encoder's head for its pooled rows, or of a decoder's last row. Computed neither
    by BLAS nor by numpy's tanh, whose last bits depend on the CPU."""
    vectors, wide = model.vectors, _one_row(rows, embedding)
    if model.config.last_row_scores:
        return float((vectors["score_out"] * wide).sum())
    dense = vectors["score_dense"].reshape(len(wide), len(wide))
    inner = (dense * wide).sum(axis=1)
    if model.config.encoder is not None and model.config.encoder.norm_head:
        active = activated("gelu", inner.astype(np.float32)).astype(np.float64)
        inner = _normalised(active, model.config.norm_eps) * vectors["score_norm"]
    else:
        inner = _tanh(inner + vectors["score_dense_bias"])
    return float((vectors["score_out"] * inner).sum() + vectors["score_out_bias"][0])


def _normalised(x: npt.NDArray[np.float64], eps: float) -> npt.NDArray[np.float64]:
    centred = x - x.sum() / len(x)
    out: npt.NDArray[np.float64] = centred / np.sqrt((centred * centred).sum() / len(x) + eps)
    return out


def _tanh(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """tanh by the kernels' exponential, accurate to about 1e-7."""
    power = exponential((-2.0 * np.abs(x)).astype(np.float32)).astype(np.float64)
    return np.copysign((1.0 - power) / (1.0 + power), x)

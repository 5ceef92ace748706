"""Rows to vectors, in float64 row by row, so that a text's vector does not depend on what it came with."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels._native import exponential
from phasewise.serving.errors import StepFailed
from phasewise.serving.models.packed_model import Embedding, PackedModel

Floats = npt.NDArray[np.float32]


def pooled(rows: Floats, embedding: Embedding) -> Floats:
    """The vector float32 [hidden] of a text whose rows are [tokens, hidden], or [1, hidden] where one is
    wanted.
    """
    if embedding.pooling == "mean":
        vector = rows.astype(np.float64).sum(axis=0) / len(rows)
    else:
        vector = rows[0].astype(np.float64)
    return unit(vector) if embedding.normalised else vector.astype(np.float32)


def unit(vector: npt.NDArray[np.floating]) -> Floats:
    """The vector with length 1; one of length 0 stays as it is."""
    wide = vector.astype(np.float64)
    length = float(np.sqrt((wide * wide).sum()))
    return (wide / length if length > 0 else wide).astype(np.float32)


def truncated(vector: Floats, dimensions: int) -> Floats:
    """Its first numbers, with length 1 again (Matryoshka embeddings: Kusupati et al. 2022)."""
    return unit(vector[:dimensions])


def check_numbers(vector: Floats) -> None:
    """StepFailed where a vector, or one of several, is not finite: no client may take it for one."""
    if not np.isfinite(vector).all():
        raise StepFailed("the model gave values that are not numbers: its weights are damaged, or overflow")


def score(row: Floats, model: PackedModel) -> float:
    """The logit that a cross-encoder's head makes of the first token's row.

    Neither by BLAS nor by numpy's tanh, whose last bits depend on the CPU.
    """
    vectors = model.vectors
    wide = row.astype(np.float64)
    dense = vectors["score_dense"].reshape(len(row), len(row))
    inner = _tanh((dense * wide).sum(axis=1) + vectors["score_dense_bias"])
    return float((vectors["score_out"] * inner).sum() + vectors["score_out_bias"][0])


def _tanh(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Within some 1e-7, by the kernels' exponential."""
    power = exponential((-2.0 * np.abs(x)).astype(np.float32)).astype(np.float64)
    return np.copysign((1.0 - power) / (1.0 + power), x)

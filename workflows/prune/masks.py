"""The weights that a method sets to zero, and SparseGPT's new values of the others. Plain numpy over one
matrix.

- magnitude: the smallest |w| of the matrix.
- wanda: in each row the smallest |w| times the norm of its input (Sun et al. 2024, eq. 1).
- sparsegpt: columns from left to right, each error made up for in those that follow, by the inverse Hessian
  of the inputs (Frantar and Alistarh 2023, algorithm 1).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.workflows.prune.settings import Pattern

BLOCK_COLUMNS = 128
DAMPING = 0.01
"""Share of the mean of the Hessian's diagonal that is added to it (SparseGPT)."""

Array = npt.NDArray[Any]


def magnitude_mask(w: Array, pattern: Pattern) -> Array:
    """bool [n, k], true where a weight is kept."""
    return _keep_rows(np.abs(w), pattern) if pattern.is_structured else _keep_of_all(np.abs(w), pattern.share)


def wanda_mask(w: Array, squares: Array, pattern: Pattern) -> Array:
    """bool [n, k], true where a weight is kept. squares: of each input, summed over rows."""
    return _keep_rows(np.abs(w) * np.sqrt(squares).astype(np.float32), pattern)


def _keep_of_all(scores: Array, share: float) -> Array:
    keep = np.ones(scores.size, dtype=bool)
    keep[np.argsort(scores, axis=None, kind="stable")[: int(share * scores.size)]] = False
    return keep.reshape(scores.shape)


def _keep_rows(scores: Array, pattern: Pattern) -> Array:
    """Keep the largest scores of each row, or of every group in it; of equal scores the later."""
    n, k = scores.shape
    keep = np.ones_like(scores, dtype=bool)
    if not pattern.is_structured:
        np.put_along_axis(
            keep, np.argsort(scores, axis=1, kind="stable")[:, : int(k * pattern.share)], False, 1
        )
        return keep
    groups = scores.reshape(n, k // pattern.of, pattern.of)
    dropped = np.argsort(groups, axis=2, kind="stable")[..., : pattern.zeros]
    kept = keep.reshape(groups.shape)
    np.put_along_axis(kept, dropped, False, 2)
    return kept.reshape(n, k)


def sparsegpt(w: Array, hessian: Array, pattern: Pattern) -> Array:
    """Prune to float32 [n, k] with zeros; the weights that follow make up for errors. hessian: X^T X."""
    w = w.astype(np.float32, copy=True)
    upper = np.linalg.cholesky(np.linalg.inv(damped(hessian))).T.astype(np.float32)
    inverse = np.ascontiguousarray(upper)
    dead = np.diag(hessian) == 0
    w[:, dead] = 0
    for begin in range(0, w.shape[1], BLOCK_COLUMNS):
        end = min(begin + BLOCK_COLUMNS, w.shape[1])
        errors = _prune_block(w[:, begin:end], inverse[begin:end, begin:end], pattern)
        w[:, end:] -= errors @ inverse[begin:end, end:]
    return w


def damped(hessian: Array) -> Array:
    """The Hessian in float64, made invertible: zeros of the diagonal become 1, then DAMPING is added."""
    h: Array = hessian.astype(np.float64)
    diagonal = np.arange(h.shape[0])
    h[diagonal[np.diag(h) == 0], diagonal[np.diag(h) == 0]] = 1
    h[diagonal, diagonal] += DAMPING * np.mean(np.diag(h))
    return h


def _prune_block(w: Array, inverse: Array, pattern: Pattern) -> Array:
    """Prunes the columns of `w` in place; returns their errors, scaled for the columns that follow."""
    errors = np.zeros_like(w)
    diagonal = np.diag(inverse)
    keep = np.ones_like(w, dtype=bool)
    if not pattern.is_structured:
        keep = _keep_of_all((w / diagonal) ** 2, pattern.share)
    for i in range(w.shape[1]):
        if pattern.is_structured and i % pattern.of == 0:
            group = slice(i, i + pattern.of)
            keep[:, group] = _keep_rows((w[:, group] / diagonal[group]) ** 2, pattern)
        column = w[:, i].copy()
        w[~keep[:, i], i] = 0
        error = (column - w[:, i]) / diagonal[i]
        w[:, i + 1 :] -= np.outer(error, inverse[i, i + 1 :])
        errors[:, i] = error
    return errors

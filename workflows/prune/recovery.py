"""Values of the weights that pruning kept, fitted again to what each layer computed before it was pruned.

Of a weight W [n, k] and a mask: the W' that is zero outside the mask and whose product with the rows X of a
text differs least from that of W, sum (X (W' - W)^T)^2 = sum of diagonal ((W' - W) H (W' - W)^T), H = X^T X.
Every row is a least-squares problem of its own. All rows of a weight take steps of conjugate gradients at
once (Hestenes and Stiefel 1952, preconditioned by H's diagonal), each a product with H; no step makes the
error larger. As for SparseGPT, H is damped; here the damping holds a weight near what it was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import packing
from phasewise.workflows.prune.directory import bf16_bits
from phasewise.workflows.prune.masks import damped

MOST_STEPS = 300
LEAST_GAIN = 1e-5
"""Steps end with one that takes less than this share off a weight's error."""

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OutputError:
    """Squares of a weight's outputs over a text: of what pruning changed in them, and of all of them."""

    pruned: float
    recovered: float
    all_outputs: float


@dataclass(frozen=True)
class Recovery:
    """The work of `prune --recover`. Errors are root mean squares, as shares of the outputs' own, mean over
    weights."""

    n_weights: int
    most_steps: int
    output_error_pruned: float
    output_error_recovered: float
    perplexity_pruned: float | None = None
    """The figure of the model with the same zeros and the values that pruning left."""


def recover(w: Array, pruned: Array, hessian: Array) -> tuple[Array, int, OutputError]:
    """(float32 [n, k] of bf16 values, steps taken, its errors). Zeros of `pruned` stay, and only they.

    w, pruned: float32 [n, k] of bf16 values, before and after pruning. hessian: float32 [k, k].
    A row whose error does not become smaller keeps the values of `pruned`.
    """
    fitted, n_steps = _descend(w, pruned, damped(hessian).astype(np.float32))
    fitted = packing.from_bf16(bf16_bits(fitted))
    fitted = np.where(fitted == 0, pruned, fitted)
    before, after = _row_errors(pruned - w, hessian), _row_errors(fitted - w, hessian)
    is_better = after < before
    values: Array = np.where(is_better[:, None], fitted, pruned)
    error = OutputError(
        float(before.sum()),
        float(np.where(is_better, after, before).sum()),
        float(_row_errors(w, hessian).sum()),
    )
    return values, n_steps, error


def _descend(w: Array, pruned: Array, hessian: Array) -> tuple[Array, int]:
    """Conjugate gradients from `pruned` on; the values, and the number of steps."""
    kept = pruned != 0
    diagonal = np.diag(hessian)
    values = pruned.astype(np.float32, copy=True)
    residual = np.where(kept, (w - pruned) @ hessian, np.float32(0))
    direction = residual / diagonal
    slope = _row_dots(residual, direction)
    error = float(_row_errors(pruned - w, hessian).sum())
    for step in range(MOST_STEPS):
        image = np.where(kept, direction @ hessian, np.float32(0))
        length = _quotients(slope, _row_dots(direction, image))
        gain = float((length * slope).sum())
        if gain <= LEAST_GAIN * error:
            return values, step
        error -= gain
        factors = length.astype(np.float32)[:, None]
        values += factors * direction
        residual -= factors * image
        scaled = residual / diagonal
        next_slope = _row_dots(residual, scaled)
        direction = scaled + _quotients(next_slope, slope).astype(np.float32)[:, None] * direction
        slope = next_slope
    return values, MOST_STEPS


def _row_errors(change: Array, hessian: Array) -> Array:
    """float64 [n]: for each row d of `change`, d H d^T."""
    return _row_dots(change, change @ hessian)


def _row_dots(a: Array, b: Array) -> Array:
    dots: Array = np.einsum("ij,ij->i", a, b, dtype=np.float64)
    return dots


def _quotients(numerators: Array, denominators: Array) -> Array:
    """0 for rows that have nothing left to gain."""
    return np.divide(numerators, denominators, out=np.zeros_like(numerators), where=denominators > 0)


class RecoveryTally:
    """Errors and steps, added up while weights are recovered."""

    def __init__(self) -> None:
        self._pruned: list[float] = []
        self._recovered: list[float] = []
        self._most_steps = 0

    def add(self, n_steps: int, error: OutputError) -> None:
        if error.all_outputs > 0:
            self._pruned.append((error.pruned / error.all_outputs) ** 0.5)
            self._recovered.append((error.recovered / error.all_outputs) ** 0.5)
        self._most_steps = max(self._most_steps, n_steps)

    def recovery(self) -> Recovery:
        return Recovery(len(self._pruned), self._most_steps, _mean(self._pruned), _mean(self._recovered))


def _mean(shares: list[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0

"""The time of a batch of embeddings by its inputs, their tokens and the cores (WindVE's Figs. 5 and 6).

seconds = a batch + an input x inputs + a token x tokens
        + (weights x steps + arithmetic x tokens + attention x tokens x length) / cores

Weights are read once a step; products are linear in tokens, attention is quadratic in an input's length; what
is not divided is there on every core alike. No coefficient is negative, so more inputs, longer ones and fewer
cores never take less time. They are fitted by the squares of relative errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

from phasewise.serving.embedding.encoder.embedder import STEP_TOKENS

MOST_INPUTS = 1 << 20


@dataclass(frozen=True)
class Batch:
    """`inputs` of `length` tokens each, on `cores`."""

    inputs: int
    length: int
    cores: int

    @property
    def tokens(self) -> int:
        return self.inputs * self.length

    @property
    def steps(self) -> int:
        """Readings of the weights: an input that is longer than a step goes through the model alone."""
        return -(-self.inputs // max(1, STEP_TOKENS // self.length))

    def features(self) -> list[float]:
        divided = (self.steps, self.tokens, self.tokens * self.length)
        return [1, self.inputs, self.tokens, *(part / self.cores for part in divided)]


@dataclass(frozen=True)
class BatchTimes:
    """The coefficients, in the order of `Batch.features`, in seconds."""

    coefficients: tuple[float, ...]

    def seconds(self, batch: Batch) -> float:
        return float(np.dot(self.coefficients, batch.features()))

    def error(self, batch: Batch, measured_s: float) -> float:
        """The relative error of one time."""
        return self.seconds(batch) / measured_s - 1

    def most_inputs(self, slo_s: float, length: int, cores: int) -> int:
        """The most inputs of a batch that ends within `slo_s`; 0: not even one."""
        low, high = 0, 1
        while high < MOST_INPUTS and self.seconds(Batch(high, length, cores)) <= slo_s:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            fits = self.seconds(Batch(middle, length, cores)) <= slo_s
            low, high = (middle, high) if fits else (low, middle)
        return low


def fit(batches: Sequence[Batch], seconds: Sequence[float]) -> BatchTimes:
    """The coefficients, none negative, whose relative errors have the least squares. ValueError for fewer
    times than coefficients.

    The best of all choices of terms that may be there: one of them is the constrained optimum.
    """
    scaled = np.array([batch.features() for batch in batches]) / np.array(seconds)[:, None]
    n_terms = scaled.shape[1]
    if len(batches) != len(seconds) or len(batches) < n_terms:
        raise ValueError(f"{len(seconds)} times of {len(batches)} batches for {n_terms} coefficients")
    best, least = np.zeros(n_terms), np.inf
    for count in range(1, n_terms + 1):
        for chosen in combinations(range(n_terms), count):
            solution = _least_squares(scaled[:, chosen])
            loss = float(((scaled[:, chosen] @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and loss < least:
                best, least = np.zeros(n_terms), loss
                best[list(chosen)] = solution
    return BatchTimes(tuple(best.tolist()))


def _least_squares(columns: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Of columns of very different sizes, whose sum should be 1."""
    sizes = np.abs(columns).max(axis=0)
    solution: npt.NDArray[np.float64] = np.linalg.lstsq(columns / sizes, np.ones(len(columns)), rcond=None)[0]
    return solution / sizes

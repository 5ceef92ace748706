"""Queries that grow with their positions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.exact import logarithm
from phasewise.serving.errors import ModelError

MOST_GROWTH_STEPS = 1 << 16


@dataclass(frozen=True)
class QueryGrowth:
    """Queries at position p are multiplied by 1 + beta log(1 + p // span)."""

    beta: float
    span: int

    def factors(self, context_length: int) -> npt.NDArray[np.float32]:
        """One for each `span` positions of a context, float32."""
        steps = -(-context_length // self.span)
        return np.array([1 + self.beta * logarithm(1 + step) for step in range(steps)], np.float32)

    def check(self, context_length: int) -> None:
        """ModelError unless the factors are numbers, and few enough to be kept."""
        if type(self.span) is not int or not 1 <= self.span <= 1 << 30:
            raise ModelError(f"queries that grow every {self.span!r:.80} positions: 1 to 2^30 expected")
        if not 0 <= self.beta <= 1e3:
            raise ModelError(f"queries that grow by {self.beta!r:.80}: a number from 0 to 1000 expected")
        if context_length > MOST_GROWTH_STEPS * self.span:
            raise ModelError(
                f"queries that grow every {self.span} positions of {context_length}: at most"
                f" {MOST_GROWTH_STEPS} times can run"
            )

"""Matrices that a probe of a known machine could have measured: clusters, noise, disturbed pairs, gaps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]


def nested_latencies(
    pus: Sequence[int], scales: Sequence[tuple[Sequence[Sequence[int]], float]], far_ns: float
) -> Matrix:
    """`scales`: partitions with the latency inside a part, the widest first; `far_ns` between its parts."""
    latency = np.full((len(pus), len(pus)), far_ns)
    place = {pu: index for index, pu in enumerate(pus)}
    for parts, within_ns in scales:
        for part in parts:
            own = [place[pu] for pu in part if pu in place]
            latency[np.ix_(own, own)] = within_ns
    np.fill_diagonal(latency, np.nan)
    return latency


def measured(
    exact: Matrix,
    rng: np.random.Generator,
    noise: float = 0.08,
    disturbed: float = 0.02,
    unmeasured: float = 0.0,
) -> Matrix:
    """Each pair off by a share, some by a factor of up to ten, some not measured at all. Symmetric."""
    n = len(exact)
    factor = np.exp(rng.normal(0.0, noise, (n, n)))
    factor *= np.where(rng.random((n, n)) < disturbed, rng.uniform(1.5, 10.0, (n, n)), 1.0)
    factor[rng.random((n, n)) < unmeasured] = np.nan
    upper = np.triu(exact * factor, 1)
    symmetric = upper + upper.T
    np.fill_diagonal(symmetric, np.nan)
    return symmetric


def blocks(pus: Sequence[int], size: int, stride: int = 1) -> list[tuple[int, ...]]:
    """Groups of `size`, `stride` apart, as `group(size, stride, d)` would make of these siblings."""
    span = size * stride
    return [
        tuple(pus[start + first + step * stride] for step in range(size))
        for start in range(0, len(pus), span)
        for first in range(stride)
    ]

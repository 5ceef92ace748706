"""Sparse storage of bf16 and q8 weights: a bit for each weight, and the values that are kept (sparse.h).

Storage changes no bit of any product: kernels expand a panel to what it was. A weight counts as zero where
it is 0 (bf16) or `zero_point` (q8 without minima, whose zero is exact).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from phasewise.cython_kernels import _native, packing
from phasewise.cython_kernels.errors import WeightError
from phasewise.cython_kernels.packing import SPARSE_TAIL, PackedWeight


def can_be_sparse(kind: str, has_mins: bool) -> bool:
    """True if there is a sparse storage of such weights: bf16, and q8 whose zero is exact."""
    return kind == "bf16" or (kind == "q8" and not has_mins)


def to_sparse(weight: PackedWeight) -> PackedWeight:
    """The same weight stored sparse. WeightError for a kind that cannot be."""
    if weight.is_sparse:
        return weight
    if not can_be_sparse(weight.kind, weight.mins is not None):
        raise WeightError(f"a {weight.kind} weight cannot be stored sparse: bf16 and q8 without minima can")
    stream, offsets, _ = _native.sparse_pack(
        np.ascontiguousarray(weight.values), weight.kind, weight.zero_point, weight.k
    )
    values = np.concatenate([stream, np.zeros(SPARSE_TAIL, np.uint8)])
    return replace(weight, values=values, offsets=offsets)


def kept(weight: PackedWeight) -> int:
    """The number of weights that are not zero, padding apart.

    WeightError where offsets, masks and length of a sparse weight disagree.
    """
    if weight.offsets is not None:
        return _native.sparse_kept(weight.values, weight.offsets, weight.kind, weight.k)
    zero = weight.zero_point if weight.kind == "q8" else 0
    return int(np.count_nonzero(weight.values != zero))


def density(weight: PackedWeight) -> float:
    """The share of weights that are kept."""
    return kept(weight) / (weight.n * weight.k)


def kept_share(weight: PackedWeight) -> float:
    """The share of weights that a sparse weight keeps, roughly and padding included, from its bytes alone.

    Of a view of some columns, their share.
    """
    assert weight.offsets is not None
    values = weight.nbytes - sum(array.nbytes for array in weight.arrays[1:])
    weights = packing.padded_n(weight.n) * packing.padded_k(weight.k)
    share = (values - weights / 8) / (weights * (2 if weight.kind == "bf16" else 1))
    return min(1.0, max(0.0, share))


def values_bytes(kind: str, n: int, k: int, kept_share: float) -> float:
    """The bytes that a sparse weight takes, roughly and scales apart: a bit for each weight, the kept ones,
    offsets."""
    weights = packing.padded_n(n) * packing.padded_k(k)
    offsets_bytes = 4 * float(np.prod(packing.offsets_shape(n, k)))
    return weights / 8 + (2 if kind == "bf16" else 1) * kept_share * n * k + offsets_bytes

"""An adapter's products: within the stated bound of float64, the same bits for any rows and panels."""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.packing import from_bf16, pack_thin, thin_shape, to_bf16, unpack
from tests.support.tiers import isas

U = 2.0**-24
SHAPES = [(1, 1), (15, 2), (16, 3), (17, 16), (48, 8), (67, 33)]


def _drawn(n: int, rank: int, kind: str, m: int = 7) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n * 1000 + rank)
    w = rng.standard_normal((n, rank), dtype=np.float32)
    w = from_bf16(to_bf16(w)) if kind == "bf16" else w
    return w, rng.standard_normal((m, rank), dtype=np.float32), rng.standard_normal((9, n), dtype=np.float32)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("n", "rank"), SHAPES)
def test_packing_loses_nothing(n: int, rank: int, kind: str) -> None:
    """Unpacked numbers are those that were packed, in no more room than pairs need."""
    w, _, _ = _drawn(n, rank, kind)
    packed = pack_thin(w, kind)  # type: ignore[arg-type]

    assert packed.values.shape == thin_shape(packed.kind, n, rank)
    assert (unpack(packed) == w).all()


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(("n", "rank"), SHAPES)
def test_sums_keep_their_bound_and_are_the_same_everywhere(n: int, rank: int, kind: str) -> None:
    """gamma_rank of the sum, one rounding of the addition; equal bits on every ISA, alone or in company."""
    w, x, before = _drawn(n, rank, kind)
    packed, rows = pack_thin(w, kind), [5, 0, 3, 8, 1, 2, 7]  # type: ignore[arg-type]
    delta = x.astype(np.float64) @ w.T.astype(np.float64)
    size = np.abs(x).astype(np.float64) @ np.abs(w).T
    exact = before.astype(np.float64)
    exact[rows] += delta
    bound = np.zeros_like(exact)
    bound[rows] = rank * U / (1 - rank * U) * size + U * (np.abs(exact[rows]) + size)
    bits = []
    for name in isas():
        with isa.using(name):
            y = before.copy()
            _native.add_low_rank(x, packed, y, rows)
            alone = before.copy()
            for i, row in enumerate(rows):
                for panel in range(packed.panels):
                    _native.add_low_rank(x[i : i + 1], packed, alone, [row], (panel, panel + 1))

        assert (np.abs(y - exact) <= bound).all()
        assert y.tobytes() == alone.tobytes()
        bits.append(y.tobytes())
    assert len(set(bits)) == 1


def test_what_does_not_fit_is_refused() -> None:
    """Rows and panels that lie outside, and weights of another kind, never reach a kernel."""
    w, x, y = _drawn(17, 4, "f32")
    packed = pack_thin(w, "f32")
    for rows, panels in (([9] * 7, None), ([-1] * 7, None), ([0] * 7, (0, 3))):
        with pytest.raises(ValueError, match="outside"):
            _native.add_low_rank(x, packed, y.copy(), rows, panels)
    with pytest.raises(ValueError, match="fit"):
        _native.add_low_rank(x[:, :3].copy(), packed, y.copy(), [0] * 7)

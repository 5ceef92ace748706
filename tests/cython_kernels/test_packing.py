"""Packing loses nothing, pads with nothing, and puts every element where the layout says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.cython_kernels.packing import QuantRows
from tests.support.kernels.gemm_reference import quantise_columns

SHAPES = [(1, 32), (15, 32), (16, 64), (17, 96), (33, 31), (5, 1), (48, 33), (31, 160)]
sizes = st.tuples(st.integers(1, 50), st.integers(1, 130))


def random_matrix(n: int, k: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32)


def random_rows(
    n: int, k: int, bits: int, group: int = 32, with_mins: bool = False, seed: int = 0
) -> QuantRows:
    rng = np.random.default_rng(seed)
    groups = packing.groups_of(k, group)
    q = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    scales = rng.standard_normal((n, groups)).astype(np.float16)
    mins = rng.standard_normal((n, groups)).astype(np.float16) if with_mins else None
    return QuantRows(q, scales, mins, 0 if with_mins else 1 << (bits - 1), group, bits)


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_f32_comes_back_bit_for_bit(n: int, k: int) -> None:
    w = random_matrix(n, k)

    packed = packing.pack_dense(w, "f32")

    assert np.array_equal(packing.unpack(packed), w)
    assert packed.values.shape == packing.values_shape("f32", n, k)


@given(sizes, st.integers(0, 2**32 - 1))
def test_bf16_is_the_nearest_even_bfloat16(size: tuple[int, int], seed: int) -> None:
    w = random_matrix(*size, seed=seed)

    got = packing.unpack(packing.pack_dense(w, "bf16"))

    bits = w.view(np.uint32).astype(np.uint64)
    low, high = bits & ~np.uint64(0xFFFF), (bits & ~np.uint64(0xFFFF)) + np.uint64(0x10000)
    below, above = (x.astype(np.uint32).view(np.float32) for x in (low, high))
    down = np.abs(w - below.reshape(w.shape)) <= np.abs(above.reshape(w.shape) - w)
    tie = np.abs(w - below.reshape(w.shape)) == np.abs(above.reshape(w.shape) - w)
    expected = np.where(down, below.reshape(w.shape), above.reshape(w.shape))
    assert np.array_equal(got[~tie], expected[~tie])


def test_bf16_rounds_ties_to_even_and_keeps_special_values() -> None:
    tie_down, tie_up = 0x3F808000, 0x3F818000
    x = np.array([tie_down, tie_up, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F800001], dtype=np.uint32)

    got = packing.to_bf16(x.view(np.float32))

    assert [hex(v) for v in got] == ["0x3f80", "0x3f82", "0x7f80", "0xff80", "0x7f80", "0x7fc0"]


@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize(
    ("bits", "group", "with_mins"),
    [(8, 32, False), (8, 16, False), (8, 0, False), (8, 32, True), (4, 32, True)],
)
def test_quantised_rows_come_back_bit_for_bit(n: int, k: int, bits: int, group: int, with_mins: bool) -> None:
    rows = random_rows(n, k, bits, group, with_mins)

    packed = packing.pack_quant(rows)
    back = packing.unpack_quant(packed)

    assert np.array_equal(back.q, rows.q)
    assert np.array_equal(back.scales, rows.scales)
    assert (back.mins is None) == (rows.mins is None)
    assert np.array_equal(packing.unpack(packed), packing.dequantise(rows))
    assert packed.values.shape == packing.values_shape(packed.kind, n, k)
    assert packed.scales is not None
    assert packed.scales.shape == packing.scales_shape(packed.kind, n, k, group)


def test_every_element_lies_where_the_layout_says() -> None:
    n, k = 37, 96
    w, q8, q4 = random_matrix(n, k), random_rows(n, k, 8), random_rows(n, k, 4)
    bf16 = packing.to_bf16(w)
    f32_panels, bf16_panels = (packing.pack_dense(w, kind).values for kind in ("f32", "bf16"))
    q8_panels, q4_panels = packing.pack_quant(q8), packing.pack_quant(q4)

    for row in range(n):
        panel, column = divmod(row, 16)
        for i in range(k):
            assert f32_panels[panel, i, column] == w[row, i]
            assert bf16_panels[panel, i // 2, column, i % 2] == bf16[row, i]
            assert q8_panels.values[panel, i // 4, column, i % 4] == q8.q[row, i]
            byte = q4_panels.values[panel, i // 8, column, i % 4]
            assert (byte >> 4 if i % 8 >= 4 else byte & 15) == q4.q[row, i]
            assert q8_panels.scales is not None
            assert q8_panels.scales[panel, i // 32, column] == q8.scales[row, i // 32]


@given(sizes, st.sampled_from([(8, True), (8, False), (4, True), (4, False)]), st.integers(0, 2**32 - 1))
def test_quantise_is_within_half_a_step_and_a_scale_rounding(
    size: tuple[int, int], scheme: tuple[int, bool], seed: int
) -> None:
    bits, symmetric = scheme
    w = random_matrix(*size, seed=seed)

    rows = packing.quantise(w, bits, symmetric)

    step = np.abs(np.repeat(rows.scales.astype(np.float32), rows.group, axis=1)[:, : size[1]])
    # Stored float16 scales and minima are off by 2^-11 of themselves, and four symmetric bits end at 7.
    reach = step * (1 << bits) + np.abs(w).max()
    bound = step * (1.0 if (bits, symmetric) == (4, True) else 0.5) + reach * 2.0**-10 + 1e-6
    assert (np.abs(packing.dequantise(rows) - w) <= bound).all()
    assert rows.scales.dtype == np.float16
    assert rows.zero_point == ((1 << (bits - 1)) if symmetric else 0)


@given(sizes, st.integers(0, 2**32 - 1))
def test_columns_are_within_half_a_step_and_reach_their_ends(size: tuple[int, int], seed: int) -> None:
    w = random_matrix(*size, seed=seed)

    rows = quantise_columns(w)

    assert (np.abs(packing.dequantise(rows) - w) <= rows.scales * np.float32(0.5001)).all()
    assert (np.abs(rows.q.astype(int) - 128).max(axis=1) == 127).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
@pytest.mark.parametrize(("bits", "symmetric"), [(8, True), (4, False)])
def test_a_weight_without_a_finite_scale_is_refused(bad: float, bits: int, symmetric: bool) -> None:
    w = np.ones((2, 32), np.float32)
    w[1, 7] = bad

    with pytest.raises(ValueError, match="finite"):
        packing.quantise(w, bits, symmetric)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_column_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        quantise_columns(np.array([[1.0, bad]], np.float32))


def test_rows_that_no_kernel_reads_are_refused() -> None:
    q, scales = np.zeros((2, 32), np.uint8), np.ones((2, 1), np.float16)

    with pytest.raises(ValueError, match="scales have shape"):
        QuantRows(q, scales[:1], None, 8, 32, 4)
    with pytest.raises(ValueError, match="no kernel"):
        QuantRows(q, np.ones((2, 2), np.float16), None, 8, 16, 4)
    with pytest.raises(ValueError, match="mins"):
        QuantRows(q, scales, scales.astype(np.float32), 0, 32, 4)
    with pytest.raises(ValueError, match="no mins"):
        QuantRows(q, scales, scales, 0, packing.COLUMN_GROUP, 8)
    with pytest.raises(ValueError, match="dense"):
        packing.pack_dense(np.zeros((2, 2), np.float32), "q8")

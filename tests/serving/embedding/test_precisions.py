"""Vectors of fewer bits: what sentence-transformers makes of them, and what directions they keep."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.embedding.encoder.pooling import PRECISIONS, as_bits, as_int8, as_signed_bits, unit

WIDTHS = st.integers(1, 200)


def random_vector(width: int, seed: int, size: float = 1.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(width) * size).astype(np.float32)


@given(WIDTHS, st.integers(0, 1000), st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_int8_reaches_127_and_is_within_half_a_step(width: int, seed: int, size: float) -> None:
    vector = random_vector(width, seed, size)

    quantized = as_int8(vector)

    largest = float(np.abs(vector.astype(np.float64)).max())
    assert quantized.dtype == np.int8
    assert np.abs(quantized.astype(int)).max() == 127
    assert (np.abs(quantized * (largest / 127) - vector) <= largest / 127 * 0.5001).all()


def test_int8_keeps_the_direction() -> None:
    for width in (256, 384, 1024):
        vector = unit(random_vector(width, width))
        quantized = as_int8(vector).astype(np.float64)
        assert float(quantized @ vector) / np.linalg.norm(quantized) >= 0.9998


@given(WIDTHS, st.integers(0, 1000))
def test_bits_are_those_of_sentence_transformers(width: int, seed: int) -> None:
    vector = random_vector(width, seed)
    vector[seed % width] = 0.0

    unsigned, signed = as_bits(vector), as_signed_bits(vector)

    assert (len(unsigned), unsigned.dtype, signed.dtype) == (-(-width // 8), np.uint8, np.int8)
    assert (unsigned.astype(int) - 128 == signed).all()
    for index, number in enumerate(vector):
        assert bool(unsigned[index // 8] >> (7 - index % 8) & 1) == (number > 0)
    assert not unsigned[-1] & ((1 << (-width % 8)) - 1)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_vector_of_nothing_stays_one(precision: str) -> None:
    quantized = PRECISIONS[precision](np.zeros(9, np.float32))  # type: ignore[index]

    assert set(quantized.tolist()) == ({-128} if precision == "binary" else {0})

"""Q4_K and Q6_K: blocks that read back as what the search meant, with no more error than llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.workflows.quantise import k_quants
from phasewise.workflows.quantise.types import encoded, type_of
from tests.support.models.reference_models import FIXTURES
from tests.support.tiers import examples

BLOCK_BYTES = {"q4_k": k_quants.Q4_K_BYTES, "q6_k": k_quants.Q6_K_BYTES}
SEARCHES = {"q4_k": k_quants.q4_k, "q6_k": k_quants.q6_k}
MATRICES: Mapping[str, Callable[[np.random.Generator, tuple[int, int]], np.ndarray]] = {
    "normal": lambda rng, shape: rng.normal(0, 0.02, shape),
    "laplace": lambda rng, shape: rng.laplace(0, 0.02, shape),
    "outliers": lambda rng, shape: rng.standard_t(3, shape) * 0.02,
    "positive": lambda rng, shape: rng.uniform(0, 1, shape),
    "negative": lambda rng, shape: -rng.uniform(0, 1, shape),
    "few values": lambda rng, shape: rng.integers(-1, 2, shape) * 0.5,
    "large": lambda rng, shape: rng.normal(0, 1e4, shape),
}


def matrix(name: str) -> np.ndarray:
    rng = np.random.default_rng(list(MATRICES).index(name))
    return np.ascontiguousarray(MATRICES[name](rng, (6, 768)), np.float32)


def importance_of(name: str) -> np.ndarray:
    rng = np.random.default_rng(100 + list(MATRICES).index(name))
    return (rng.chisquare(1, 768) + 1e-3).astype(np.float32)


def read(blocks: np.ndarray, kind: str) -> np.ndarray:
    """By the gguf package."""
    return np.asarray(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.upper()]))


def error(blocks: np.ndarray, kind: str, rows: np.ndarray, importance: np.ndarray | None) -> float:
    weights = 1.0 if importance is None else importance.astype(float)
    return float(np.sqrt((weights * (read(blocks, kind).astype(float) - rows) ** 2).mean()))


@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("kind", SEARCHES)
@pytest.mark.parametrize("name", MATRICES)
def test_the_error_is_at_most_llama_cpp_s(name: str, kind: str, is_weighed: bool) -> None:
    """k_quants.npz has its blocks (tests/data/make_k_quants.py). Of numbers that are a grid's own, the
    rounding of a scale to float16 is all there is."""
    half_step = 2**-12 * float(np.sqrt(np.square(matrix(name)).mean())) if name == "few values" else 0.0
    rows, importance = matrix(name), importance_of(name) if is_weighed else None
    theirs = np.load(FIXTURES / "k_quants.npz")[f"{name}/{kind}/{is_weighed}"]

    ours = SEARCHES[kind](rows, importance)

    assert ours.shape == theirs.shape == (6, 3 * BLOCK_BYTES[kind])
    assert error(ours, kind, rows, importance) <= error(theirs, kind, rows, importance) + half_step


@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 3), st.sampled_from([1e-4, 1.0, 300.0]))
@examples(15)
def test_numbers_of_the_grid_come_back(seed: int, count: int, n_blocks: int, size: float) -> None:
    """Numbers of blocks are said again in as few bits: rounding twice adds little."""
    rows = np.random.default_rng(seed).normal(0, size, (count, 256 * n_blocks)).astype(np.float32)
    for kind, search in SEARCHES.items():
        once = read(search(rows), kind)

        twice = read(search(once), kind)

        assert np.sqrt(((twice - once) ** 2).mean()) <= 0.35 * np.sqrt(((once - rows) ** 2).mean())


@pytest.mark.parametrize("kind", SEARCHES)
def test_rows_do_not_depend_on_each_other(kind: str) -> None:
    rows, importance = matrix("outliers"), importance_of("outliers")

    whole = SEARCHES[kind](rows, importance)

    for index, row in enumerate(rows):
        assert SEARCHES[kind](row[None], importance).tobytes() == whole[index].tobytes()


@pytest.mark.parametrize("kind", SEARCHES)
def test_zeros_stay_zeros(kind: str) -> None:
    rows = np.zeros((2, 512), np.float32)
    rows[1, 300] = 1

    back = read(SEARCHES[kind](rows), kind)

    assert not back[0].any()
    assert not back[1, :256].any()
    assert back[1, 300] == pytest.approx(1, rel=1e-2)


@pytest.mark.parametrize("kind", SEARCHES)
def test_importance_moves_the_error_where_it_matters_less(kind: str) -> None:
    rows, importance = matrix("normal"), np.ones(768, np.float32)
    importance[::2] = 50

    plain, weighed = SEARCHES[kind](rows), SEARCHES[kind](rows, importance)

    important = slice(None), slice(0, None, 2)
    before, after = ((read(blocks, kind) - rows)[important] for blocks in (plain, weighed))
    assert np.square(after).mean() < np.square(before).mean()


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0", "Q4_K", "Q6_K", "F16", "Q5_0"])
def test_numbers_too_large_for_a_scale_are_refused(type_name: str) -> None:
    rows = np.full((1, 256), 1e30, np.float32)
    rows[0, ::2] = -1e30

    with pytest.raises(OverflowError, match=type_name):
        encoded(rows, type_name)


@pytest.mark.parametrize("type_name", ["Q8_0", "Q4_0"])
def test_plain_types_have_the_reference_s_bits(type_name: str) -> None:
    rows = matrix("laplace")

    expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[type_name])

    assert encoded(rows, type_name).tobytes() == np.asarray(expected).tobytes()


@pytest.mark.parametrize(
    ("name", "shape", "quant_format", "tied", "expected"),
    [
        ("blk.0.attn_q.weight", (64, 256), "q4_k", True, "Q4_K"),
        ("blk.0.attn_q.weight", (64, 576), "q4_k", True, "Q5_0"),
        ("blk.0.attn_q.weight", (64, 576), "q6_k", True, "Q8_0"),
        ("blk.0.attn_q.weight", (64, 100), "q4_k", True, "F16"),
        ("token_embd.weight", (999, 256), "q4_k", True, "Q6_K"),
        ("token_embd.weight", (999, 256), "q4_k", False, "Q4_K"),
        ("output.weight", (999, 256), "q4_0", False, "Q6_K"),
        ("output.weight", (999, 576), "q4_0", False, "Q8_0"),
        ("output.weight", (999, 256), "q8_0", False, "Q8_0"),
        ("blk.3.ffn_gate_exps.weight", (8, 64, 256), "q4_k", False, "Q4_K"),
        ("blk.3.ffn_gate_inp.weight", (8, 256), "q4_k", False, "F32"),
        ("blk.3.attn_norm.weight", (256,), "q4_k", False, "F32"),
        ("blk.3.attn_q.bias", (256,), "q8_0", False, "F32"),
    ],
)
def test_types_are_those_that_llama_cpp_takes(
    name: str, shape: tuple[int, ...], quant_format: str, tied: bool, expected: str
) -> None:
    assert type_of(name, shape, quant_format, tied=tied) == expected  # type: ignore[arg-type]

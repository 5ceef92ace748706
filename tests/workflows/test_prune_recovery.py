"""Recovery: the same zeros, and outputs that are never further from those before pruning."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.serving.loaders import open_source
from phasewise.serving.loaders.fetching.resolve import Located
from phasewise.workflows.errors import UsageError
from phasewise.workflows.prune import masks
from phasewise.workflows.prune.calibration import recover
from phasewise.workflows.prune.directory import bf16_bits
from phasewise.workflows.prune.run import prune
from phasewise.workflows.prune.settings import Pattern, PruneSettings
from tests.support.models.tiny_models import write_calibration, write_tiny_gguf, write_tiny_hf
from tests.support.tiers import examples

HALF = Pattern(0.5)


def as_bf16(w: np.ndarray) -> np.ndarray:
    return packing.from_bf16(bf16_bits(w.astype(np.float32)))


def drawn(rng: np.random.Generator, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """A weight of bf16 values, and X^T X of inputs whose sizes differ and which hang together."""
    mix = rng.standard_normal((k, k)) * np.exp(rng.standard_normal(k))
    x = (rng.standard_normal((4 * k, k)) @ mix).astype(np.float32)
    return as_bf16(rng.standard_normal((n, k))), x.T @ x


def errors(change: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    return np.asarray(np.einsum("ij,jk,ik->i", change, hessian, change, dtype=np.float64))


def pruned_by(method: str, w: np.ndarray, hessian: np.ndarray, pattern: Pattern) -> np.ndarray:
    if method == "magnitude":
        return np.where(masks.magnitude_mask(w, pattern), w, np.float32(0))
    if method == "wanda":
        return np.where(masks.wanda_mask(w, np.diag(hessian), pattern), w, np.float32(0))
    return as_bf16(masks.sparsegpt(w, hessian, pattern))


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
@pytest.mark.parametrize("pattern", [Pattern(0.3), HALF, Pattern(0.9), Pattern(0.5, 2, 4)], ids=str)
def test_no_row_is_further_from_what_it_was_and_the_zeros_are_the_same(method: str, pattern: Pattern) -> None:
    rng = np.random.default_rng(3)
    for n, k in ((1, 4), (5, 32), (24, 96)):
        w, hessian = drawn(rng, n, k)
        before = pruned_by(method, w, hessian, pattern)

        after, _, error = recover(w, before, hessian)

        assert np.array_equal(after == 0, before == 0)
        assert np.array_equal(as_bf16(after), after)
        was, now = errors(before - w, hessian), errors(after - w, hessian)
        assert (now <= was * (1 + 1e-5)).all()
        assert (error.pruned, error.recovered) == pytest.approx((was.sum(), now.sum()), rel=1e-3)
        assert error.recovered <= error.pruned


def test_it_comes_as_near_as_least_squares_of_each_row() -> None:
    """Over a damped Hessian and before rounding, which bounds what steps can reach."""
    rng = np.random.default_rng(4)
    w, hessian = drawn(rng, 12, 64)
    before = pruned_by("wanda", w, hessian, HALF)
    exact, whole = w.astype(np.float64), masks.damped(hessian)
    for row, kept in zip(exact, before != 0, strict=True):
        target = row.copy()
        row[~kept] = 0
        row[kept] = np.linalg.solve(whole[np.ix_(kept, kept)], whole[kept] @ target)

    after, n_steps, error = recover(w, before, hessian)

    least = errors(as_bf16(exact) - w, hessian).sum()
    assert n_steps > 1
    assert error.recovered <= 1.02 * least < 0.9 * error.pruned
    assert errors(after - w, hessian).sum() <= 1.02 * least


@given(seed=st.integers(0, 2**32))
@examples(40)
def test_a_weight_of_which_nothing_was_pruned_stays_as_it_is(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w, hessian = drawn(rng, int(rng.integers(1, 9)), int(rng.integers(1, 40)))

    after, n_steps, error = recover(w, w, hessian)

    assert np.array_equal(after, w)
    assert (n_steps, error.pruned, error.recovered) == (0, 0, 0)


@pytest.mark.parametrize("inputs", ["all zero", "half zero", "one row"])
def test_inputs_that_say_little_do_no_harm(inputs: str) -> None:
    rng = np.random.default_rng(5)
    w, hessian = drawn(rng, 6, 32)
    if inputs == "one row":
        x = rng.standard_normal((1, 32)).astype(np.float32)
        hessian = x.T @ x
    else:
        dead = slice(None) if inputs == "all zero" else slice(0, 16)
        hessian[dead] = 0
        hessian[:, dead] = 0
    before = pruned_by("magnitude", w, hessian, HALF)
    before[2] = 0

    after, _, error = recover(w, before, hessian)

    assert np.isfinite(after).all()
    assert np.array_equal(after == 0, before == 0)
    assert error.recovered <= error.pruned


@pytest.mark.parametrize("storage", ["dense", "bitmask"])
@pytest.mark.parametrize("method", ["magnitude", "sparsegpt"])
def test_a_recovered_model_has_the_zeros_of_the_pruned_one(
    tmp_path: Path, storage: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same bytes whenever it is made; nothing but its directory and its cache stays."""
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    is_file = method == "magnitude"
    model = (
        write_tiny_gguf(tmp_path / "m.gguf", "llama", {})
        if is_file
        else write_tiny_hf(tmp_path / "m", "llama")
    )
    text = write_calibration(tmp_path / "text.txt")

    def written(name: str, recovers: bool) -> Path:
        reads = (text, 128) if recovers or method != "magnitude" else ()
        kept = {"storage": storage, "recover": recovers}
        settings = PruneSettings(str(model), tmp_path / name, HALF, method, *reads, **kept)  # type: ignore[arg-type]
        told: list[str] = []
        result = prune(settings, progress=told.append)
        assert any(line.startswith("recovering: ") for line in told) == recovers
        assert (result.recovery is not None) == recovers
        if result.recovery:
            assert 0 < result.recovery.output_error_recovered < result.recovery.output_error_pruned
            assert result.pruned_zeros * 2 == pytest.approx(result.pruned_weights, rel=0.01)
        return tmp_path / name

    pruned, recovered, again = written("pruned", False), written("recovered", True), written("again", True)

    assert sorted(path.name for path in recovered.iterdir()) == sorted(path.name for path in pruned.iterdir())
    for path in recovered.iterdir():
        assert path.read_bytes() == (again / path.name).read_bytes()
    with open_source(Located("p", pruned)) as left, open_source(Located("r", recovered)) as fitted:
        for name, tensor in left.tensors.items():
            values, theirs = (
                np.asarray(part.rows(0, part.shape[0] if len(part.shape) > 1 else 1))
                for part in (tensor, fitted.tensors[name])
            )
            assert np.array_equal(values == 0, theirs == 0), name
            is_fitted = name.startswith("layers.") and len(tensor.shape) > 1
            assert np.array_equal(values, theirs) != is_fitted, name
    assert not list(tmp_path.glob(".*prune*"))


def test_three_perplexities_stand_beside_each_other_and_no_cache_is_left_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    model = write_tiny_hf(tmp_path / "m", "llama")
    text = write_calibration(tmp_path / "text.txt")

    def perplexities(name: str, recovers: bool) -> tuple[float | None, ...]:
        result = prune(
            PruneSettings(
                str(model), tmp_path / name, HALF, "wanda", text, 128, evaluation=text, recover=recovers
            )
        )
        between = result.recovery.perplexity_pruned if result.recovery else None
        return result.perplexity_before, between, result.perplexity_after

    before, nothing, pruned = perplexities("pruned", False)
    again, between, after = perplexities("recovered", True)

    assert nothing is None
    assert (again, between) == (before, pruned)
    assert after not in (None, before, pruned)
    packed = sorted(path.name.partition("-")[0] for path in (tmp_path / "cache" / "packed").iterdir())
    assert {name for name in packed if not name.startswith(".")} == {"m", "pruned", "recovered"}


def test_without_a_text_it_is_refused_in_a_line() -> None:
    with pytest.raises(
        UsageError, match="--recover reads the inputs of weights: give a text with --calibration"
    ):
        PruneSettings("m", Path("out"), HALF, recover=True)

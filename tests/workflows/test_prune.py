"""Pruning: masks of the papers, directories that others read, and recovery whose outputs are no further."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing, sparse
from phasewise.serving.loaders import load_model, open_source
from phasewise.serving.loaders.families.family import with_rope
from phasewise.serving.loaders.fetching.resolve import Located
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.prune import masks
from phasewise.workflows.prune.calibration import gather, recover
from phasewise.workflows.prune.directory import bf16_bits, check_family, config_fields
from phasewise.workflows.prune.run import prune
from phasewise.workflows.prune.settings import Pattern, PruneSettings, parse_pattern
from tests.support.models.family_gguf_files import write_family_gguf
from tests.support.models.family_models import write_family_hf
from tests.support.models.tiny_models import TinyShape, write_calibration, write_tiny_gguf, write_tiny_hf
from tests.support.tiers import examples

HALF = Pattern(0.5)
TWO_OF_FOUR = Pattern(0.5, 2, 4)


@pytest.mark.parametrize("pattern", [HALF, TWO_OF_FOUR, Pattern(0.7)])
def test_masks_keep_the_share_that_was_asked_for(pattern: Pattern) -> None:
    rng = np.random.default_rng(0)
    w = rng.standard_normal((24, 160)).astype(np.float32)
    x = rng.standard_normal((300, 160)).astype(np.float32)

    pruned = {
        "magnitude": np.where(masks.magnitude_mask(w, pattern), w, 0),
        "wanda": np.where(masks.wanda_mask(w, (x * x).sum(axis=0), pattern), w, 0),
        "sparsegpt": masks.sparsegpt(w, x.T @ x, pattern),
    }

    for name, weights in pruned.items():
        assert (weights == 0).mean() == pytest.approx(pattern.share, abs=0.01), name
        if pattern.is_structured:
            assert ((weights.reshape(-1, 4) == 0).sum(axis=1) == 2).all(), name


def test_wanda_keeps_the_largest_products_of_weight_and_input_norm() -> None:
    """Row by row, against a sort of the definition."""
    rng = np.random.default_rng(1)
    w = rng.standard_normal((9, 40)).astype(np.float32)
    squares = rng.random(40) ** 2

    kept = masks.wanda_mask(w, squares, HALF)

    for row, of_row in zip(w, kept, strict=True):
        scores = np.abs(row) * np.sqrt(squares)
        assert set(np.flatnonzero(of_row)) == set(np.argsort(scores)[20:])


def test_sparsegpt_leaves_a_smaller_error_than_wanda_and_wanda_than_magnitude() -> None:
    """On inputs whose sizes differ and which hang together: the error of the product is what counts."""
    rng = np.random.default_rng(2)
    mix = rng.standard_normal((64, 64)) * np.exp(rng.standard_normal(64))
    x = (rng.standard_normal((2000, 64)) @ mix).astype(np.float32)
    w = rng.standard_normal((48, 64)).astype(np.float32)

    def error(pruned: np.ndarray) -> float:
        return float(np.square(x @ (pruned - w).T).sum())

    magnitude = error(np.where(masks.magnitude_mask(w, HALF), w, 0))
    wanda = error(np.where(masks.wanda_mask(w, np.square(x).sum(axis=0), HALF), w, 0))
    assert error(masks.sparsegpt(w, x.T @ x, HALF)) < wanda < magnitude


def test_the_tap_gives_the_rows_that_enter_each_product(tmp_path: Path) -> None:
    """The rows of the first layer's q are the embeddings of tokens, normalised."""
    model = load_model(str(write_tiny_hf(tmp_path / "m", "llama")), "f32", tmp_path / "cache")
    embedding = packing.unpack(model.weights["embed"])
    tokens = [5, 9, 200, 3]
    rows = embedding[tokens]
    norm = rows / np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + model.config.norm_eps)
    expected = norm * model.vectors["layers.0.attn_norm"]

    gathered = gather(model, [tokens], "hessian", lambda line: None)

    assert np.allclose(gathered.squares[0, "qkv"], np.square(expected).sum(axis=0), rtol=1e-4)
    assert np.allclose(gathered.hessians[0, "qkv"], expected.T @ expected, rtol=1e-3, atol=1e-3)
    assert {name for _, name in gathered.squares} == {"qkv", "o", "gate_up", "down"}
    assert all(squares.any() for squares in gathered.squares.values())


def _read_by(method: str, text: Path) -> tuple[Path, int] | tuple[()]:
    """The calibration of a method that reads one."""
    return () if method == "magnitude" else (text, 128)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_the_same_arguments_give_the_same_bytes_and_a_model_that_opens(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    source = write_tiny_gguf(tmp_path / "m.gguf", "llama", {}) if method == "magnitude" else None
    model = str(source or write_tiny_hf(tmp_path / "m", "llama"))
    text, outs = write_calibration(tmp_path / "text.txt"), [tmp_path / "one", tmp_path / "two"]

    for out in outs:
        prune(PruneSettings(model, out, HALF, method, *_read_by(method, text)))  # type: ignore[arg-type]

    files = [sorted(path.name for path in out.iterdir()) for out in outs]
    assert files[0] == files[1]
    assert all((outs[0] / name).read_bytes() == (outs[1] / name).read_bytes() for name in files[0])
    opened = load_model(str(outs[0]), "native", storage=StorageChoice("always"))
    for name, weight in opened.weights.items():
        expected = 1.0 if name == "embed" else 0.5
        assert sparse.density(weight) == pytest.approx(expected, abs=0.02), name
    assert not list(tmp_path.glob(".*prune*"))


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_a_layer_without_a_gate_is_pruned_as_it_is(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arcee's: each layer has `up` and `down`, and the model that is written is read as one of its family."""
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    model, text = write_family_hf(tmp_path / "m", "arcee"), write_calibration(tmp_path / "text.txt")

    settings = PruneSettings(str(model), tmp_path / "out", HALF, method, *_read_by(method, text))  # type: ignore[arg-type]
    prune(settings)

    before = load_model(str(model), "native")
    after = load_model(str(tmp_path / "out"), "native", storage=StorageChoice("always"))
    assert after.config == before.config
    assert after.weights.keys() == before.weights.keys()
    densities = [
        sparse.density(weight) for name, weight in after.weights.items() if name.startswith("layers")
    ]
    assert np.mean(densities) == pytest.approx(0.5, abs=0.02)


def test_config_of_a_file_names_the_activation(tmp_path: Path) -> None:
    located = Located("m", write_family_gguf(tmp_path / "m.gguf", "arcee"))
    with open_source(located) as source:
        plain = with_rope(source.config, scaling=None)

    assert config_fields(plain)["hidden_act"] == "relu2"
    assert config_fields(plain)["architectures"] == ["ArceeForCausalLM"]


def test_a_failure_midway_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(write_tiny_hf(tmp_path / "m", "llama"))
    monkeypatch.setattr("phasewise.workflows.prune.run.theirs_of", lambda name: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        prune(PruneSettings(model, tmp_path / "out", HALF))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_bad_settings_are_refused_in_a_line(tmp_path: Path) -> None:
    model = str(write_tiny_hf(tmp_path / "m", "llama"))
    for sparsity in ("1.5", "0", "nonsense", "4:2", "2:0"):
        with pytest.raises(UsageError, match="--sparsity"):
            PruneSettings(model, tmp_path / "out", parse_pattern(sparsity))
    with pytest.raises(UsageError, match="--calibration"):
        PruneSettings(model, tmp_path / "out", HALF, "wanda")
    with pytest.raises(UsageError, match="--skip"):
        PruneSettings(model, tmp_path / "out", HALF, skip=("head",))
    with pytest.raises(WorkflowError, match="exists already"):
        prune(PruneSettings(model, tmp_path, HALF))
    with open_source(Located("m", tmp_path / "m")) as source:
        other = replace(source, config=replace(source.config, architecture="gemma2"))
        with pytest.raises(WorkflowError, match="prune writes arcee, llama"):
            check_family(other)


def test_a_tensor_of_the_written_file_is_that_of_the_safetensors_package(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    source = write_tiny_hf(tmp_path / "m", "llama", shape=TinyShape(n_layers=1))
    prune(PruneSettings(str(source), tmp_path / "out", HALF))

    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "np") as file:
        names = set(file.keys())
    header = json.loads((tmp_path / "out" / "config.json").read_text())

    assert "model.layers.0.mlp.down_proj.weight" in names
    assert header["torch_dtype"] == "bfloat16"


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

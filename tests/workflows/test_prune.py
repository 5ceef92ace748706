"""Pruning: the masks that the papers define, a directory that others read, whole or not there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels import packing, sparse
from phasewise.serving.loaders import load_model, open_source
from phasewise.serving.loaders.families.family import with_rope
from phasewise.serving.loaders.fetching.resolve import Located
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.workflows.errors import UsageError, WorkflowError
from phasewise.workflows.prune import masks
from phasewise.workflows.prune.calibration import gather
from phasewise.workflows.prune.directory import check_family, config_fields
from phasewise.workflows.prune.run import prune
from phasewise.workflows.prune.settings import Pattern, PruneSettings, parse_pattern
from tests.support.models.family_gguf_files import write_family_gguf
from tests.support.models.family_models import write_family_hf
from tests.support.models.tiny_models import TinyShape, write_calibration, write_tiny_gguf, write_tiny_hf

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

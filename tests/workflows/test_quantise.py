"""Files of `phasewise quantise`: the same from a directory as from the GGUF file of its numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from phasewise.cython_kernels.packing import unpack
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.quantise.run import quantise
from phasewise.workflows.quantise.settings import QuantFormat, QuantiseSettings
from tests.support.models import family_cases, family_gguf_files, tiny_models
from tests.support.models import family_models as families

WRITTEN = {
    "gemma2", "gemma3", "olmo2", "granite", "smollm3", "llama-yarn", "qwen3-yarn", "arcee",
}  # fmt: skip
"""Families whose Hugging Face directories become GGUF files; of the others GGUF files are quantised."""
UNSAID = {
    "general.name", "general.file_type", "tokenizer.ggml.merges", "tokenizer.ggml.pre",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.token_type",
}  # fmt: skip
"""Keys that the two ways need not have alike."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(model: Path, out: Path, quant_format: QuantFormat = "q8_0", **more: Any) -> gguf.GGUFReader:
    quantise(QuantiseSettings(str(model), out, quant_format, **more))
    return gguf.GGUFReader(out)


def tensors(file: gguf.GGUFReader) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        tensor.name: (tensor.tensor_type.name, tuple(tensor.shape.tolist()), tensor.data.tobytes())
        for tensor in file.tensors
    }


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_a_directory_becomes_the_file_that_its_gguf_becomes(name: str, tmp_path: Path) -> None:
    """The GGUF file is made by the gguf package as llama.cpp's converter would."""
    directory, plain = tmp_path / name, tmp_path / f"{name}.gguf"
    families.write_family_hf(directory, name)
    family_gguf_files.write_family_gguf(plain, name)

    ours = written(tiny_models.with_merges(directory), tmp_path / "ours.gguf")
    theirs = gguf.GGUFReader(plain)

    expected = {
        tensor.name: np.asarray(gguf.quants.quantize(tensor.data, gguf.GGMLQuantizationType.Q8_0)).tobytes()
        if len(tensor.shape) > 1
        else tensor.data.tobytes()
        for tensor in theirs.tensors
    }
    assert {key: value[2] for key, value in tensors(ours).items()} == expected
    for key, field in theirs.fields.items():
        if key in UNSAID or key.startswith("GGUF."):
            continue
        value = field.contents()
        expected_value = pytest.approx(value, rel=1e-6) if isinstance(value, float) else value
        assert ours.fields[key].contents() == expected_value, key


@pytest.mark.parametrize("name", sorted(set(family_cases.FAMILY_CASES) - WRITTEN))
def test_what_cannot_be_named_is_refused_and_nothing_is_left(name: str, tmp_path: Path) -> None:
    directory = tmp_path / name
    families.write_family_hf(directory, name)

    with pytest.raises(WorkflowError, match=r"convert it with llama\.cpp"):
        written(tiny_models.with_merges(directory), tmp_path / "out.gguf")

    assert [path.name for path in tmp_path.glob("*.gguf")] + [*tmp_path.glob(".out*")] == []


@pytest.mark.parametrize("quant_format", ["q8_0", "q4_0", "q4_k", "q6_k"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_a_written_model_loads_and_is_near_the_original(
    architecture: str, quant_format: QuantFormat, tmp_path: Path
) -> None:
    shape = tiny_models.TinyShape(hidden=256, ffn=256, n_heads=4, n_kv_heads=2, head_dim=64)
    directory = tiny_models.with_merges(tiny_models.write_tiny_hf(tmp_path / "m", architecture, shape=shape))

    written(directory, tmp_path / "out.gguf", quant_format)

    original = load_model(str(directory), "f32", cache_dir=tmp_path / "c")
    model = load_model(str(tmp_path / "out.gguf"), "f32", cache_dir=tmp_path / "c")
    assert model.weights.keys() == original.weights.keys()
    bound = {"q8_0": 0.01, "q6_k": 0.03, "q4_k": 0.1, "q4_0": 0.15}[quant_format]
    for key, weight in original.weights.items():
        plain, back = unpack(weight), unpack(model.weights[key])
        assert np.square(back - plain).mean() <= bound**2 * np.square(plain).mean(), key


def test_the_same_arguments_give_the_same_bytes_with_a_calibration_too(tmp_path: Path) -> None:
    shape = tiny_models.TinyShape(hidden=256, ffn=256, n_heads=4, n_kv_heads=2, head_dim=64)
    directory = tiny_models.with_merges(tiny_models.write_tiny_hf(tmp_path / "m", shape=shape))
    text = tiny_models.write_calibration(tmp_path / "text.txt")

    for name in ("a", "b"):
        written(directory, tmp_path / f"{name}.gguf", "q4_k", calibration=text)
    plain = written(directory, tmp_path / "plain.gguf", "q4_k")

    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()
    weighed, alone = tensors(gguf.GGUFReader(tmp_path / "a.gguf")), tensors(plain)
    different = {name for name in alone if alone[name] != weighed[name]}
    assert different == {name for name, (kind, *_) in alone.items() if kind == "Q4_K" and "blk" in name}


def test_quantised_weights_are_rounded_again_only_where_that_is_asked_for(tmp_path: Path) -> None:
    directory = tiny_models.with_merges(tiny_models.write_tiny_hf(tmp_path / "m"))
    written(directory, tmp_path / "first.gguf")

    with pytest.raises(WorkflowError, match="--requantise"):
        written(tmp_path / "first.gguf", tmp_path / "second.gguf")
    again = written(tmp_path / "first.gguf", tmp_path / "second.gguf", requantise=True)

    first = gguf.GGUFReader(tmp_path / "first.gguf")
    assert tensors(again) == tensors(first)
    for key, field in first.fields.items():
        assert again.fields[key].contents() == field.contents(), key
        assert again.fields[key].types == field.types, key


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("mine")

    with pytest.raises(WorkflowError, match="exists already"):
        written(tiny_models.write_tiny_hf(tmp_path / "m"), out)

    assert out.read_text() == "mine"


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {"rope_theta": 500000.0, "rms_norm_eps": 1e-6, "max_position_embeddings": 8192},
        {"tie_word_embeddings": True},
    ],
)
def test_settings_of_a_config_are_read_back_as_they_were(changes: dict[str, Any], tmp_path: Path) -> None:
    directory = tiny_models.with_merges(tiny_models.write_tiny_hf(tmp_path / "m", config=changes))

    written(directory, tmp_path / "out.gguf")

    ours = load_model(str(tmp_path / "out.gguf"), "f32", cache_dir=tmp_path / "c").config
    theirs = load_model(str(directory), "f32", cache_dir=tmp_path / "c").config
    assert ours.rope.inv_freq() == pytest.approx(theirs.rope.inv_freq(), rel=1e-6)
    assert (ours.context_length, ours.tied_embeddings) == (theirs.context_length, theirs.tied_embeddings)


def test_a_setting_that_no_gguf_file_can_say_is_refused_by_its_name(tmp_path: Path) -> None:
    changes = {"sliding_window": 32, "use_sliding_window": True, "max_window_layers": 1}
    directory = tiny_models.with_merges(tiny_models.write_tiny_hf(tmp_path / "m", "qwen2", config=changes))

    with pytest.raises(WorkflowError, match="window of layers"):
        written(directory, tmp_path / "out.gguf")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}, "WordLevel"),
        ({"normalizer": {"type": "Lowercase"}}, "other tokens"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "other tokens"),
    ],
)
def test_a_tokenizer_that_would_give_other_tokens_is_refused(
    change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    directory = tiny_models.with_merges(tiny_models.write_tiny_hf(tmp_path / "m"))
    path = directory / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))

    with pytest.raises((WorkflowError, ModelError), match=says):
        written(directory, tmp_path / "out.gguf")

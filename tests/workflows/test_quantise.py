"""Files of `phasewise quantise`: a GGUF file's keys, and its numbers as the gguf package rounds them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import gguf
import numpy as np
import pytest

from phasewise.cython_kernels.packing import unpack
from phasewise.serving.loaders import load_model
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.quantise.run import quantise, type_of
from phasewise.workflows.quantise.settings import QuantFormat, QuantiseSettings
from tests.support.models import family_cases, family_gguf_files, tiny_models

ANEW = ("GGUF.", "general.file_type", "general.quantization_version")
"""Beginnings of keys that are the file's own."""
BOUNDS = {"q8_0": 0.01, "q5_1": 0.05, "q5_0": 0.06, "q4_1": 0.1, "q4_0": 0.15, "mxfp4": 0.2, "bf16": 0.004}


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


def tiny(path: Path, name: str = "gemma2") -> Path:
    family_gguf_files.write_family_gguf(path, name)
    return path


def keys(file: gguf.GGUFReader) -> dict[str, tuple[Any, Any]]:
    return {
        key: (field.types, field.contents()) for key, field in file.fields.items() if not key.startswith(ANEW)
    }


@pytest.mark.parametrize("name", [name for name, case in family_cases.FAMILY_CASES.items() if case.gguf])
def test_numbers_are_rounded_as_by_the_gguf_package_and_keys_stay(name: str, tmp_path: Path) -> None:
    plain = gguf.GGUFReader(tiny(tmp_path / f"{name}.gguf", name))

    ours = written(tmp_path / f"{name}.gguf", tmp_path / "ours.gguf")

    tied = all(tensor.name != "output.weight" for tensor in plain.tensors)
    expected = {}
    for tensor in plain.tensors:
        kind = type_of(tensor.name, tuple(tensor.shape[::-1].tolist()), "q8_0", tied=tied)
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        numbers = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind])
        expected[tensor.name] = kind, tuple(tensor.shape.tolist()), np.asarray(numbers).tobytes()
    assert tensors(ours) == expected
    assert keys(ours) == keys(plain)


@pytest.mark.parametrize("quant_format", get_args(QuantFormat))
def test_a_written_model_loads_and_is_near_the_original(quant_format: QuantFormat, tmp_path: Path) -> None:
    plain = tiny(tmp_path / "m.gguf")

    file = written(plain, tmp_path / "out.gguf", quant_format)

    kind = next(tensor for tensor in file.tensors if tensor.name == "blk.0.ffn_up.weight").tensor_type
    assert kind.name == quant_format.upper()
    original = load_model(str(plain), "f32", cache_dir=tmp_path / "c")
    model = load_model(str(tmp_path / "out.gguf"), "f32", cache_dir=tmp_path / "c")
    assert model.weights.keys() == original.weights.keys()
    for key, weight in original.weights.items():
        numbers, back = unpack(weight), unpack(model.weights[key])
        assert np.square(back - numbers).mean() <= BOUNDS[quant_format] ** 2 * np.square(numbers).mean(), key


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    plain = tiny(tmp_path / "m.gguf")

    for name in ("a", "b"):
        written(plain, tmp_path / f"{name}.gguf", "q4_0")

    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_quantised_weights_are_rounded_again_only_where_that_is_asked_for(tmp_path: Path) -> None:
    written(tiny(tmp_path / "m.gguf"), tmp_path / "first.gguf")

    with pytest.raises(WorkflowError, match="--requantise"):
        written(tmp_path / "first.gguf", tmp_path / "second.gguf")
    again = written(tmp_path / "first.gguf", tmp_path / "second.gguf", requantise=True)

    first = gguf.GGUFReader(tmp_path / "first.gguf")
    assert tensors(again) == tensors(first)
    assert keys(again) == keys(first)


def test_a_file_that_exists_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    out.write_text("mine")

    with pytest.raises(WorkflowError, match="exists already"):
        written(tiny(tmp_path / "m.gguf"), out)

    assert out.read_text() == "mine"


def test_a_directory_is_refused_with_the_converter_s_name(tmp_path: Path) -> None:
    with pytest.raises(WorkflowError, match=r"convert_hf_to_gguf\.py"):
        written(tiny_models.write_tiny_hf(tmp_path / "m"), tmp_path / "out.gguf")

    assert not [*tmp_path.glob("*out*")]


@pytest.mark.parametrize("quant_format", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_numbers_too_large_for_a_scale_are_refused(quant_format: QuantFormat, tmp_path: Path) -> None:
    path = tiny(tmp_path / "m.gguf")
    numbers = next(t.data for t in gguf.GGUFReader(path, "r+").tensors if t.name == "blk.0.ffn_up.weight")
    numbers[:] = 1e30
    numbers.flush()

    with pytest.raises(WorkflowError, match=f"too large for {quant_format.upper()}"):
        written(path, tmp_path / "out.gguf", quant_format)


@pytest.mark.parametrize(
    ("name", "shape", "quant_format", "tied", "expected"),
    [
        ("blk.0.attn_q.weight", (64, 256), "q4_0", True, "Q4_0"),
        ("blk.0.attn_q.weight", (64, 100), "q5_1", True, "F16"),
        ("blk.0.attn_q.weight", (64, 100), "bf16", True, "BF16"),
        ("token_embd.weight", (999, 256), "q4_1", True, "Q8_0"),
        ("token_embd.weight", (999, 256), "q4_1", False, "Q4_1"),
        ("output.weight", (999, 256), "q4_0", False, "Q8_0"),
        ("output.weight", (999, 256), "bf16", False, "BF16"),
        ("blk.3.ffn_gate_exps.weight", (8, 64, 256), "mxfp4", False, "MXFP4"),
        ("blk.3.ffn_gate_inp.weight", (8, 256), "q4_0", False, "F32"),
        ("blk.3.attn_norm.weight", (256,), "q4_0", False, "F32"),
        ("blk.3.attn_q.bias", (256,), "q8_0", False, "F32"),
    ],
)
def test_heads_keep_eight_bits_and_vectors_all(
    name: str, shape: tuple[int, ...], quant_format: QuantFormat, tied: bool, expected: str
) -> None:
    assert type_of(name, shape, quant_format, tied=tied) == expected

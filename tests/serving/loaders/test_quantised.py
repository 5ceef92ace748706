"""A quantised checkpoint of every format loads as the numbers that were packed; a wrong one is one clear
line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import sparse
from phasewise.cython_kernels.packing import unpack
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.quantised.scheme import quantisation_of
from phasewise.serving.loaders.quantised.tensors import IntegerWeight, significant_bits
from phasewise.serving.loaders.storage import StorageChoice
from tests.support.models.quantised_models import CASES, Case, write_quantised_hf
from tests.support.models.tiny_models import TinyShape, file_of
from tests.support.tiers import examples

PARTS = {"qkv": ("q", "k", "v"), "gate_up": ("gate", "up"), "o": ("o",), "down": ("down",)}


def stacked(worth: dict[str, np.ndarray], name: str) -> np.ndarray:
    block = "mlp" if name in ("gate_up", "down") else "self_attn"
    return np.concatenate([worth[f"model.layers.0.{block}.{part}_proj.weight"] for part in PARTS[name]])


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_worth_what_was_packed(tmp_path: Path, name: str) -> None:
    worth = write_quantised_hf(tmp_path / "m", CASES[name])

    weights = load_model(str(tmp_path / "m"), "native", tmp_path).weights

    for part in PARTS:
        weight = weights[f"layers.0.{part}"]
        assert weight.kind == CASES[name].kind
        assert np.array_equal(unpack(weight), stacked(worth, part)), part


@pytest.mark.parametrize("name", ["w4a16", "w8a8", "awq", "gptq-act-order", "fp8-inv", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("weight_format", ["f32", "int8", "int4", "bf16"])
def test_every_format_is_kept_in_another(tmp_path: Path, name: str, weight_format: str) -> None:
    """f32 holds every number; what is rounded is near."""
    worth = write_quantised_hf(tmp_path / "m", CASES[name])

    weight = load_model(str(tmp_path / "m"), weight_format, tmp_path).weights["layers.0.down"]

    got, want = unpack(weight), stacked(worth, "down")
    if weight_format == "f32":
        assert np.array_equal(got, want)
    assert np.abs(got - want).max() <= 0.1 * np.abs(want).max()


def test_bytes_with_rows_of_bytes_have_one_scale_a_column(tmp_path: Path) -> None:
    write_quantised_hf(tmp_path / "m", CASES["w8a8"])
    weight = load_model(str(tmp_path / "m"), "native", tmp_path).weights["layers.0.qkv"]
    assert (weight.kind, weight.group, weight.mins) == ("q8", 0, None)


def test_pruned_bytes_with_one_scale_a_column_are_stored_sparse_and_are_the_same_numbers(
    tmp_path: Path,
) -> None:
    write_quantised_hf(tmp_path / "m", CASES["w8a8-pruned"])
    dense, stored = (
        load_model(str(tmp_path / "m"), "native", tmp_path, storage=StorageChoice(mode))
        for mode in ("never", "always")
    )
    for name in ("layers.0.qkv", "layers.0.gate_up"):
        weight = stored.weights[name]
        assert (weight.kind, weight.group) == ("q8", 0)
        assert sparse.density(weight) == pytest.approx(0.4, abs=0.05)
        assert weight.nbytes < dense.weights[name].nbytes
        assert np.array_equal(unpack(weight), unpack(dense.weights[name]))


def test_fp8_of_large_scales_is_float32(tmp_path: Path) -> None:
    def scaled(parts: Any) -> None:
        parts.update(weight_scale=("F32", np.array([130.0], np.float32)))

    for change, kind in ((lambda _: None, "fp8"), (scaled, "f32")):
        write_quantised_hf(tmp_path / kind, _with_parts(CASES["fp8"], change))
        assert load_model(str(tmp_path / kind), "native", tmp_path).weights["layers.0.o"].kind == kind


def test_scales_that_float16_does_not_hold_are_float32(tmp_path: Path) -> None:
    for name, dtype in (("w4a16", np.float16), ("w4a16-bf16", np.float16), ("w4a16-f32", np.float32)):
        write_quantised_hf(tmp_path / name, CASES[name])
        weight = load_model(str(tmp_path / name), "native", tmp_path).weights["layers.0.o"]
        assert weight.scales is not None
        assert weight.scales.dtype == dtype


@examples(60)
@given(
    n=st.integers(1, 20),
    groups=st.integers(1, 5),
    group=st.sampled_from((8, 16, 32, 48, 64)),
    bits=st.integers(1, 8),
    scale_bits=st.sampled_from((8, 11, 24)),
    zeros=st.booleans(),
    byte_rows=st.booleans(),
    permuted=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_integers_are_never_rounded_twice(
    n: int,
    groups: int,
    group: int,
    bits: int,
    scale_bits: int,
    zeros: bool,
    byte_rows: bool,
    permuted: bool,
    seed: int,
) -> None:
    """Whatever the bits, the groups and the scales: the number is that of one product in float32."""
    rng = np.random.default_rng(seed)
    k = groups * group
    codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    mantissas = rng.integers(1 << (scale_bits - 1), 1 << scale_bits, (n, groups))
    scales = np.ldexp(mantissas.astype(np.float64), -scale_bits - 6).astype(np.float32)
    zero = rng.integers(0, (1 << bits) + 1, (n, groups)) if zeros else np.full((n, groups), 1 << (bits - 1))
    order = rng.permutation(np.arange(k) // group) if permuted else None
    weight = IntegerWeight(
        n, k, bits, group, lambda a, b: codes[a:b], scales, zero.astype(np.int16), byte_rows, order
    )

    got = _dequantised(weight.reader()(0, n))

    of = order if order is not None else np.arange(k) // group
    want = (codes.astype(np.int32) - zero[:, of]).astype(np.float32) * scales[:, of]
    assert np.array_equal(got, want)


def _dequantised(rows: Any) -> np.ndarray:
    from phasewise.cython_kernels.packing import dequantise

    return rows if isinstance(rows, np.ndarray) else dequantise(rows)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8))
def test_significant_bits_are_those_between_the_first_and_the_last(numbers: list[float]) -> None:
    def bits(number: float) -> int:
        whole = abs(int(np.ldexp(number, 149)))
        return len(bin(whole).rstrip("0")) - 2 if whole else 1

    assert significant_bits(np.array(numbers, np.float32)) == max(bits(number) for number in numbers)


def _refused(directory: Path, cache: Path) -> str:
    with pytest.raises(ModelError) as refusal:
        load_model(str(directory), "native", cache)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


SETTINGS: dict[str, tuple[Any, str]] = {
    "method": ({"quant_method": "bitsandbytes"}, "'bitsandbytes', which cannot run"),
    "no object": ("gptq", "'gptq', which cannot run"),
    "awq gemv": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    "awq of 3 bits": ({"quant_method": "awq", "bits": 3}, "other than of 4 bits"),
    "awq, unknown": ({"quant_method": "awq", "bits": 4, "rotation": 1},
     "'rotation', which is not known here"),
    "gptq of 3 bits": ({"quant_method": "gptq", "bits": 3}, "bits = 3"),
    "gptq, bits": ({"quant_method": "gptq", "bits": "4"}, "bits = '4'"),
    "gptq, marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    "gptq, mixed": ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": 1}}, "layer by layer"),
    "fp8, fmt": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt = 'e5m2'"),
    "fp8, block": ({"quant_method": "fp8", "weight_block_size": [128]}, "blocks of [128]"),
    "kv": ({"quant_method": "compressed-tensors", "config_groups": {"a": {}},
     "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    "transform": ({"quant_method": "compressed-tensors", "config_groups": {"a": {}},
     "transform_config": {"r1": 1}}, "transform_config"),
    "no weights": ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}},
     "whose weights are None"),
    "group": ({"quant_method": "compressed-tensors", "config_groups": {"a": 1}}, "config group 1"),
    "format": ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}, "format": "marlin-24"},
     "'marlin-24'"),
    "sparse too": ({"quant_method": "compressed-tensors", "config_groups": {"a": {}},
     "sparsity_config": {"format": "sparse-24-bitmask"}}, "both quantised and sparse"),
    "bits": ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 9}}}},
     "num_bits = 9"),
    "key": ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4,
     "swizzle": 1}}}}, "'swizzle'"),
    "dynamic": ({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4,
     "dynamic": True}}}}, "while they run"),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_that_cannot_run_is_refused_by_name(name: str) -> None:
    config, message = SETTINGS[name]
    with pytest.raises(ModelError) as refusal:
        quantisation_of(config, None)
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def _with_parts(case: Case, change: Any) -> Case:
    """The case with each weight's parts changed."""

    def make(rng: np.random.Generator, n: int, k: int) -> Any:
        weight = case.make(rng, n, k)
        change(weight.parts)
        return weight

    return replace(case, make=make)


DAMAGES: dict[str, tuple[str, Any, str]] = {
    "no scale": ("w4a16", lambda parts: parts.pop("weight_scale"), "lacks its weight_scale"),
    "no shape": ("w4a16", lambda parts: parts.pop("weight_shape"), "lacks its weight_shape"),
    "no zeros": ("w4a16-zeros", lambda parts: parts.pop("weight_zero_point"), "lacks its weight_zero_point"),
    "a shape of none": ("w4a16", lambda parts: parts.update(weight_shape=("I64", np.array([0, 1 << 40]))),
     "two sizes expected"),
    "words": ("w4a16", lambda parts: parts.update(weight_packed=("I32", parts["weight_packed"][1][:, :-1])),
     "no number of bits packs it"),
    "groups": ("w4a16", lambda parts: parts.update(weight_scale=("F16",
     np.ones((len(parts["weight_scale"][1]), 3), np.float16))), "equal groups expected"),
    "an order beyond": ("gptq-act-order", lambda parts: parts.update(g_idx=("I32", parts["g_idx"][1] + 1)),
     "in groups 1 to"),
    "awq zeros": ("awq", lambda parts: parts.update(qzeros=("I32", parts["qzeros"][1][:, :-1])), "qzeros as"),
    "a global scale of 0": ("nvfp4", lambda parts: parts.update(weight_global_scale=("F32", np.zeros(1,
     np.float32))), "one, from 2"),
    "a scale that is no number": ("nvfp4", lambda parts: parts.update(weight_scale=("F8_E4M3",
     np.full_like(parts["weight_scale"][1], 0xFF))), "NaN or infinity"),
    "blocks": ("fp8-inv", lambda parts: parts.update(weight_scale_inv=("F32", np.ones((9, 9), np.float32))),
     "nor one a block"),
    "not a number": ("fp8", lambda parts: parts.update(weight=("F8_E4M3", np.full_like(parts["weight"][1],
     0x7F))), "NaN or infinity"),
    "an unknown part": ("w4a16", lambda parts: parts.update(weight_global_scale=("F32", np.ones(1,
     np.float32))), "with which it cannot be read"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_parts_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    case, change, message = DAMAGES[name]
    write_quantised_hf(tmp_path / "m", _with_parts(CASES[case], change))
    assert message in _refused(tmp_path / "m", tmp_path)


def test_a_format_that_the_config_does_not_state_is_refused(tmp_path: Path) -> None:
    write_quantised_hf(tmp_path / "m", replace(CASES["w4a16"], config=CASES["fp8"].config))
    assert "says nothing" in _refused(tmp_path / "m", tmp_path)


def test_biases_of_zeros_are_no_tensors(tmp_path: Path) -> None:
    """GPTQ's packages write one for every layer; any other is refused."""

    def biased(value: float) -> Case:
        def change(parts: Any) -> None:
            parts["bias"] = "F16", np.full(parts["scales"][1].shape[1], value, np.float16)

        return _with_parts(CASES["gptq"], change)

    small = TinyShape(n_layers=1, hidden=64, ffn=64, n_heads=1, n_kv_heads=1, head_dim=64, vocab_size=261)
    write_quantised_hf(tmp_path / "zero", biased(0.0), small)
    load_model(str(tmp_path / "zero"), "native", tmp_path)
    write_quantised_hf(tmp_path / "one", biased(1.0), small)
    assert "bias" in _refused(tmp_path / "one", tmp_path)


def test_a_plain_directory_with_a_file_of_gptq_is_read_by_its_tensors(tmp_path: Path) -> None:
    """quantize_config.json beside plain weights asks for nothing."""
    from tests.support.models.tiny_models import write_tiny_hf

    directory = write_tiny_hf(tmp_path / "m")
    (directory / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128}))
    assert load_model(str(directory), "native", tmp_path).weights["embed"].kind == "f32"


def test_the_writer_of_this_test_writes_safetensors(tmp_path: Path) -> None:
    from safetensors.numpy import load

    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    assert np.array_equal(load(file_of({"a": ("I32", array)}))["a"], array)

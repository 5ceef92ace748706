"""Tiny directories in every quantised format that is read, packed by the formats' own rules with numpy alone.

Codes, zero points and scales are drawn first; what a weight is worth is s (q - z) of what was drawn."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels.packing import from_bf16, to_bf16
from tests.support.models.tiny_models import TinyShape, file_of, tiny_weights, write_tiny_hf

Array = npt.NDArray[Any]
Parts = dict[str, tuple[str, Array]]  # by part: the file's name of the type, and the bytes as numpy has them

SHAPE = TinyShape(n_layers=1, hidden=128, ffn=256, n_heads=2, n_kv_heads=2, head_dim=64, vocab_size=261)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


@dataclass(frozen=True)
class Made:
    """A weight's parts, and what it is worth."""

    parts: Parts
    worth: Array


Maker = Callable[[np.random.Generator, int, int], Made]


@dataclass(frozen=True)
class Case:
    """A format: how a weight is made, what config.json says, and the kind in memory that its weights get."""

    make: Maker
    config: Mapping[str, Any]
    kind: str
    file_name: str = "config.json"


def floats(rng: np.random.Generator, dtype: str, shape: tuple[int, ...], step: float) -> tuple[Array, Array]:
    """Drawn scales about `step`, as the file has them and as float32."""
    drawn = (step * rng.uniform(0.5, 2.0, shape)).astype(np.float32)
    if dtype == "BF16":
        bits = to_bf16(drawn)
        return bits, from_bf16(bits)
    own = drawn.astype(np.float16 if dtype == "F16" else np.float32)
    return own, own.astype(np.float32)


def words(codes: Array, bits: int) -> Array:
    """int32 along the last axis, the lowest bits first."""
    flags = (codes[..., None] >> np.arange(bits)) & 1
    flat = flags.reshape(*codes.shape[:-1], -1).astype(np.uint8)
    flat = np.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 32)])
    return np.packbits(flat, axis=-1, bitorder="little").view("<i4")


def times(codes: Array, zeros: Array, scales: Array, group: Array) -> Array:
    """s (q - z), [n, k]; group: of each input."""
    return (codes.astype(np.int32) - zeros.astype(np.int32)[:, group]).astype(np.float32) * scales[:, group]


def pack_quantized(
    bits: int, group: int | None, dtype: str, *, zeros: bool = False, act_order: bool = False
) -> Maker:
    """compressed-tensors. group None: one scale for each output."""

    def make(rng: np.random.Generator, n: int, k: int) -> Made:
        size = group or k
        codes = rng.integers(0, 1 << bits, (n, k), dtype=np.uint8)
        stored, scales = floats(rng, dtype, (n, k // size), 0.6 / (1 << bits))
        zero = rng.integers(0, 1 << bits, scales.shape) if zeros else np.full(scales.shape, 1 << (bits - 1))
        order = np.arange(k) // size
        parts: Parts = {
            "weight_packed": ("I32", words(codes, bits)),
            "weight_scale": (dtype, stored),
            "weight_shape": ("I64", np.array([n, k])),
        }
        if zeros:
            parts["weight_zero_point"] = (
                "I32",
                np.ascontiguousarray(words(np.ascontiguousarray(zero.T), bits).T),
            )
        if act_order:
            order = rng.permutation(order)
            parts["weight_g_idx"] = "I32", order.astype(np.int32)
        return Made(parts, times(codes, zero, scales, order))

    return make


def int_quantized(dtype: str, *, zeros: bool = False, kept: float = 1.0) -> Maker:
    """zeros: there are zero points. kept: the share of the codes that are not 0."""

    def make(rng: np.random.Generator, n: int, k: int) -> Made:
        codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
        codes[rng.random((n, k)) >= kept] = 0
        stored, scales = floats(rng, dtype, (n, 1), 0.004)
        zero = rng.integers(-100, 100, (n, 1)).astype(np.int8) if zeros else np.zeros((n, 1), np.int8)
        parts: Parts = {"weight": ("I8", codes), "weight_scale": (dtype, stored)}
        if zeros:
            parts["weight_zero_point"] = "I8", zero
        return Made(parts, times(codes, zero, scales, np.zeros(k, int)))

    return make


def e4m3(codes: Array) -> Array:
    """The worth of the codes, by the definition of the type."""
    exponent, fraction = codes >> 3 & 15, (codes & 7).astype(np.float64)
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent.astype(int) - 10))
    return np.where(codes & 128, -size, size).astype(np.float32)


def fp8(
    strategy: str, dtype: str, part: str = "weight_scale", power: bool = False, width: int = 128
) -> Maker:
    """strategy: tensor, channel, or block, of 128 outputs and `width` inputs."""

    def make(rng: np.random.Generator, n: int, k: int) -> Made:
        codes = rng.integers(0, 256, (n, k), dtype=np.uint8)
        codes[codes & 127 == 127] = 0
        blocks = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // width))}[strategy]
        stored, scales = floats(rng, dtype, blocks, 1e-3)
        if power:
            scales = np.exp2(np.round(np.log2(scales))).astype(np.float32)
            stored = to_bf16(scales) if dtype == "BF16" else scales
        grid = scales
        if strategy == "block":
            grid = np.repeat(np.repeat(scales, 128, axis=0)[:n], width, axis=1)[:, :k]
        return Made({"weight": ("F8_E4M3", codes), part: (dtype, stored)}, e4m3(codes) * grid)

    return make


def nvfp4(rng: np.random.Generator, n: int, k: int) -> Made:
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    scale_codes = rng.integers(0x40, 0x7F, (n, k // 16), dtype=np.uint8) | rng.choice(
        np.array([0, 0x80], np.uint8), (n, k // 16)
    )
    whole = np.array([rng.uniform(1000, 9000)], np.float32)
    values = np.where(codes & 8, -1, 1).astype(np.float32) * FP4[codes & 7]
    scales = e4m3(scale_codes) / whole
    parts: Parts = {
        "weight_packed": ("U8", codes[:, ::2] | codes[:, 1::2] << 4),
        "weight_scale": ("F8_E4M3", scale_codes),
        "weight_global_scale": ("F32", whole),
    }
    return Made(parts, values * np.repeat(scales, 16, axis=1))


def mxfp4(rng: np.random.Generator, n: int, k: int) -> Made:
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    exponents = rng.integers(118, 125, (n, k // 32), dtype=np.uint8)
    values = np.where(codes & 8, -1, 1).astype(np.float32) * FP4[codes & 7]
    scales = np.exp2(exponents.astype(np.float32) - 127)
    parts: Parts = {
        "weight_packed": ("U8", codes[:, ::2] | codes[:, 1::2] << 4),
        "weight_scale": ("U8", exponents),
    }
    return Made(parts, values * np.repeat(scales, 32, axis=1))


def awq(group: int) -> Maker:
    def make(rng: np.random.Generator, n: int, k: int) -> Made:
        def packed(codes: Array) -> Array:
            """Eight outputs to a word: place i holds output (0, 2, 4, 6, 1, 3, 5, 7)[i]."""
            places = codes.reshape(*codes.shape[:-1], -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]]
            return words(np.ascontiguousarray(places.reshape(codes.shape)), 4)

        codes = rng.integers(0, 16, (k, n), dtype=np.uint8)
        zero = rng.integers(0, 16, (k // group, n), dtype=np.uint8)
        stored, scales = floats(rng, "F16", zero.shape, 0.03)
        parts: Parts = {
            "qweight": ("I32", packed(codes)),
            "qzeros": ("I32", packed(zero)),
            "scales": ("F16", stored),
        }
        return Made(parts, times(codes.T, zero.T, scales.T, np.arange(k) // group))

    return make


def gptq(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False, offset: int = 1) -> Maker:
    def make(rng: np.random.Generator, n: int, k: int) -> Made:
        codes = rng.integers(0, 1 << bits, (k, n), dtype=np.uint8)
        shape = (k // group, n)
        zero = np.full(shape, 1 << (bits - 1)) if symmetric else rng.integers(1, 1 << bits, shape)
        stored, scales = floats(rng, "F16", shape, 0.6 / (1 << bits))
        order = np.arange(k) // group
        if act_order:
            order = rng.permutation(order)
        parts: Parts = {
            "qweight": ("I32", np.ascontiguousarray(words(np.ascontiguousarray(codes.T), bits).T)),
            "qzeros": ("I32", words(zero - offset, bits)),
            "scales": ("F16", stored),
            "g_idx": ("I32", order.astype(np.int32)),
        }
        return Made(parts, times(codes.T, zero.T, scales.T, order))

    return make


def compressed(
    form: str, weights: Mapping[str, Any], rows: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """config.json of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": dict(weights),
        "input_activations": rows,
        "output_activations": None,
    }
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
            "kv_cache_scheme": None,
            "quantization_status": "compressed",
        }
    }


def _integers(bits: int, group: int | None, *, symmetric: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, **strategy}


_BYTE_ROWS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
_E4M3 = {"num_bits": 8, "type": "float", "symmetric": True}
_FP8 = {
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    }
}


def _gptq(bits: int, **more: Any) -> dict[str, Any]:
    return {"bits": bits, "group_size": 64, "sym": True, "desc_act": False, "damp_percent": 0.01, **more}


def _stated(method: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **fields}}


_W4 = compressed("pack-quantized", _integers(4, 64))
_W4_ZEROS = compressed("pack-quantized", _integers(4, 64, symmetric=False))
_BLOCK = {**_E4M3, "strategy": "block", "block_structure": [128, 128]}

CASES: dict[str, Case] = {
    "w4a16": Case(pack_quantized(4, 64, "F16"), _W4, "q4"),
    "w4a16-bf16": Case(pack_quantized(4, 64, "BF16"), _W4, "q4"),
    "w4a16-f32": Case(pack_quantized(4, 64, "F32"), _W4, "q4"),
    "w4a16-zeros": Case(pack_quantized(4, 64, "BF16", zeros=True), _W4_ZEROS, "q4"),
    "w4a16-zeros-f32": Case(pack_quantized(4, 64, "F32", zeros=True), _W4_ZEROS, "q8"),
    "w4a16-channel": Case(pack_quantized(4, None, "BF16"), compressed("pack-quantized", _integers(4, None)),
     "q4"),
    "w4a16-act-order": Case(pack_quantized(4, 64, "F16", act_order=True), _W4, "f32"),
    "w3a16": Case(pack_quantized(3, 32, "F16"), compressed("pack-quantized", _integers(3, 32)), "q4"),
    "w8a16": Case(pack_quantized(8, 32, "BF16"), compressed("pack-quantized", _integers(8, 32)), "q8"),
    "w8a8": Case(int_quantized("BF16"), compressed("int-quantized", _integers(8, None), _BYTE_ROWS), "q8"),
    "w8a8-pruned": Case(int_quantized("BF16", kept=0.4), compressed("int-quantized", _integers(8, None),
     _BYTE_ROWS), "q8"),
    "w8a8-zeros": Case(int_quantized("BF16", zeros=True), compressed("int-quantized", _integers(8, None,
     symmetric=False), _BYTE_ROWS), "q8"),
    "fp8": Case(fp8("tensor", "F32"), compressed("float-quantized", {**_E4M3, "strategy": "tensor"}), "fp8"),
    "fp8-channel": Case(fp8("channel", "BF16"), compressed("float-quantized", {**_E4M3,
     "strategy": "channel"}), "fp8"),
    "fp8-block": Case(fp8("block", "F32"), compressed("float-quantized", _BLOCK), "fp8"),
    "fp8-power": Case(fp8("channel", "F32", power=True), compressed("float-quantized", {**_E4M3,
     "strategy": "channel"}), "fp8"),
    "fp8-inv": Case(fp8("block", "F32", "weight_scale_inv"), _FP8, "fp8"),
    "fp8-narrow": Case(fp8("block", "F32", "weight_scale_inv", width=64), _stated("fp8",
     {"weight_block_size": [128, 64]}), "f32"),
    "nvfp4": Case(nvfp4, compressed("nvfp4-pack-quantized", {"num_bits": 4, "type": "float",
     "strategy": "tensor_group", "group_size": 16}), "nvfp4"),
    "mxfp4": Case(mxfp4, compressed("mxfp4-pack-quantized", {"num_bits": 4, "type": "float",
     "strategy": "group", "group_size": 32}), "mxfp4"),
    "awq": Case(awq(64), _stated("awq", {"bits": 4, "group_size": 64, "zero_point": True,
     "version": "gemm"}), "q4"),
    "gptq": Case(gptq(4, 64), _stated("gptq", _gptq(4)), "q4"),
    "gptq-zeros": Case(gptq(4, 64, symmetric=False), _stated("gptq", _gptq(4, sym=False)), "q4"),
    "gptq-v2": Case(gptq(4, 64, symmetric=False, offset=0), _stated("gptq", _gptq(4,
     checkpoint_format="gptq_v2")), "q4"),
    "gptq-act-order": Case(gptq(4, 64, act_order=True), _stated("gptq", _gptq(4, desc_act=True)), "f32"),
    "gptq-8": Case(gptq(8, 64), _stated("gptq", _gptq(8)), "q8"),
    "gptq-2": Case(gptq(2, 64), _stated("gptq", _gptq(2)), "q4"),
    "gptq-file": Case(gptq(4, 64), _gptq(4), "q4", "quantize_config.json"),
}  # fmt: skip


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_quantised_hf(
    directory: Path, case: Case, shape: TinyShape = SHAPE, architecture: str = "llama", seed: int = 0
) -> dict[str, Array]:
    """A directory whose linear layers are quantised; what each of them is worth, by its name."""
    config = case.config if case.file_name == "config.json" else {}
    write_tiny_hf(directory, architecture, shape=shape, config=config)
    if case.file_name != "config.json":
        (directory / case.file_name).write_text(json.dumps(case.config))
    rng = np.random.default_rng(seed)
    tensors: Parts = {}
    worth: dict[str, Array] = {}
    for name, values in tiny_weights(architecture, shape, seed).items():
        if not is_quantised(name):
            tensors[name] = "F32", values.astype(np.float32)
            continue
        quantised = case.make(rng, *values.shape)
        worth[name] = quantised.worth
        tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in quantised.parts.items()}
    (directory / "model.safetensors").write_bytes(file_of(tensors))
    return worth

"""A tiny random model of every family in `family_cases`, as a Hugging Face directory.

Tensors have the names of published checkpoints. The same raw bits as a GGUF file: `family_gguf_files`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import tiny_models
from tests.support.models.family_cases import ALL_CASES, LONG_CASES, N_LONG_PROMPT, SHAPE, FamilyCase
from tests.support.models.reference_models import FIXTURES, raw_values

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
Arrays = dict[str, np.ndarray]


def write_long_hf(folder: Path, name: str) -> Path:
    """A Hugging Face directory of one of LONG_CASES."""
    changes = {"max_position_embeddings": 16384, **LONG_CASES[name]}
    return write_family_hf(folder, name, changes)


def long_prompt(name: str) -> list[int]:
    """Token ids of the prompt of one of LONG_CASES."""
    drawn = np.random.PCG64(list(LONG_CASES).index(name)).random_raw(N_LONG_PROMPT)
    return (drawn % np.uint64(SHAPE.vocab_size)).astype(int).tolist()


def family_weights(name: str) -> Arrays:
    """Every tensor in float32 by the name that published checkpoints give it."""
    shapes = _shapes(name)
    values = {tensor: raw_values(f"{name}/{tensor}", shape) for tensor, shape in shapes.items()}
    if ALL_CASES[name].fields["tie_word_embeddings"]:  # else every token would predict itself
        values["model.embed_tokens.weight"] *= np.float32(0.05)
    if ALL_CASES[name].logit_size != 1:
        values[_last_norm(ALL_CASES[name])] *= np.float32(ALL_CASES[name].logit_size)
    for tensor in shapes:
        if tensor.endswith("act_fn.eps"):  # below 0
            values[tensor] -= np.float32(1.3)
    if ALL_CASES[name].unit_norms:
        values |= {
            tensor: value - 1
            for tensor, value in values.items()
            if "norm" in tensor and "linear_attn" not in tensor
        }
    return values


def _shapes(name: str) -> dict[str, tuple[int, ...]]:
    """As recorded of published checkpoints or of transformers; of experts the first one's stand for all."""
    recorded = json.loads((FIXTURES / "family_shapes.json").read_text())[name]
    fields = ALL_CASES[name].fields
    count = next((fields[key] for key in EXPERT_COUNTS if key in fields), 1)
    return {
        tensor.replace(".experts.0.", f".experts.{expert}."): tuple(shape)
        for tensor, shape in recorded.items()
        for expert in range(count if ".experts.0." in tensor else 1)
    }


def _last_norm(case: FamilyCase) -> str:
    return "model.embedding_norm.weight" if case.model_type.startswith("lfm2") else "model.norm.weight"


def family_prompts(name: str) -> list[list[int]]:
    """Token ids of a model's prompts."""
    case = ALL_CASES[name]
    return [
        (np.random.PCG64(seed).random_raw(length) % np.uint64(SHAPE.vocab_size)).astype(int).tolist()
        for length, seed in zip(case.prompt_lengths, case.prompt_seeds or case.prompt_lengths, strict=True)
    ]


def write_family_hf(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> Path:
    """A Hugging Face directory in float32; `changes` replace fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**ALL_CASES[name].fields, **(changes or {})}
    if "vision_config" in fields:
        outer = {
            key: fields.pop(key) for key in ("model_type", "architectures", "vision_config") if key in fields
        }
        fields = {**outer, "text_config": {**fields, "model_type": f"{outer['model_type']}_text"}}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text(tiny_models.tokenizer_json(SHAPE))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(tiny_models.safetensors_bytes(family_weights(name)))
    return folder


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of MXFP4's codes (OCP Microscaling Formats 1.0, section 5.3.3)."""


def write_mxfp4_hf(folder: Path) -> Arrays:
    """A gpt-oss whose experts are in MXFP4, as published; what they mean, by "layer.part"."""
    from safetensors.numpy import save_file

    write_family_hf(folder, "gpt-oss", {"hidden_size": 64, "intermediate_size": 64})
    rng = np.random.default_rng(5)
    n_experts, shapes = 8, {"gate_up_proj": (128, 64), "down_proj": (64, 64)}
    weights, drawn = family_weights("gpt-oss"), {}
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts."
        for part, (n, k) in shapes.items():
            del weights[f"{stem}{part}"]
            codes = rng.integers(0, 16, (n_experts, n, k), dtype=np.uint8)
            exponents = rng.integers(120, 126, (n_experts, n, k // 32), dtype=np.uint8)
            weights[f"{stem}{part}_bias"] = rng.standard_normal((n_experts, n)).astype(np.float32)
            weights[f"{stem}{part}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(
                n_experts, n, k // 32, 16
            )
            weights[f"{stem}{part}_scales"] = exponents
            drawn[f"{layer}.{part}"] = E2M1[codes] * np.repeat(2.0 ** (exponents - 127.0), 32, axis=2)
    save_file(weights, folder / "model.safetensors")
    return drawn

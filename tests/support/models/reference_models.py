"""The models whose tokens and logits are compared with transformers', and how the fixtures are laid out.

The tiny models are not stored: their weights come from PCG64's raw bits, which are the same everywhere. The
script that makes the fixtures writes the same files and runs transformers on them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import tiny_models
from tests.support.models.tiny_models import TinyShape

FIXTURES = Path(__file__).parents[2] / "data" / "reference"
N_GREEDY = 64
"""Tokens decoded after every prompt of the default model; end tokens do not end it."""
N_TINY_GREEDY = 16
CHECKED_TINY_STEPS = (0, 1, 15)
CHECKED_STEPS = (0, 1, 7, 31, 63)
"""Steps of the default model whose logits are kept: 0 follows the prompt."""
N_TOP = 50
N_SPREAD = 200
"""Logits kept of each checked step: the largest, and those of fixed ids spread over the vocabulary."""
N_TESTED_WINDOWS = 4
"""Windows of the perplexity text that the tests compute; benchmarks/perplexity.py computes all."""
TINY_PROMPT_LENGTHS = (1, 7, 40, 150)


@dataclass(frozen=True)
class TinyCase:
    """One tiny model: its kind as transformers calls it, its sizes, and more of its config.json."""

    architecture: str
    shape: TinyShape
    config: Mapping[str, Any] = field(default_factory=dict)


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TINY_CASES: dict[str, TinyCase] = {
    "llama": TinyCase("llama", TinyShape(hidden=80, ffn=112, n_heads=5, n_kv_heads=1, tied=False)),
    "llama3-scaling": TinyCase(
        "llama", TinyShape(), {"rope_scaling": _LLAMA3_SCALING, "rope_theta": 500000.0}
    ),
    "linear-scaling": TinyCase(
        "llama", TinyShape(n_kv_heads=4), {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    ),
    "mistral": TinyCase("mistral", TinyShape(tied=False), {"sliding_window": 24}),
    "qwen2": TinyCase("qwen2", TinyShape(n_layers=3), {"rope_theta": 1000000.0}),
    "qwen3": TinyCase("qwen3", TinyShape(head_dim=32), {"rope_theta": 1000000.0}),
}


def write_tiny_case(folder: Path, name: str) -> Path:
    """A Hugging Face directory of one of TINY_CASES, in float32."""
    case = TINY_CASES[name]
    folder.mkdir(parents=True, exist_ok=True)
    config = {**tiny_models.hf_config(case.architecture, case.shape), **case.config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text(tiny_models.tokenizer_json(case.shape))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(tiny_models.safetensors_bytes(tiny_case_weights(name)))
    return folder


def tiny_case_weights(name: str) -> dict[str, np.ndarray]:
    """Every tensor in float32: the names and shapes of `tiny_models`, values from raw bits."""
    case = TINY_CASES[name]
    model = tiny_models.tiny_weights(case.architecture, case.shape)
    return {tensor: raw_values(f"{name}/{tensor}", like.shape) for tensor, like in model.items()}


def raw_values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Uniform values of a size for their place: matrices that keep lengths, norms near 1. The same on every
    machine."""
    raw = np.random.PCG64(zlib.crc32(name.encode())).random_raw(int(np.prod(shape)))
    unit = (raw >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)
    if len(shape) <= 1:
        return (unit * np.float32(0.25) + np.float32(0 if name.endswith("bias") else 1)).reshape(shape)
    scale = 1.0 if "embed" in name else (3.0 / shape[-1]) ** 0.5 * 1.5
    return (unit * np.float32(scale)).reshape(shape)


def tiny_prompts(name: str) -> list[list[int]]:
    """Token ids of the prompts for a tiny model."""
    vocab_size = TINY_CASES[name].shape.vocab_size
    return [
        (np.random.PCG64(length).random_raw(length) % np.uint64(vocab_size)).astype(int).tolist()
        for length in TINY_PROMPT_LENGTHS
    ]


def spread_ids(vocab_size: int) -> np.ndarray:
    """N_SPREAD ids over the whole vocabulary, always the same."""
    return np.arange(N_SPREAD) * vocab_size // N_SPREAD

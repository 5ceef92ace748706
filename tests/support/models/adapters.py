"""Adapters for tiny models: PEFT directories and GGUF files with drawn numbers, and merged weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.reference_models import FIXTURES, raw_values, tiny_case_weights
from tests.support.models.tiny_models import GgufWriter, gguf_name, interleave_heads, safetensors_bytes

ALL_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "v_proj")

Pairs = dict[str, tuple[np.ndarray, np.ndarray]]
"""By the name of a weight in the model's safetensors: A [rank, inputs] and B [outputs, rank]."""


def drawn_pairs(
    weights: Mapping[str, np.ndarray],
    name: str,
    rank: int = 4,
    targets: Sequence[str] = ALL_TARGETS,
    ranks: Mapping[str, int] | None = None,
) -> Pairs:
    """A pair for every weight of these modules, large enough to change answers. ranks: of some modules."""
    pairs: Pairs = {}
    for weight, values in weights.items():
        module = weight.removesuffix(".weight").rpartition(".")[2]
        if module not in targets:
            continue
        n, k = values.shape
        own = (ranks or {}).get(module, rank)
        pairs[weight] = (
            raw_values(f"{name}/{weight}/a", (own, k)),
            raw_values(f"{name}/{weight}/b", (n, own)),
        )
    return pairs


def write_peft(folder: Path, pairs: Pairs, dtype: str = "float32", **changes: Any) -> Path:
    """A directory as PEFT saves it. changes: of adapter_config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    first = next(iter(pairs.values()))[0] if pairs else np.empty((4, 1))
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": len(first),
        "lora_alpha": 2 * len(first),
        "bias": "none",
        "use_rslora": False,
        "use_dora": False,
        "target_modules": sorted({name.split(".")[-2] for name in pairs}),
        "rank_pattern": {},
        "alpha_pattern": {},
        **changes,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, (a, b) in pairs.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = a, b
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors, dtype))
    return folder


def write_gguf_adapter(
    path: Path, pairs: Pairs, alpha: float, heads: Mapping[str, int], architecture: str = "llama", **more: Any
) -> Path:
    """A file as llama.cpp's converter writes it. heads: of the modules whose rows it interleaves."""
    writer = GgufWriter()
    fields: dict[str, Any] = {
        "general.type": "adapter",
        "general.architecture": architecture,
        "adapter.type": "lora",
        "adapter.lora.alpha": alpha,
        **more,
    }
    for key, value in fields.items():
        writer.add(key, value)
    for name, (a, b) in pairs.items():
        module = name.split(".")[-2]
        theirs = gguf_name(name)
        writer.add_tensor(f"{theirs}.lora_a", a, "F32", 0)
        own = interleave_heads(b, heads[module]) if module in heads else b
        writer.add_tensor(f"{theirs}.lora_b", own, "F32", 0)
    path.write_bytes(writer.to_bytes())
    return path


def merged(weights: Mapping[str, np.ndarray], pairs: Pairs, scale: float) -> dict[str, np.ndarray]:
    """The weights with an adapter in them, in float32 rounded once."""
    out = dict(weights)
    for name, (a, b) in pairs.items():
        out[name] = (weights[name] + scale * (b.astype(np.float64) @ a.astype(np.float64))).astype(np.float32)
    return out


TINY_CASE = "llama3-scaling"
"""The model of `tests.support.models.reference_models` that `CASES` belong to."""
REFERENCE = FIXTURES / "adapters.json"
"""Logits of `CASES` by transformers and PEFT: `tests/data/make_adapters.py`."""


@dataclass(frozen=True)
class AdapterCase:
    """One adapter of the tiny model: its ranks and modules, its file's type, and more of its config."""

    rank: int = 4
    targets: tuple[str, ...] = ALL_TARGETS
    ranks: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    config: Mapping[str, Any] = field(default_factory=dict)


CASES: dict[str, AdapterCase] = {
    "all": AdapterCase(),
    "attention": AdapterCase(16, ATTENTION, dtype="bfloat16"),
    "rslora": AdapterCase(3, ("q_proj", "down_proj"), config={"use_rslora": True, "lora_alpha": 5}),
    "patterns": AdapterCase(
        4,
        ("k_proj", "o_proj", "up_proj"),
        {"o_proj": 7},
        config={
            "rank_pattern": {"o_proj": 7},
            "alpha_pattern": {"model.layers.0.self_attn.k_proj": 3, "up_proj": 12},
        },
    ),
}


def write_case(folder: Path, name: str) -> Path:
    """The PEFT directory of one of CASES."""
    case = CASES[name]
    pairs = drawn_pairs(tiny_case_weights(TINY_CASE), name, case.rank, case.targets, case.ranks)
    fields = {"r": case.rank, "lora_alpha": 2 * case.rank, **case.config}
    return write_peft(folder, pairs, case.dtype, **fields)

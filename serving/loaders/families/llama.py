"""Llama, Mistral and Mixtral. GGUF files call all three llama."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.loaders.cuts import Names, TensorCut
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import experts_of
from phasewise.serving.models.packed_model import ModelConfig


def _with_window(get: Get, config: ModelConfig) -> ModelConfig:
    return replace(config, sliding_window=get("sliding_window", int))


def _mixtral(get: Get, config: ModelConfig) -> ModelConfig:
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", normalised=True)
    return replace(_with_window(get, config), experts=experts)


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    window = get("attention.sliding_window", int) or None
    if not get("expert_count", int, 0):
        return replace(config, sliding_window=window)
    experts = experts_of(get, "expert_count", "expert_used_count", normalised=True)
    return replace(config, experts=experts, sliding_window=window)


GGUF_EXPERTS: Names = {
    "ffn_gate_inp.weight": "router",
    "ffn_gate_exps.weight": TensorCut(("gate",), of_experts=True),
    "ffn_up_exps.weight": TensorCut(("up",), of_experts=True),
    "ffn_down_exps.weight": TensorCut(("down",), of_experts=True),
}

LLAMA = Family(
    "llama",
    hf=("llama",),
    gguf=("llama",),
    from_gguf=_gguf,
    gguf_names=GGUF_EXPERTS,
    gguf_interleaved_heads=True,
)
MISTRAL = Family(
    "mistral",
    hf=("mistral",),
    from_hf=_with_window,
    hf_defaults={
        "sliding_window": 4096,  # null means none
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)
MIXTRAL = Family(
    "mixtral",
    hf=("mixtral",),
    from_hf=_mixtral,
    hf_defaults={
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    hf_names={
        "block_sparse_moe.gate.weight": "router",
        "block_sparse_moe.experts.{e}.w1.weight": "experts.{e}.gate",
        "block_sparse_moe.experts.{e}.w3.weight": "experts.{e}.up",
        "block_sparse_moe.experts.{e}.w2.weight": "experts.{e}.down",
    },
)

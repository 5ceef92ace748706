"""Granite 3: a Llama whose embeddings, scores, halves of layers and logits have multipliers; and its
mixtures, with or without an expert that all tokens share.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Family, Get, TensorCut
from phasewise.serving.loaders.families.llama import GGUF_EXPERTS
from phasewise.serving.loaders.families.reading import experts_of, positive
from phasewise.serving.models.packed_model import ModelConfig


def _granite(get: Get, config: ModelConfig) -> ModelConfig:
    return _scaled(
        get, config, "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"
    )


def _granite_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return _scaled(get, config, "embedding_scale", "residual_scale", "attention.scale", "logit_scale")


def _scaled(
    get: Get, config: ModelConfig, embed: str, residual: str, attention: str, logits: str
) -> ModelConfig:
    divisor = positive(get, logits, 1.0)
    if not 1e-6 <= divisor <= 1e6:
        raise ModelError(f"the config has {logits} = {divisor!r:.80}: a number from 1e-6 to 1e6 expected")
    return replace(
        config,
        embed_scale=positive(get, embed, 1.0),
        residual_scale=positive(get, residual, 1.0),
        attention_scale=positive(get, attention, 1.0),
        logit_scale=1 / divisor,
    )


def _moe(get: Get, config: ModelConfig) -> ModelConfig:
    shared = get("shared_intermediate_size", int, 0)
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", normalised=True, shared_ffn=shared)
    return replace(_granite(get, config), experts=experts)


def _moe_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    shared = get("expert_shared_feed_forward_length", int, 0)
    experts = experts_of(get, "expert_count", "expert_used_count", normalised=True, shared_ffn=shared)
    return replace(_granite_gguf(get, config), experts=experts)


GRANITE = Family(
    "granite",
    hf=("granite",),
    gguf=("granite",),
    from_hf=_granite,
    from_gguf=_granite_gguf,
    gguf_interleaved_heads=True,
)
GRANITE_MOE = Family(
    "granitemoe",
    hf=("granitemoe", "granitemoeshared"),
    gguf=("granitemoe",),
    from_hf=_moe,
    from_gguf=_moe_gguf,
    hf_defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    hf_names={
        "block_sparse_moe.router.layer.weight": "router",
        "block_sparse_moe.input_linear.weight": TensorCut(("gate", "up"), of_experts=True),
        "block_sparse_moe.output_linear.weight": TensorCut(("down",), of_experts=True),
        "shared_mlp.input_linear.weight": TensorCut(("gate", "up")),
        "shared_mlp.output_linear.weight": "down",
    },
    gguf_names={
        **GGUF_EXPERTS,
        "ffn_gate_shexp.weight": "gate",
        "ffn_up_shexp.weight": "up",
        "ffn_down_shexp.weight": "down",
    },
    gguf_interleaved_heads=True,
)

"""Llama, Mistral and Mixtral. GGUF files call all three llama."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import experts_of
from phasewise.serving.models.packed_model import ModelConfig


def _with_window(get: Get, config: ModelConfig) -> ModelConfig:
    return replace(config, sliding_window=get("sliding_window", int))


def _mixtral(get: Get, config: ModelConfig) -> ModelConfig:
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", normalised=True)
    return replace(_with_window(get, config), experts=experts)


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return (_mixtral if get("expert_count", int, 0) else _with_window)(get, config)


LLAMA = Family(
    "llama",
    from_gguf=_gguf,
    gguf_interleaved_heads=True,
)
MISTRAL = Family(
    "mistral",
    gguf=(),
    from_hf=_with_window,
    hf_defaults={
        "sliding_window": 4096,  # null means none
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
    },
)
MIXTRAL = Family(
    "mixtral",
    gguf=(),
    from_hf=_mixtral,
    hf_defaults={
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
)

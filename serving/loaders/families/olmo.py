"""OLMo 2 (norms after each half of a layer alone) and OLMoE; both have a norm over a whole row of queries
and keys.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import experts_of, must_be_off
from phasewise.serving.models.packed_model import ModelConfig


def _olmo2(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "clip_qkv", "attention.sliding_window")
    return replace(config, pre_norms=False, post_norms=True, qk_norm=True, whole_qk_norm=True)


def _olmoe(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "clip_qkv")
    experts = experts_of(get, "num_experts", "num_experts_per_tok", get("norm_topk_prob", bool, False))
    return replace(config, qk_norm=True, whole_qk_norm=True, experts=experts)


OLMO2 = Family(
    "olmo2",
    from_hf=_olmo2,
    hf_defaults={"rms_norm_eps": 1e-5},
)
OLMOE = Family(
    "olmoe",
    from_hf=_olmoe,
    hf_defaults={
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "max_position_embeddings": 4096,
    },
)

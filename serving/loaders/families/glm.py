"""GLM 4 (0414): norms before and after each half of a layer, RoPE over neighbours in half of a head; and
GLM 4.5 to 4.7: logistic routing behind first dense layers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.family import LAYER_HEAD, Family, Get
from phasewise.serving.loaders.families.routing import routed_gguf, routed_hf
from phasewise.serving.models.packed_model import ModelConfig

EOS = [151329, 151336, 151338]
LOGISTIC_GATING = 2  # GGUF's number, and what files mean that have none


def _glm4(get: Get, config: ModelConfig) -> ModelConfig:
    return replace(_of_text(get, config), post_norms=True, out_bias=False)  # of q, k and v alone


def _of_text(get: Get, config: ModelConfig) -> ModelConfig:
    sections = get("rope.dimension_sections", list)
    if sections is not None and any(sections[1:]):
        raise ModelError(
            f"the GGUF metadata has rope.dimension_sections = {sections!r:.60}: positions of pictures"
            " cannot run"
        )
    return config


def _moe(get: Get, config: ModelConfig) -> ModelConfig:
    own = replace(config, qk_norm=get("use_qk_norm", bool, False), out_bias=False)
    return routed_hf(get, own)


def _moe_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    def read(key: str, kind: Any = None, default: Any = None) -> Any:
        if key == "expert_gating_func":
            return get(key, int, 0) or LOGISTIC_GATING
        return get(key, kind, default)

    n_layers = config.n_layers - get("nextn_predict_layers", int, 0)
    return routed_gguf(read, replace(_of_text(get, config), n_layers=n_layers))


GLM4 = Family(
    "glm4",
    from_hf=_glm4,
    hf_names={
        "post_self_attn_layernorm.weight": "attn_post_norm",
        "post_attention_layernorm.weight": "ffn_norm",
        "post_mlp_layernorm.weight": "ffn_post_norm",
    },
    gguf_names={"ffn_up.weight": TensorCut(("gate", "up"))},
    hf_defaults={
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "attention_bias": True,
        "eos_token_id": EOS,
    },
    partial_rope=True,
    hf_interleaved_heads=True,
    gguf_interleaved_heads=True,
)
GLM4_MOE = Family(
    "glm4moe",
    hf=("glm4_moe",),
    from_hf=_moe,
    from_gguf=_moe_gguf,
    hf_defaults={
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "max_position_embeddings": 131072,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    partial_rope=True,
    more_layers=True,
    hf_head=LAYER_HEAD,
    gguf_head=True,
    gguf_optional_qk_norm=True,
)

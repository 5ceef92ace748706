"""GLM 4 (0414): norms before and after each half of a layer, RoPE over neighbours in half of a head."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Family, Get, TensorCut
from phasewise.serving.models.packed_model import ModelConfig

EOS = [151329, 151336, 151338]


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    del get
    return replace(config, post_norms=True, out_bias=False)  # attention_bias is that of q, k and v


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    sections = get("rope.dimension_sections", list)
    if sections is not None and any(sections[1:]):
        raise ModelError(
            f"the GGUF metadata has rope.dimension_sections = {sections!r:.60}: positions of pictures"
            " cannot run"
        )
    return replace(config, post_norms=True)


GLM4 = Family(
    "glm4",
    hf=("glm4",),
    gguf=("glm4",),
    from_hf=_hf,
    from_gguf=_gguf,
    hf_names={
        "post_self_attn_layernorm.weight": "attn_post_norm",
        "post_mlp_layernorm.weight": "ffn_post_norm",
        "mlp.gate_up_proj.weight": TensorCut(("gate", "up")),
    },
    gguf_names={
        "post_attention_norm.weight": "attn_post_norm",
        "post_ffw_norm.weight": "ffn_post_norm",
        "ffn_up.weight": TensorCut(("gate", "up")),
    },
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
    hf_interleaved_heads=True,
    gguf_interleaved_heads=True,
)

"""Mixtures of experts. GLM 4 (0414): norms before and after each half of a layer, RoPE over neighbours in
half of a head; GLM 4.5 to 4.7: logistic routing behind first dense layers. MiniMax M2: norms over all queries
and all keys of a row, RoPE in a part of each head, logistic routing. gpt-oss: experts in MXFP4 with biases
and a clamped gate, attention with sinks, windows in every other layer. Phi 3.5 MoE: LayerNorms and biases
everywhere but in experts, two of which SparseMixer scores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.deepseek import routed
from phasewise.serving.loaders.families.family import (
    FED,
    GGUF_NORM_BIASES,
    HF_NORM_BIASES,
    LAST_NORM_BIAS,
    LAYER_HEAD,
    Family,
    Get,
    TensorShapes,
    experts_of,
    layer_types,
    with_experts,
    with_kind,
    with_rope,
    with_windows,
    yarn_magnitude,
)
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.experts import SPARSE_MIXER
from phasewise.serving.models.rope import LongScaling, YarnScaling

EOS = [151329, 151336, 151338]


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
    has_norms = get("use_qk_norm", bool, config.qk_norm)
    return routed(get, replace(_of_text(get, config), qk_norm=has_norms, out_bias=False))


def _qk_norm_by_tensors(config: ModelConfig, shapes: TensorShapes) -> ModelConfig:
    return replace(config, qk_norm="blk.0.attn_q_norm.weight" in shapes)


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
        "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7,
        "partial_rotary_factor": 0.5, "max_position_embeddings": 131072, "attention_bias": True,
        "eos_token_id": EOS,
    },
    partial_rope=True,
    hf_interleaved_heads=True,
    gguf_interleaved_heads=True,
)  # fmt: skip
GLM4_MOE = Family(
    "glm4moe",
    hf=("glm4_moe",),
    from_hf=_moe,
    hf_defaults={
        "num_attention_heads": 96, "num_key_value_heads": 8, "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5, "max_position_embeddings": 131072, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 1408,
        "first_k_dense_replace": 1,
    },
    from_gguf_tensors=_qk_norm_by_tensors,
    partial_rope=True,
    more_layers=True,
    hf_head=LAYER_HEAD,
    gguf_head=True,
)  # fmt: skip


def _minimax(get: Get, config: ModelConfig) -> ModelConfig:
    if any(kind != 1 for kind in get("attn_type_list", list) or ()):
        raise ModelError("config.json has attn_type_list with layers of another attention, which cannot run")
    if (turned := get("rotary_dim", int)) is not None and config.rope.dim == config.head_dim:
        config = with_rope(config, dim=turned)
    return routed(get, replace(config, qk_norm=True, whole_qk_norm=True))


MINIMAX_M2 = Family(
    "minimax-m2",
    hf=("minimax_m2",),
    from_hf=_minimax,
    hf_fields={"n_routed_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
    hf_only={
        "use_qk_norm": True, "qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_routing_bias": True,
    },
    gguf_defaults={"norm_topk_prob": True},
    partial_rope=True,
    hf_defaults={
        "head_dim": 128, "num_attention_heads": 48, "num_key_value_heads": 8, "num_local_experts": 256,
        "num_experts_per_tok": 8, "rope_theta": 5e6, "max_position_embeddings": 196608,
        "bos_token_id": 200034, "eos_token_id": 200020,
    },
)  # fmt: skip


PERIOD = 2
GPT_OSS_YARN = YarnScaling(32.0, 4096, yarn_magnitude(32.0), truncate=False)


def _common(get: Get, config: ModelConfig, width: int) -> ModelConfig:
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", width, normalised=True, biases=True)
    own = replace(with_experts(config, experts), activation="clamped_silu", sinks=True, out_bias=True)
    return with_windows(own, layer_types(get, config, PERIOD), get("sliding_window", int))


def _gpt_oss(get: Get, config: ModelConfig) -> ModelConfig:
    if not (get("rope_parameters", dict) or get("rope_scaling", dict)):
        config = with_rope(config, scaling=GPT_OSS_YARN)
    return _common(get, config, config.ffn)


def _gpt_oss_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    scaling = config.rope.scaling
    if isinstance(scaling, YarnScaling):  # its ramp begins and ends within pairs, which files do not state
        config = with_rope(config, scaling=replace(scaling, truncate=False))
    return _common(get, config, get("moe_intermediate_size", int, config.ffn))


GPT_OSS = Family(
    "gpt-oss",
    hf=("gpt_oss",),
    from_hf=_gpt_oss,
    from_gguf=_gpt_oss_gguf,
    gguf_defaults={"sliding_window": 128},
    hf_only={"swiglu_limit": 7.0, "swiglu_alpha": 1.702},  # the clamped gate of families/rows/elementwise.c
    hf_defaults={
        "attention_bias": True, "head_dim": 64, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_theta": 150000.0, "num_local_experts": 128, "num_experts_per_tok": 4, "sliding_window": 128,
        "rms_norm_eps": 1e-5,
    },
    hf_names={
        "self_attn.sinks": "sinks",
        "mlp.router.weight": "router",
        "mlp.router.bias": "router_bias",
        "mlp.experts.gate_up_proj": TensorCut(
            ("gate", "up"), of_experts=True, alternating=True, transposed=True
        ),
        "mlp.experts.gate_up_proj.mxfp4": TensorCut(("gate", "up"), of_experts=True, alternating=True),
        "mlp.experts.gate_up_proj_bias": TensorCut(
            ("gate_bias", "up_bias"), of_experts=True, alternating=True
        ),
        "mlp.experts.down_proj": TensorCut(("down",), of_experts=True, transposed=True),
        "mlp.experts.down_proj.mxfp4": TensorCut(("down",), of_experts=True),
        "mlp.experts.down_proj_bias": TensorCut(("down_bias",), of_experts=True),
    },
    gguf_names={
        "attn_sinks.weight": "sinks",
        "ffn_gate_inp.bias": "router_bias",
        **{f"ffn_{part}_exps.bias": TensorCut((f"{part}_bias",), of_experts=True) for part in FED},
    },
)  # fmt: skip


def _phimoe(get: Get, config: ModelConfig) -> ModelConfig:
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", config.ffn, normalised=False)
    if experts.chosen != 2:
        raise ModelError(f"a SparseMixer of {experts.chosen} experts a token: 2 can run")
    own = with_kind(config, window=get("sliding_window", int))
    mixed = with_experts(own, replace(experts, scores=SPARSE_MIXER))
    return replace(mixed, layer_norms=True, norm_biases=True)


def _phimoe_hf(get: Get, config: ModelConfig) -> ModelConfig:
    scaling, stated = config.rope.scaling, get("rope_parameters", dict) or get("rope_scaling", dict) or {}
    if scaling is not None:
        size: Any = stated.get("short_mscale")
        longer = stated.get("long_mscale")
        if not isinstance(scaling, LongScaling) or size != longer or type(size) not in (int, float):
            raise ModelError(
                f"config.json has a RoPE with short_mscale = {size!r:.40} and long_mscale = {longer!r:.40}:"
                " LongRoPE with one number for both can run"
            )
        config = with_rope(config, scaling=replace(scaling, magnitude=float(size)))
    return _phimoe(get, replace(config, logit_biases=get("lm_head_bias", bool, False)))


def _with_biases(config: ModelConfig, shapes: TensorShapes) -> ModelConfig:
    return replace(config, logit_biases="output.bias" in shapes)


PHIMOE = Family(
    "phimoe",
    from_hf=_phimoe_hf,
    from_gguf=_phimoe,
    from_gguf_tensors=_with_biases,
    hf_names=HF_NORM_BIASES,
    gguf_names=GGUF_NORM_BIASES,
    global_names={**LAST_NORM_BIAS, "lm_head.bias": "lm_head_bias", "output.bias": "lm_head_bias"},
    hf_only={"router_jitter_noise": 0.01},  # SparseMixer of cython_kernels/program/experts.c
    hf_defaults={
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-5,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 131072,
    },
)

"""Qwen 3 Next and Qwen 3.5: the gated delta rule in three of four layers, gated attention in the others.

Most are mixtures with an expert that all tokens share, whose part has a gate of its own. In Qwen 3 Next the
products of a layer with a state are one tensor, key head by key head; in Qwen 3.5 they are apart.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names, OtherForm, TensorCut
from phasewise.serving.loaders.families.family import MTP_HEAD, Family, Get
from phasewise.serving.loaders.families.hybrids.mamba import state_gguf
from phasewise.serving.loaders.families.names import fed
from phasewise.serving.loaders.families.reading import experts_of, must_be_off, state_layer_types
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.states.state_layers import DELTA, StateLayers

LINEAR = "linear_attention"
INTERVAL = 4


def _dense(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "attention_bias")
    if get("layer_types", list) is None:
        layers = _all_but_every(get("full_attention_interval", int, INTERVAL), config.n_layers)
    else:
        layers = state_layer_types(get, config, LINEAR)
    state = StateLayers(
        DELTA,
        layers,
        get("linear_conv_kernel_dim", int, 4),
        get("linear_num_value_heads", int, 32),
        get("linear_num_key_heads", int, 16),
        get("linear_key_head_dim", int, 128),
        get("linear_value_head_dim", int, 128),
    )
    return replace(config, qk_norm=True, gated_attention=True, state=state if layers else None)


def _all_but_every(interval: int, n_layers: int) -> tuple[int, ...]:
    if interval < 1:
        raise ModelError(f"attention comes every {interval} layers: 1 or more expected")
    return tuple(layer for layer in range(n_layers) if (layer + 1) % interval)


def _mixture(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "mlp_only_layers")
    if get("decoder_sparse_step", int, 1) != 1:
        must_be_off(get, "decoder_sparse_step")
    shared = get("shared_expert_intermediate_size", int, 512)
    experts = experts_of(
        get, "num_experts", "num_experts_per_tok", get("norm_topk_prob", bool, True), shared_ffn=shared
    )
    experts = replace(experts, shared_gate=shared > 0)
    return replace(_dense(get, config), experts=experts, ffn=get("moe_intermediate_size", int, 512))


def _next_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return _mixture_gguf(get, config, tiled=False)


def _dense_gguf(get: Get, config: ModelConfig, *, tiled: bool = True) -> ModelConfig:
    """tiled: the order of heads that llama.cpp's converter makes of Qwen 3.5's."""
    config = replace(config, n_layers=config.n_layers - get("nextn_predict_layers", int, 0))
    layers = _recurrent_layers(get, config.n_layers)
    state = replace(state_gguf(get, DELTA, layers), tiled=tiled)
    return replace(config, qk_norm=True, gated_attention=True, state=state if layers else None)


def _recurrent_layers(get: Get, n_layers: int) -> tuple[int, ...]:
    stated = get("attention.recurrent_layers", list)
    if stated is None:
        return _all_but_every(get("full_attention_interval", int, INTERVAL), n_layers)
    if len(stated) < n_layers:
        raise ModelError(f"the GGUF metadata says of {counted(len(stated), 'layer')} which keep a state")
    return tuple(layer for layer in range(n_layers) if stated[layer])


def _mixture_gguf(get: Get, config: ModelConfig, *, tiled: bool = True) -> ModelConfig:
    width = get("expert_feed_forward_length", int, config.ffn)
    shared = get("expert_shared_feed_forward_length", int, width)
    experts = experts_of(get, "expert_count", "expert_used_count", normalised=True, shared_ffn=shared)
    experts = replace(experts, shared_gate=True)
    return replace(_dense_gguf(get, config, tiled=tiled), experts=experts, ffn=width)


_STATE: Names = {
    "linear_attn.conv1d.weight": OtherForm("taps"),
    "linear_attn.A_log": OtherForm("rates", negated_exponential=True),
    "linear_attn.dt_bias": "time_offsets",
    "linear_attn.norm.weight": "state_scale",
    "linear_attn.out_proj.weight": "o",
    "self_attn.q_proj.weight": TensorCut(("q", "attn_gate"), turns="n_heads"),
}
_IN_ONE: Names = {
    "linear_attn.in_proj_qkvz.weight": TensorCut(
        ("state_q", "state_k", "state_v", "state_gate"), turns="groups"
    ),
    "linear_attn.in_proj_ba.weight": TensorCut(("state_b", "state_a"), turns="groups"),
}
_APART: Names = {
    "linear_attn.in_proj_qkv.weight": TensorCut(("state_q", "state_k", "state_v")),
    "linear_attn.in_proj_z.weight": "state_gate",
    "linear_attn.in_proj_b.weight": "state_b",
    "linear_attn.in_proj_a.weight": "state_a",
}
_EXPERTS: Names = {
    **fed("mlp.shared_expert"),
    "mlp.shared_expert_gate.weight": "shared_gate",
}
_GGUF: Names = {
    "attn_q.weight": TensorCut(("q", "attn_gate"), turns="n_heads"),
    "attn_qkv.weight": TensorCut(("state_q", "state_k", "state_v")),
    "attn_gate.weight": "state_gate",
}
_GGUF_NEXT: Names = {
    "ssm_in.weight": TensorCut(("state_q", "state_k", "state_v", "state_gate"), turns="groups"),
    "ssm_ba.weight": TensorCut(("state_b", "state_a"), turns="groups"),
}
_GGUF_APART: Names = {"ssm_beta.weight": "state_b", "ssm_alpha.weight": "state_a"}
_DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
}
_MIXTURE_DEFAULTS = {**_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10, "intermediate_size": 5632}

QWEN3_NEXT = Family(
    "qwen3next",
    hf=("qwen3_next",),
    from_hf=_mixture,
    from_gguf=_next_gguf,
    hf_names={**_STATE, **_IN_ONE, **_EXPERTS},
    gguf_names={**_GGUF, **_GGUF_NEXT},
    hf_defaults=_MIXTURE_DEFAULTS,
    hf_ignored=("mtp.",),
    hf_head=MTP_HEAD,
    partial_rope=True,
    hf_unit_norms=True,
)
QWEN3_5 = Family(
    "qwen35",
    hf=("qwen3_5", "qwen3_5_text"),
    from_hf=_dense,
    from_gguf=_dense_gguf,
    gguf_names={**_GGUF, **_GGUF_APART},
    more_layers=True,
    hf_names={**_STATE, **_APART},
    hf_defaults=_DEFAULTS,
    hf_text_prefixes=("model.language_model.",),
    hf_ignored=("mtp.", "model.visual."),
    hf_head=MTP_HEAD,
    gguf_head=True,
    partial_rope=True,
    hf_unit_norms=True,
)
QWEN3_5_MOE = Family(
    "qwen35moe",
    hf=("qwen3_5_moe", "qwen3_5_moe_text"),
    from_hf=_mixture,
    from_gguf=_mixture_gguf,
    gguf_names={**_GGUF, **_GGUF_APART},
    more_layers=True,
    hf_names={**_STATE, **_APART, **_EXPERTS},
    hf_defaults={**_MIXTURE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
    hf_text_prefixes=("model.language_model.",),
    hf_ignored=("mtp.", "model.visual."),
    hf_head=MTP_HEAD,
    gguf_head=True,
    partial_rope=True,
    hf_unit_norms=True,
)

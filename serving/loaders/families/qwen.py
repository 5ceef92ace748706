"""Qwen 2 (biases), Qwen 3 (a norm over every query and key head), their mixtures of experts, and the language
models of Qwen 3 VL."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names, OtherForm, TensorCut
from phasewise.serving.loaders.families.family import (
    MTP_HEAD,
    Family,
    Get,
    all_but_every,
    experts_of,
    fed,
    layer_types,
    named_layers,
    with_experts,
    with_states,
    with_windows,
)
from phasewise.serving.loaders.families.hybrids import state_gguf
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.states import DELTA, StateForm

MAX_WINDOW_LAYERS = 28
HEAD_DIM = 128
CONTEXT, VL_CONTEXT = 32768, 128000


def _windows(get: Get, config: ModelConfig) -> ModelConfig:
    """Add the window to layers from `max_window_layers` on, where it is in use at all."""
    window = get("sliding_window", int)
    if window is None or (get("layer_types", list) is None and not get("use_sliding_window", bool, False)):
        return config
    first = get("max_window_layers", int, MAX_WINDOW_LAYERS)
    by_rule = [layer >= first for layer in range(config.n_layers)]
    if get("layer_types", list) is None:
        return with_windows(config, by_rule, window)
    named = layer_types(get, config, 1)
    if any(named) and get("use_sliding_window", bool, True) is False:
        raise ModelError(
            "config.json has use_sliding_window = False and layer_types with a window: one of them"
        )
    return with_windows(config, named, window)


def _qwen3(get: Get, config: ModelConfig) -> ModelConfig:
    return replace(_windows(get, config), qk_norm=True)


def _qwen3_moe(get: Get, config: ModelConfig) -> ModelConfig:
    return _mixture(get, _qwen3(get, config), has_shared=False)


def _qwen2_moe(get: Get, config: ModelConfig) -> ModelConfig:
    return _mixture(get, _windows(get, config))


def _mixture(get: Get, config: ModelConfig, *, has_shared: bool = True) -> ModelConfig:
    """Add experts to the config, and a shared one, which computes every row."""
    width = get("moe_intermediate_size", int, config.ffn)
    shared = get("shared_expert_intermediate_size", int, width) if has_shared else 0
    normalised = get("norm_topk_prob", bool, False)
    experts = experts_of(get, "num_experts", "num_experts_per_tok", width, normalised, shared_ffn=shared)
    return with_experts(config, replace(experts, shared_gate=shared > 0))


EXPERTS_IN_ALL_LAYERS = {"mlp_only_layers": None, "decoder_sparse_step": 1}
NORMALISED = {"norm_topk_prob": True}
_VL_TEXT, _VL_OTHERS = ("model.language_model.",), ("model.visual.",)
"""Beginnings of Qwen 3 VL's names. A text has the same positions in all sections of RoPE, and no layer reads
pictures."""

QWEN2 = Family("qwen2", from_hf=_windows, hf_biases="", hf_defaults={"max_position_embeddings": CONTEXT})
QWEN3 = Family(
    "qwen3",
    from_hf=_qwen3,
    hf_defaults={"head_dim": HEAD_DIM, "max_position_embeddings": CONTEXT},
)
QWEN3_VL = replace(
    QWEN3,
    name="qwen3vl",
    hf=("qwen3_vl", "qwen3_vl_text"),
    hf_defaults={"head_dim": HEAD_DIM, "max_position_embeddings": VL_CONTEXT, "rope_theta": 5e5},
    hf_text_prefixes=_VL_TEXT,
    hf_ignored=_VL_OTHERS,
)
QWEN3_MOE = Family(
    "qwen3moe",
    hf=("qwen3_moe",),
    from_hf=_qwen3_moe,
    gguf_defaults=NORMALISED,
    hf_only=EXPERTS_IN_ALL_LAYERS,
    hf_defaults={
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
    },
)


LINEAR = "linear_attention"
INTERVAL = 4


def _dense(get: Get, config: ModelConfig) -> ModelConfig:
    if get("layer_types", list) is None:
        keeps = all_but_every(get("full_attention_interval", int, INTERVAL), config.n_layers)
    else:
        keeps = named_layers(get, config, LINEAR)
    state = StateForm(
        DELTA,
        get("linear_conv_kernel_dim", int, 4),
        get("linear_num_value_heads", int, 32),
        get("linear_num_key_heads", int, 16),
        get("linear_key_head_dim", int, 128),
        get("linear_value_head_dim", int, 128),
    )
    return with_states(replace(config, qk_norm=True, gated_attention=True), state, keeps)


def _next_mixture(get: Get, config: ModelConfig) -> ModelConfig:
    return _mixture(get, _dense(get, config))


def _next_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return _mixture(get, _dense_gguf(get, config, tiled=False))


def _dense_gguf(get: Get, config: ModelConfig, *, tiled: bool = True) -> ModelConfig:
    """The hybrid of GGUF metadata. `tiled`: True if heads are in the order that files of Qwen 3.5 have."""
    keeps = _recurrent_layers(get, config.n_layers)
    state = replace(state_gguf(get, DELTA), tiled=tiled)
    return with_states(replace(config, qk_norm=True, gated_attention=True), state, keeps)


def _recurrent_layers(get: Get, n_layers: int) -> list[bool]:
    stated = get("attention.recurrent_layers", list)
    if stated is None:
        return all_but_every(get("full_attention_interval", int, INTERVAL), n_layers)
    if len(stated) < n_layers:
        raise ModelError(f"the GGUF metadata says of {counted(len(stated), 'layer')} which keep a state")
    return [bool(keeps) for keeps in stated[:n_layers]]


def _mixture_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return _mixture(get, _dense_gguf(get, config))


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
_EXPERTS: Names = {**fed("mlp.shared_expert"), "mlp.shared_expert_gate.weight": "shared_gate"}
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
_DEFAULTS: dict[str, Any] = {"head_dim": 256, "partial_rotary_factor": 0.25, "max_position_embeddings": 32768}
_MIXTURE_DEFAULTS = {
    **_DEFAULTS,
    **NORMALISED,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_UNBIASED = {"attention_bias": False}

QWEN2_MOE = Family(
    "qwen2moe",
    hf=("qwen2_moe",),
    from_hf=_qwen2_moe,
    hf_only=EXPERTS_IN_ALL_LAYERS,
    hf_names=_EXPERTS,
    hf_biases="qkv_bias",
    hf_defaults={
        "qkv_bias": True,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "max_position_embeddings": CONTEXT,
    },
)
QWEN3_VL_MOE = replace(
    QWEN3_MOE,
    name="qwen3vlmoe",
    hf=("qwen3_vl_moe", "qwen3_vl_moe_text"),
    gguf=("qwen3vlmoe",),
    hf_names={
        "mlp.experts.gate_up_proj": TensorCut(("gate", "up"), of_experts=True, transposed=True),
        "mlp.experts.down_proj": TensorCut(("down",), of_experts=True, transposed=True),
    },
    hf_defaults={
        "head_dim": HEAD_DIM,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "tie_word_embeddings": True,
        "max_position_embeddings": VL_CONTEXT,
        "rope_theta": 5e5,
    },
    hf_text_prefixes=_VL_TEXT,
    hf_ignored=_VL_OTHERS,
)

QWEN3_NEXT = Family(
    "qwen3next",
    hf=("qwen3_next",),
    from_hf=_next_mixture,
    from_gguf=_next_gguf,
    gguf_defaults=NORMALISED,
    hf_only=_UNBIASED | EXPERTS_IN_ALL_LAYERS,
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
    hf_only=_UNBIASED,
    gguf_names={**_GGUF, **_GGUF_APART},
    more_layers=True,
    hf_names={**_STATE, **_APART},
    hf_defaults=_DEFAULTS,
    hf_text_prefixes=_VL_TEXT,
    hf_ignored=("mtp.", *_VL_OTHERS),
    hf_head=MTP_HEAD,
    gguf_head=True,
    partial_rope=True,
    hf_unit_norms=True,
)
QWEN3_5_MOE = replace(
    QWEN3_5,
    name="qwen35moe",
    hf=("qwen3_5_moe", "qwen3_5_moe_text"),
    from_hf=_next_mixture,
    from_gguf=_mixture_gguf,
    gguf_defaults=NORMALISED,
    hf_only=_UNBIASED | EXPERTS_IN_ALL_LAYERS,
    hf_names={**_STATE, **_APART, **_EXPERTS},
    hf_defaults={**_MIXTURE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
)

"""Gemma 1: a Llama with GeGLU. Gemma 2 and 3: norms before and after each half of a layer, windows in most.

Embeddings are multiplied by the root of their size, and norm weights are stored less one. Gemma 2 caps the
scores of attention and the logits; Gemma 3 has a norm over every query and key head, and a RoPE of its own in
layers with a window."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from phasewise.serving.loaders.cuts import Names
from phasewise.serving.loaders.families.family import (
    TEXT_PREFIXES,
    Family,
    Get,
    layer_types,
    local_theta,
    other_parts,
    positive_or_none,
    with_windows,
)
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.feed_forward import FeedForwardForm
from phasewise.serving.models.rope import RopeSpec

LOCAL_THETA = 10000.0
"""RoPE's base in layers with a window."""
DEFAULTS: dict[str, Any] = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
    "bos_token_id": 2,
    "eos_token_id": 1,
}

HF_INPUTS: dict[str, str] = {
    "per_layer_input_gate.weight": "inputs_gate",
    "per_layer_projection.weight": "inputs_out",
    "post_per_layer_input_norm.weight": "inputs_post_norm",
}
GGUF_INPUTS: dict[str, str] = {
    "inp_gate.weight": "inputs_gate",
    "proj.weight": "inputs_out",
    "post_norm.weight": "inputs_post_norm",
}
GLOBAL_INPUTS: Names = {
    "model.embed_tokens_per_layer.weight": "layer_table",
    "model.per_layer_model_projection.weight": "layer_projection",
    "model.per_layer_projection_norm.weight": "layer_inputs_norm",
    "per_layer_token_embd.weight": "layer_table",
    "per_layer_model_proj.weight": "layer_projection",
    "per_layer_proj_norm.weight": "layer_inputs_norm",
}
DEFAULTS_WITH_INPUTS: dict[str, Any] = {
    **DEFAULTS,
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
OTHER_PARTS = other_parts(
    "vision_tower", "multi_modal_projector", "audio_tower", "embed_vision", "embed_audio"
)


def as_gemma(config: ModelConfig, attention_scale: float) -> ModelConfig:
    return replace(
        config, post_norms=True, embed_scale=math.sqrt(config.hidden), attention_scale=attention_scale
    )


def _gemma(get: Get, config: ModelConfig) -> ModelConfig:
    del get
    return replace(config, embed_scale=math.sqrt(config.hidden))


ONE_WAY = {"use_bidirectional_attention": False}


GEMMA = Family(
    "gemma",
    from_hf=_gemma,
    hf_defaults={
        **DEFAULTS,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 8192,
    },
    hf_only=ONE_WAY,
    hf_activations=("gelu",),  # of its first files, which meant the other one
    ffn_form=FeedForwardForm("gelu_tanh"),
    hf_unit_norms=True,
)


GEMMA2_PERIOD, GEMMA3_PERIOD = 2, 6
LARGEST_GEMMA2, LARGEST_GEMMA3 = 46, 62  # layers of the models whose scores are scaled by hidden / heads


def _gemma2(get: Get, config: ModelConfig) -> ModelConfig:
    sliding = layer_types(get, config, GEMMA2_PERIOD)
    return with_windows(_capped(get, config, LARGEST_GEMMA2), sliding, get("sliding_window", int))


def _gemma3(get: Get, config: ModelConfig) -> ModelConfig:
    sliding = layer_types(get, config, get("sliding_window_pattern", int, GEMMA3_PERIOD))
    rope = RopeSpec(local_theta(get, LOCAL_THETA), config.head_dim)
    config = replace(config, bidirectional=get("use_bidirectional_attention", bool, False))
    return with_windows(_normed(get, config), sliding, get("sliding_window", int), rope)


def _gemma3_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return (_normed if get("sliding_window", int) is None else _gemma3)(get, config)


def _normed(get: Get, config: ModelConfig) -> ModelConfig:
    return replace(_capped(get, config, LARGEST_GEMMA3), qk_norm=True)


def _capped(get: Get, config: ModelConfig, largest: int) -> ModelConfig:
    """Add scales and caps. GGUF files lack the scale of scores; llama.cpp knows a family's `largest` model by
    its layers."""
    scalar = positive_or_none(get, "query_pre_attn_scalar")
    if scalar is None:
        scalar = config.hidden / config.n_heads if config.n_layers == largest else config.head_dim
    return replace(
        as_gemma(config, 1 / math.sqrt(scalar)),
        attention_cap=positive_or_none(get, "attn_logit_softcapping"),
        logit_cap=positive_or_none(get, "final_logit_softcapping"),
    )


CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
GEMMA2 = Family(
    "gemma2",
    from_hf=_gemma2,
    hf_only=ONE_WAY,
    gguf_defaults={**CAPS, "sliding_window": 4096},
    hf_defaults={**DEFAULTS, **CAPS, "max_position_embeddings": 8192, "query_pre_attn_scalar": 256},
    ffn_form=FeedForwardForm("gelu_tanh"),
    hf_unit_norms=True,
)
GEMMA3 = Family(
    "gemma3",
    hf=("gemma3_text", "gemma3"),
    from_hf=_gemma3,
    from_gguf=_gemma3_gguf,
    hf_defaults={
        **DEFAULTS,
        "vocab_size": 262208,
        "rope_theta": 1e6,
        "max_position_embeddings": 131072,
        "query_pre_attn_scalar": 256,
    },
    hf_text_prefixes=TEXT_PREFIXES,
    hf_ignored=other_parts("vision_tower", "multi_modal_projector"),
    ffn_form=FeedForwardForm("gelu_tanh"),
    hf_unit_norms=True,
)
EMBEDDING_GEMMA = replace(
    GEMMA3, name="gemma-embedding", hf=(), gguf_defaults={"use_bidirectional_attention": True}
)
"""GGUF files of a Gemma 3 whose tokens see those after them."""

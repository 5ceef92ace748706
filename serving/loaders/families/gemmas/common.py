"""Names, defaults and readings that Gemma models have in common."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names
from phasewise.serving.loaders.families.family import other_parts
from phasewise.serving.models.packed_model import ModelConfig

LOCAL_THETA = 10000.0
"""The base of layers with a window."""
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
        config,
        post_norms=True,
        embed_scale=math.sqrt(config.hidden),
        attention_scale=attention_scale,
    )


def number_of(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelError(f"config.json has rope_theta = {value!r:.60}: a number expected")
    return float(value)

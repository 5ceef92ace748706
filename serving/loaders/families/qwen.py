"""Qwen 2 (biases), Qwen 3 (a norm over every query and key head) and Qwen 3's mixtures of experts."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import experts_of, layer_types, must_be_off, with_windows
from phasewise.serving.models.packed_model import ModelConfig

MAX_WINDOW_LAYERS = 28
HEAD_DIM = 128
CONTEXT = 32768


def _windows(get: Get, config: ModelConfig) -> ModelConfig:
    """Layers from `max_window_layers` on have the window, where it is in use at all."""
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
    must_be_off(get, "mlp_only_layers")
    if get("decoder_sparse_step", int, 1) != 1:
        must_be_off(get, "decoder_sparse_step")
    experts = experts_of(get, "num_experts", "num_experts_per_tok", get("norm_topk_prob", bool, False))
    return replace(_qwen3(get, config), experts=experts, ffn=get("moe_intermediate_size", int, 768))


def _qwen3_moe_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    experts = experts_of(get, "expert_count", "expert_used_count", normalised=True)
    width = get("expert_feed_forward_length", int, config.ffn)
    return replace(config, qk_norm=True, experts=experts, ffn=width)


QWEN2 = Family(
    "qwen2",
    from_hf=_windows,
    hf_biases="",
    hf_defaults={"max_position_embeddings": CONTEXT},
)
QWEN3 = Family(
    "qwen3",
    from_hf=_qwen3,
    hf_defaults={"head_dim": HEAD_DIM, "max_position_embeddings": CONTEXT},
)
QWEN3_MOE = Family(
    "qwen3moe",
    hf=("qwen3_moe",),
    from_hf=_qwen3_moe,
    from_gguf=_qwen3_moe_gguf,
    hf_defaults={
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
    },
)

"""LFM2: short convolutions in most layers, grouped-query attention with normalised heads in the others."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import OtherForm
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import FULL, headless_layers, must_be_off, state_layer_types
from phasewise.serving.models.packed_model import LARGEST, ModelConfig
from phasewise.serving.models.parts.states.state_layers import SHORT_CONV, StateLayers

CONV = "conv"


def _lfm2(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "conv_bias")
    if get("layer_types", list) is None:
        attending = get("full_attn_idxs", list)
        full = range(config.n_layers) if attending is None else attending
        layers = tuple(layer for layer in range(config.n_layers) if layer not in full)
    else:
        layers = state_layer_types(get, config, CONV, FULL)
    return replace(
        config,
        ffn=_ffn(get, get("block_ff_dim", int, config.ffn)),
        norm_eps=get("norm_eps", float, 1e-5),
        tied_embeddings=get("tie_embedding", bool, config.tied_embeddings),
        qk_norm=True,
        state=_state(layers, get("conv_L_cache", int, 3)),
    )


def _ffn(get: Get, width: int) -> int:
    """The width of feed-forward layers as the family computes it: two thirds, rounded up to a multiple."""
    if not get("block_auto_adjust_ff_dim", bool, True) or type(width) is not int:
        return width
    factor, multiple = get("block_ffn_dim_multiplier", float, 1.0), get("block_multiple_of", int, 256)
    if not 0 < factor <= 1 << 10 or not 1 <= multiple <= LARGEST["ffn"]:
        raise ModelError(
            f"config.json has block_ffn_dim_multiplier = {factor!r:.40} and block_multiple_of ="
            f" {multiple!r:.40}:"
            " numbers above 0 expected"
        )
    adjusted: int = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    return adjusted


def _lfm2_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    state = _state(headless_layers(get, config.n_layers), get("shortconv.l_cache", int, 3))
    return replace(config, qk_norm=True, state=state)


def _state(layers: tuple[int, ...], taps: int) -> StateLayers | None:
    return StateLayers(SHORT_CONV, layers, taps) if layers else None


LFM2 = Family(
    "lfm2",
    from_hf=_lfm2,
    from_gguf=_lfm2_gguf,
    hf_defaults={
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
        "rope_theta": 1e6,
        "max_position_embeddings": 128000,
    },
    global_names={"model.embedding_norm.weight": "final_norm", "token_embd_norm.weight": "final_norm"},
    hf_names={
        "operator_norm.weight": "attn_norm",
        "self_attn.out_proj.weight": "o",
        "self_attn.q_layernorm.weight": "q_norm",
        "self_attn.k_layernorm.weight": "k_norm",
        "feed_forward.w1.weight": "gate",
        "feed_forward.w3.weight": "up",
        "feed_forward.w2.weight": "down",
        "conv.conv.weight": OtherForm("taps"),
        "conv.in_proj.weight": "state_in",
        "conv.out_proj.weight": "o",
        "ffn_norm.weight": "ffn_norm",
    },
    gguf_names={
        "shortconv.conv.weight": OtherForm("taps"),
        "shortconv.in_proj.weight": "state_in",
        "shortconv.out_proj.weight": "o",
    },
)

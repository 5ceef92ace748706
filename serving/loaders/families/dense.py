"""Families whose layers are nearly a Llama's. Seed-OSS: biases of queries, keys and values. EXAONE 4: norms
after each half of a layer alone and over every query and key head; where there are windows, RoPE in their
layers alone. ERNIE 4.5: RoPE turns neighbours."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.loaders.families.family import (
    Family,
    Get,
    gguf_windows,
    layer_types,
    must_be_off,
    turned_in_windows,
)
from phasewise.serving.models.packed_model import ModelConfig


def _seed_oss(get: Get, config: ModelConfig) -> ModelConfig:
    return replace(config, out_bias=get("attention_out_bias", bool, False))


SEED_OSS = Family(
    "seed_oss",
    from_hf=_seed_oss,
    hf_defaults={
        "attention_bias": True,
        "head_dim": 128,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "max_position_embeddings": 524288,
    },
)


EXAONE4_PERIOD = 4


def _exaone4(config: ModelConfig) -> ModelConfig:
    return replace(config, pre_norms=False, post_norms=True, qk_norm=True)


def _exaone4_hf(get: Get, config: ModelConfig) -> ModelConfig:
    window = get("sliding_window", int)
    if window is None:
        return _exaone4(config)
    return turned_in_windows(_exaone4(config), layer_types(get, config, EXAONE4_PERIOD), window)


def _exaone4_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    if get("sliding_window", int) is None:
        return _exaone4(config)
    return turned_in_windows(_exaone4(config), *gguf_windows(get, config.n_layers, EXAONE4_PERIOD))


EXAONE4 = Family(
    "exaone4",
    from_hf=_exaone4_hf,
    from_gguf=_exaone4_gguf,
    hf_defaults={"rms_norm_eps": 1e-5, "num_attention_heads": 32, "sliding_window": 4096},
)


def _ernie(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "use_bias")
    return config


ERNIE4_5 = Family(
    "ernie4_5",
    from_hf=_ernie,
    hf_defaults={
        "rms_norm_eps": 1e-5,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "rope_theta": 5e5,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    hf_interleaved_heads=True,
    gguf_interleaved_heads=True,
)

"""Families whose layers are nearly a Llama's. Seed-OSS: biases of queries, keys and values. EXAONE 4: norms
after each half of a layer alone and over every query and key head; where there are windows, RoPE in their
layers alone. ERNIE 4.5: RoPE turns neighbours. Hunyuan, and its mixtures: a norm over every query and key
head behind RoPE, whose base may be stretched."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.cython_kernels.exact import power
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names
from phasewise.serving.loaders.families.family import (
    Family,
    Get,
    experts_of,
    fed,
    layer_types,
    number_of,
    turned_in_windows,
    with_experts,
    with_rope,
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


def _exaone4(get: Get, config: ModelConfig) -> ModelConfig:
    own, window = replace(config, pre_norms=False, post_norms=True, qk_norm=True), get("sliding_window", int)
    return own if window is None else turned_in_windows(own, layer_types(get, config, EXAONE4_PERIOD), window)


EXAONE4 = Family(
    "exaone4",
    from_hf=_exaone4,
    hf_defaults={"rms_norm_eps": 1e-5, "num_attention_heads": 32, "sliding_window": 4096},
)


ERNIE4_5 = Family(
    "ernie4_5",
    hf_only={"use_bias": False},
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


def _hunyuan(get: Get, config: ModelConfig) -> ModelConfig:
    stated = get("rope_parameters", dict) or get("rope_scaling", dict) or {}
    theta, kind = stated.get("rope_theta"), stated.get("rope_type", stated.get("type"))
    theta = config.rope.theta if theta is None else number_of(theta)
    if kind == "dynamic":
        alpha: Any = stated.get("alpha")
        if type(alpha) not in (int, float) or not 1e-6 <= alpha <= 1e9:
            raise ModelError(f"config.json has a RoPE whose alpha is {alpha!r:.60}: 1e-6 to 1e9 expected")
        theta *= power(alpha, config.head_dim, config.head_dim - 2) if config.head_dim > 2 else 1.0
    elif kind not in (None, "default"):
        raise ModelError(f"config.json asks for RoPE scaling {kind!r:.60}; dynamic by alpha can run")
    return _norm_last(get, with_rope(config, theta=theta, dim=config.head_dim, scaling=None))


def _norm_last(get: Get, config: ModelConfig) -> ModelConfig:
    del get
    return replace(config, qk_norm=True, norm_last=True)


def _one(get: Get, key: str, default: int | None = None) -> Any:
    """The number under `key`, or the equal numbers of a list as one."""
    stated = get(key, None, default)
    if isinstance(stated, list) and stated and stated.count(stated[0]) == len(stated):
        stated = stated[0]
    if type(stated) is not int:
        raise ModelError(f"config.json has {key} = {stated!r:.60}: one number for all layers can run")
    return stated


def _hunyuan_moe(get: Get, config: ModelConfig) -> ModelConfig:
    numbers = {key: _one(get, key) for key in ("num_experts", "moe_topk")}
    shared = config.ffn * _one(get, "num_shared_expert", 1)
    width = _one(get, "moe_intermediate_size", config.ffn)
    experts = experts_of(
        lambda key, *_: numbers[key], "num_experts", "moe_topk", width, normalised=True, shared_ffn=shared
    )
    return with_experts(_hunyuan(get, config), experts)


def _hunyuan_moe_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    shared = get("shared_intermediate_size", int, 0)
    width = get("moe_intermediate_size", int, config.ffn)
    experts = experts_of(get, "num_experts", "num_experts_per_tok", width, normalised=True, shared_ffn=shared)
    return with_experts(_norm_last(get, config), experts)


_HUNYUAN: Names = {"self_attn.query_layernorm.weight": "q_norm", "self_attn.key_layernorm.weight": "k_norm"}
HUNYUAN = Family(
    "hunyuan-dense",
    hf=("hunyuan_v1_dense",),
    from_hf=_hunyuan,
    from_gguf=_norm_last,
    hf_names=_HUNYUAN,
    hf_defaults={"rms_norm_eps": 1e-5},
    hf_only={"use_cla": False, "attention_bias": False},
    own_layers=True,
)
HUNYUAN_MOE = Family(
    "hunyuan-moe",
    hf=("hunyuan_v1_moe", "hunyuan"),
    from_hf=_hunyuan_moe,
    from_gguf=_hunyuan_moe_gguf,
    hf_names={**_HUNYUAN, "mlp.gate.wg.weight": "router", **fed("mlp.shared_mlp")},
    hf_defaults={"rms_norm_eps": 1e-5},
    hf_only={"use_cla": False, "attention_bias": False},
    own_layers=True,
)

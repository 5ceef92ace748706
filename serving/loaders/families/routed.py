"""Families whose layers are nearly a Llama's. Seed-OSS: biases of queries, keys and values. EXAONE 4: norms
after each half of a layer alone and over every query and key head; where there are windows, RoPE in their
layers alone. ERNIE 4.5: RoPE turns neighbours. Hunyuan, and its mixtures: a norm over every query and key
head behind RoPE, whose base may be stretched. Mixtures whose routers are like DeepSeek's. dots.llm1: a norm
over every query and key head. Ling and Ring 2 (BailingMoE 2): the same, with RoPE in a part of each head and
one tensor for queries, keys and values. ERNIE 4.5: experts are chosen by their softmax and a bias. LFM2:
logistic routing behind first dense layers. EXAONE MoE and HY 3: norms over every query and key head; the
former with RoPE in windows alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.cython_kernels.exact import power
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names, OtherForm, TensorCut
from phasewise.serving.loaders.families.deepseek import routed
from phasewise.serving.loaders.families.family import (
    Family,
    Get,
    TensorShapes,
    experts_of,
    fed,
    layer_types,
    number_of,
    turned_in_windows,
    whole_number,
    with_experts,
    with_forms,
    with_rope,
    with_windows,
)
from phasewise.serving.loaders.families.hybrids import LFM2
from phasewise.serving.models.packed_model import LayerForm, ModelConfig
from phasewise.serving.models.parts.experts import SOFTMAX


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


def _dots1(get: Get, config: ModelConfig) -> ModelConfig:
    config = routed(get, replace(config, qk_norm=True))
    return with_windows(config, layer_types(get, config, 1), get("sliding_window", int))


DOTS1 = Family(
    "dots1",
    from_hf=_dots1,
    hf_defaults={
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "norm_topk_prob": False,
    },
)


def _normed(get: Get, config: ModelConfig) -> ModelConfig:
    return routed(get, replace(config, qk_norm=True))


def _exaone(get: Get, config: ModelConfig) -> ModelConfig:
    sliding = layer_types(get, config, EXAONE4_PERIOD)
    return turned_in_windows(_normed(get, config), sliding, get("sliding_window", int))


EXAONE_MOE = Family(
    "exaone-moe",
    hf=("exaone_moe",),
    from_hf=_exaone,
    hf_fields={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    hf_defaults={
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1024,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
    },
    hf_ignored=("mtp.",),
    more_layers=True,
)


def _hy3_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    shared = get("shared_intermediate_size", int, 0)
    return routed(get, replace(config, qk_norm=True), shared_ffn=shared)


def _hy3_by_tensors(config: ModelConfig, shapes: TensorShapes) -> ModelConfig:
    """Find the layers without experts, of which the metadata says nothing."""

    def own(layer: int, form: LayerForm) -> LayerForm:
        has_experts = f"blk.{layer}.ffn_gate_inp.weight" in shapes
        width = shapes.get(f"blk.{layer}.ffn_gate.weight", (0,))[0]
        return form if has_experts else replace(form, feed_forward=width)

    return with_forms(config, own)


HY3 = Family(
    "hy_v3",
    from_hf=_normed,
    from_gguf=_hy3_gguf,
    from_gguf_tensors=_hy3_by_tensors,
    hf_names={
        "mlp.router.gate.weight": "router",
        "mlp.expert_bias": "choice_bias",
        **fed("mlp.shared_mlp"),
    },
    gguf_names={"exp_probs_b": "choice_bias"},
    hf_fields={
        "n_routed_experts": "num_experts",
        "n_shared_experts": "num_shared_experts",
        "routed_scaling_factor": "router_scaling_factor",
    },
    hf_defaults={
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "rope_theta": 11158840.0,
        "max_position_embeddings": 131072,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "first_k_dense_replace": 1,
        "router_scaling_factor": 2.826,
    },
    more_layers=True,
)


def _bailing_hf(get: Get, config: ModelConfig) -> ModelConfig:
    if get("score_function", str) != "sigmoid":
        raise ModelError(
            "config.json describes a mixture of the first Ling: those of Ling 2 and Ring 2 can run"
        )
    return _normed(get, config)


BAILING2 = Family(
    "bailingmoe2",
    hf=("bailing_moe", "bailing_moe_v2"),
    from_hf=_bailing_hf,
    from_gguf=_normed,
    hf_fields={"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"},
    hf_only={
        **dict.fromkeys(("use_bias", "use_qkv_bias", "norm_head", "norm_softmax"), False),
        **dict.fromkeys(("use_qk_norm", "moe_router_enable_expert_bias"), True),
    },
    hf_defaults={"partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    global_names={"model.word_embeddings.weight": "embed"},
    hf_names={
        "attention.query_key_value.weight": TensorCut(("q", "k", "v")),
        "attention.dense.weight": "o",
        "attention.query_layernorm.weight": "q_norm",
        "attention.key_layernorm.weight": "k_norm",
        "mlp.gate.expert_bias": "choice_bias",
    },
    gguf_names={"attn_qkv.weight": TensorCut(("q", "k", "v"))},
    partial_rope=True,
    more_layers=True,
)


def _ernie(get: Get, config: ModelConfig) -> ModelConfig:
    first, every = get("moe_layer_start_index", int, 1), whole_number(get, "moe_layer_interval", 1)
    last = get("moe_layer_end_index", int, -1)
    last = config.n_layers - 1 if last == -1 else last
    layers = range(config.n_layers)
    dense = [(layer + 1) % every != 0 or not first <= layer <= last for layer in layers]
    return routed(get, config, SOFTMAX, dense=dense, choice_bias=True)


def _ernie_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    if get("interleave_moe_layer_step", int, 1) != 1:
        raise ModelError("the GGUF metadata gives layers without experts between those that have some")
    return routed(get, config, SOFTMAX, choice_bias=True)


ERNIE4_5_MOE = replace(
    ERNIE4_5,
    name="ernie4_5-moe",
    hf=("ernie4_5_moe",),
    from_hf=_ernie,
    from_gguf=_ernie_gguf,
    hf_fields={
        "n_routed_experts": "moe_num_experts",
        "num_experts_per_tok": "moe_k",
        "n_shared_experts": "moe_num_shared_experts",
    },
    gguf_defaults={"norm_topk_prob": True},
    hf_names={"mlp.moe_statics.e_score_correction_bias": OtherForm("choice_bias")},
    gguf_names={"exp_probs_b.bias": OtherForm("choice_bias")},
    hf_defaults={
        **ERNIE4_5.hf_defaults,
        "head_dim": None,
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_num_shared_experts": 2,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
    },
    hf_ignored=("model.mtp_",),
)


def _lfm2(get: Get, config: ModelConfig) -> ModelConfig:
    return routed(get, LFM2.from_hf(get, config))


def _lfm2_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    assert LFM2.from_gguf is not None
    return routed(get, LFM2.from_gguf(get, config))


LFM2_MOE = replace(
    LFM2,
    name="lfm2moe",
    hf=("lfm2_moe",),
    from_hf=_lfm2,
    from_gguf=_lfm2_gguf,
    hf_fields={"n_routed_experts": "num_experts", "first_k_dense_replace": "num_dense_layers"},
    hf_only={**LFM2.hf_only, "use_expert_bias": True},
    gguf_defaults={"norm_topk_prob": True},
    hf_defaults={
        **LFM2.hf_defaults,
        "intermediate_size": 7168,
        "block_auto_adjust_ff_dim": False,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
        "moe_intermediate_size": 1792,
    },
    hf_names={
        **LFM2.hf_names,
        "feed_forward.gate.weight": "router",
        "feed_forward.expert_bias": "choice_bias",
        **fed("feed_forward.experts.{e}", "experts.{e}.", ("w1", "w3", "w2")),
    },
)

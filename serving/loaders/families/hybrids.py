"""Families whose layers keep a state beside or in place of attention. Falcon-H1: Mamba 2 beside attention in
every layer, and a multiplier for each product (GGUF files have the multipliers in their weights). Granite 3:
a Llama whose embeddings, scores, halves of layers and logits have multipliers; and its mixtures, with or
without an expert that all tokens share; Granite 4 H: the same with Mamba 2 in most layers. LFM2: short
convolutions in most layers, grouped-query attention with normalised heads in the others."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import OtherForm, TensorCut
from phasewise.serving.loaders.families.family import (
    Family,
    Get,
    TensorShapes,
    experts_of,
    headless_layers,
    named_layers,
    positive,
    with_experts,
    with_forms,
    with_kind,
    with_states,
    with_width,
)
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.feed_forward import MOST_WIDTH
from phasewise.serving.models.parts.site import ProductFactors
from phasewise.serving.models.parts.states import MAMBA2, SHORT_CONV, StateForm

ANY_STEP = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])
"""Limits of time steps that mean no limit, as JSON with infinities and as transformers 5 writes them."""


def check_time_steps(get: Get, *keys: str) -> None:
    """Raise ModelError for limits of time steps, which transformers applies in prompts and not in answers."""
    for key in keys:
        limits = get(key, list)
        if limits is not None and limits not in ANY_STEP:
            raise ModelError(f"config.json has {key} = {limits!r:.60}, which cannot run")


def mamba_hf(get: Get, inner: int) -> StateForm:
    """The state of Mamba 2 layers of config.json. `inner`: values of all heads."""
    check_time_steps(get, "time_step_limit")
    heads = get("mamba_n_heads", int, 128)
    if not heads or inner % heads or get("mamba_d_head") not in (None, "auto", inner // heads):
        raise ModelError(f"config.json has {heads} mamba heads for {inner} numbers, which they do not divide")
    return StateForm(
        MAMBA2,
        get("mamba_d_conv", int, 4),
        heads,
        get("mamba_n_groups", int, 1),
        get("mamba_d_state", int, 256),
        inner // heads,
        get("mamba_conv_bias", bool, True),
    )


def mamba_gguf(get: Get) -> StateForm:
    """The state of Mamba 2 layers of GGUF metadata, with one norm over all heads."""
    return replace(state_gguf(get, MAMBA2, groups=1), conv_bias=True)


def state_gguf(get: Get, kind: str, groups: int = 0) -> StateForm:
    """The state of this kind that layers of GGUF metadata keep. `groups`: for a file that states none."""
    heads, inner = get("ssm.time_step_rank", int, 0), get("ssm.inner_size", int, 0)
    if not heads or inner % heads:
        raise ModelError(f"the GGUF metadata gives {inner} values for {heads} heads of layers with a state")
    return StateForm(
        kind,
        get("ssm.conv_kernel", int, 4),
        heads,
        get("ssm.group_count", int, groups),
        get("ssm.state_size", int, 0),
        inner // heads,
    )


def _granite(get: Get, config: ModelConfig) -> ModelConfig:
    divisor = positive(get, "logits_scaling", 1.0)
    if not 1e-6 <= divisor <= 1e6:
        raise ModelError(
            f"the config has logits_scaling = {divisor!r:.80}: a number from 1e-6 to 1e6 expected"
        )
    return replace(
        config,
        embed_scale=positive(get, "embedding_multiplier", 1.0),
        residual_scale=positive(get, "residual_multiplier", 1.0),
        attention_scale=positive(get, "attention_multiplier", 1.0),
        logit_scale=1 / divisor,
    )


def _moe(get: Get, config: ModelConfig) -> ModelConfig:
    shared = get("shared_intermediate_size", int, 0)
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", config.ffn, True, shared_ffn=shared)
    return with_experts(_granite(get, config), experts)


def _hybrid(get: Get, config: ModelConfig) -> ModelConfig:
    state, layers = mamba_hf(get, get("mamba_expand", int, 2) * config.hidden), _state_layers(get, config)
    kind = get("position_embedding_type", str)
    if kind not in (None, "rope", "nope"):
        raise ModelError(f"config.json has position_embedding_type = {kind!r:.60}: rope or none can run")
    dense = get("num_local_experts", int, 0) == 0
    shared = get("shared_intermediate_size", int, 1024)
    config = with_width(_granite(get, config), shared) if dense else _moe(get, config)
    return with_states(config if kind == "rope" else with_kind(config, rope=None), state, layers)


def _state_layers(get: Get, config: ModelConfig) -> list[bool]:
    """True for each layer with a state, under either of two keys, in the words of either release of
    transformers."""
    names = get("layer_types", list, get("layers_block_type", list))
    old = {"mamba": "linear_attention", "attention": "full_attention"}
    renamed = [old.get(name, name) if isinstance(name, str) else name for name in names or ()]
    return named_layers(lambda *_: renamed or None, config, "linear_attention")


def _hybrid_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    layers, is_turned = headless_layers(get, config.n_layers), get("rope.scaling.finetuned", bool, True)
    config = _moe(get, config) if get("expert_count", int, 0) else _granite(get, config)
    return with_states(config if is_turned else with_kind(config, rope=None), mamba_gguf(get), layers)


GRANITE = Family("granite", from_hf=_granite, gguf_interleaved_heads=True)
GRANITE_MOE = Family(
    "granitemoe",
    hf=("granitemoe", "granitemoeshared"),
    from_hf=_moe,
    hf_defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    hf_names={
        "block_sparse_moe.router.layer.weight": "router",
        "block_sparse_moe.input_linear.weight": TensorCut(("gate", "up"), of_experts=True),
        "block_sparse_moe.output_linear.weight": TensorCut(("down",), of_experts=True),
        "shared_mlp.input_linear.weight": TensorCut(("gate", "up")),
        "shared_mlp.output_linear.weight": "down",
    },
    gguf_interleaved_heads=True,
)

GRANITE_HYBRID = Family(
    "granitehybrid",
    hf=("granitemoehybrid",),
    from_hf=_hybrid,
    hf_only={"attention_bias": False, "mamba_proj_bias": False},
    from_gguf=_hybrid_gguf,
    hf_defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 1024},
    hf_names=GRANITE_MOE.hf_names,
    gguf_interleaved_heads=True,
)


def _falcon(get: Get, config: ModelConfig) -> ModelConfig:
    state = mamba_hf(get, _inner(get, config.hidden))
    normalised = get("mamba_rms_norm", bool, False)
    if normalised and get("mamba_norm_before_gate", bool, True):
        raise ModelError("config.json has mamba_norm_before_gate = True, which cannot run")
    return _multiplied(get, _beside(config, state, state.groups if normalised else 0))


def _beside(config: ModelConfig, state: StateForm, norm_groups: int) -> ModelConfig:
    """Let all layers keep a state beside their attention. `norm_groups`: of what is read of it."""
    own = replace(state, norm_groups=norm_groups)
    return with_forms(config, lambda _, form: replace(form, state=own))


def _inner(get: Get, hidden: int) -> int:
    """Values of all heads; a field that is null means another number than one that is absent."""
    if get("mamba_d_ssm", None, 1024) is None:
        return int(get("mamba_expand", int, 2)) * hidden
    return int(get("mamba_d_ssm", int, 1024))


def _multiplied(get: Get, config: ModelConfig) -> ModelConfig:
    """Add multipliers to the config. Queries, keys and values have one norm, which holds the multiplier of
    attention's output; the scale of scores divides that out of queries and keys."""
    into, out = positive(get, "attention_in_multiplier", 1.0), positive(get, "attention_out_multiplier", 1.0)
    gate, down = _numbers(get, "mlp_multipliers", 2)
    into_state = positive(get, "ssm_in_multiplier", 1.0)
    of_gate, values, own_keys, queries, times = (
        into_state * own for own in _numbers(get, "ssm_multipliers", 5)
    )
    keys = positive(get, "key_multiplier", 1.0)
    return replace(
        config,
        embed_scale=positive(get, "embedding_multiplier", 1.0),
        logit_scale=positive(get, "lm_head_multiplier", 1.0),
        attention_scale=keys / (out * out * math.sqrt(config.head_dim)),
        factors=ProductFactors(
            qkv=into * out,
            state_gate=of_gate,
            state_values=values,
            state_keys=own_keys,
            state_queries=queries,
            state_times=times,
            state_out=positive(get, "ssm_out_multiplier", 1.0),
            gate=gate,
            up=down,
        ),
    )


def _numbers(get: Get, key: str, count: int) -> list[float]:
    stated: list[Any] | None = get(key, list)
    if stated is None:
        return [1.0] * count
    if len(stated) != count or not all(type(number) in (int, float) and number > 0 for number in stated):
        raise ModelError(f"config.json has {key} = {stated!r:.60}: {count} numbers above 0 expected")
    return [float(number) for number in stated]


def _falcon_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    state = mamba_gguf(get)
    return _beside(config, state, state.groups)


def _falcon_norm(config: ModelConfig, shapes: TensorShapes) -> ModelConfig:
    """Leave out the norm of results where the file has none."""
    assert config.state is not None
    return config if "blk.0.ssm_norm.weight" in shapes else _beside(config, config.state, 0)


_IN = TensorCut(("state_gate", "state_in", "state_time"))

FALCON_H1 = Family(
    "falconh1",
    hf=("falcon_h1",),
    gguf=("falcon-h1",),
    from_hf=_falcon,
    hf_only=dict.fromkeys(("attention_bias", "projectors_bias", "mamba_proj_bias"), False),
    from_gguf=_falcon_gguf,
    from_gguf_tensors=_falcon_norm,
    hf_defaults={"num_key_value_heads": 8, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    global_names={"model.final_layernorm.weight": "final_norm"},
    hf_names={"mamba.in_proj.weight": _IN, "pre_ff_layernorm.weight": "ffn_norm"},
    gguf_names={"ssm_in.weight": _IN, "ffn_norm": "ffn_norm"},
)


CONV = "conv"


def _lfm2(get: Get, config: ModelConfig) -> ModelConfig:
    if get("layer_types", list) is None:
        attending = get("full_attn_idxs", list)
        keeps = [attending is not None and layer not in attending for layer in range(config.n_layers)]
    else:
        keeps = named_layers(get, config, CONV)
    config = replace(
        with_width(config, _ffn(get, get("block_ff_dim", int, config.ffn))),
        norm_eps=get("norm_eps", float, 1e-5),
        tied_embeddings=get("tie_embedding", bool, config.tied_embeddings),
        qk_norm=True,
    )
    return with_states(config, StateForm(SHORT_CONV, get("conv_L_cache", int, 3)), keeps)


def _ffn(get: Get, width: int) -> int:
    """The width of feed-forward layers as the family computes it: two thirds, rounded up to a multiple."""
    if not get("block_auto_adjust_ff_dim", bool, True) or type(width) is not int:
        return width
    factor, multiple = get("block_ffn_dim_multiplier", float, 1.0), get("block_multiple_of", int, 256)
    if not 0 < factor <= 1 << 10 or not 1 <= multiple <= MOST_WIDTH:
        raise ModelError(
            f"config.json has block_ffn_dim_multiplier = {factor!r:.40} and block_multiple_of ="
            f" {multiple!r:.40}:"
            " numbers above 0 expected"
        )
    adjusted: int = -(-int(factor * int(2 * width / 3)) // multiple) * multiple
    return adjusted


def _lfm2_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    state = StateForm(SHORT_CONV, get("shortconv.l_cache", int, 3))
    return with_states(replace(config, qk_norm=True), state, headless_layers(get, config.n_layers))


LFM2 = Family(
    "lfm2",
    from_hf=_lfm2,
    hf_only={"conv_bias": False},
    from_gguf=_lfm2_gguf,
    hf_defaults={
        "intermediate_size": 12288, "num_key_value_heads": 8, "tie_word_embeddings": True, "rope_theta": 1e6,
        "max_position_embeddings": 128000,
    },
    global_names={"model.embedding_norm.weight": "final_norm", "token_embd_norm.weight": "final_norm"},
    hf_names={
        "operator_norm.weight": "attn_norm", "self_attn.out_proj.weight": "o",
        "self_attn.q_layernorm.weight": "q_norm", "self_attn.k_layernorm.weight": "k_norm",
        "feed_forward.w1.weight": "gate", "feed_forward.w3.weight": "up", "feed_forward.w2.weight": "down",
        "conv.conv.weight": OtherForm("taps"), "conv.in_proj.weight": "state_in", "conv.out_proj.weight": "o",
        "ffn_norm.weight": "ffn_norm",
    },
    gguf_names={
        "shortconv.conv.weight": OtherForm("taps"),
        "shortconv.in_proj.weight": "state_in",
        "shortconv.out_proj.weight": "o",
    },
)  # fmt: skip

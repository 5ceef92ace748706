"""Families whose layers keep a state beside or in place of attention. Falcon-H1: Mamba 2 beside attention in
every layer, and a multiplier for each product (GGUF files have the multipliers in their weights). Granite 3:
a Llama whose embeddings, scores, halves of layers and logits have multipliers; and its mixtures, with or
without an expert that all tokens share; Granite 4 H: the same with Mamba 2 in most layers. LFM2: short
convolutions in most layers, grouped-query attention with normalised heads in the others. Hybrids with
mixtures as DeepSeek has them. Kimi Linear: the delta rule with a decay for each number of a key in three of
four layers, latent attention without positions in the others. Nemotron-H: layers of one half each, by a
pattern: Mamba 2, attention without positions, or a feed-forward layer without a gate, maybe a mixture."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import HeadParts, Names, OfLayer, OtherForm, TensorCut
from phasewise.serving.loaders.families.deepseek import (
    GGUF_LATENT,
    latent_of_gguf,
    latent_of_hf,
    routed,
    routed_experts,
    with_latent,
)
from phasewise.serving.loaders.families.family import (
    Family,
    Get,
    TensorShapes,
    experts_of,
    fed,
    headless_layers,
    listed,
    named_layers,
    positive,
    with_experts,
    with_forms,
    with_kind,
    with_states,
    with_width,
)
from phasewise.serving.models.packed_model import LARGEST, LayerForm, LayerKind, ModelConfig
from phasewise.serving.models.parts.attention import LatentAttention
from phasewise.serving.models.parts.experts import SOFTMAX, Experts
from phasewise.serving.models.parts.feed_forward import MOST_WIDTH, FeedForwardForm
from phasewise.serving.models.parts.site import ProductFactors
from phasewise.serving.models.parts.states import KDA, MAMBA2, SHORT_CONV, StateForm

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


LINEAR = "linear_attention"


def _kimi(get: Get, config: ModelConfig) -> ModelConfig:
    stated: dict[str, Any] = get("linear_attn_config", dict, {})

    def of_state(inner: str, key: str, default: int) -> Any:
        return stated[inner] if inner in stated else get(key, int, default)

    heads = of_state("num_heads", "linear_num_heads", 32)
    dim = of_state("head_dim", "linear_head_dim", 128)
    taps = of_state("short_conv_kernel_size", "linear_conv_kernel_dim", 4)
    state = StateForm(KDA, taps, heads, heads, dim, dim)
    context = get("model_max_length", int, get("max_position_embeddings", int, 1 << 20))
    config = replace(routed(get, config), context_length=context)
    return _with_latent_states(config, state, _kimi_layers(get, config, stated), latent_of_hf(get))


def _kimi_layers(get: Get, config: ModelConfig, stated: dict[str, Any]) -> list[bool]:
    """True for each layer with a state: by `layer_types`, by lists from 1 on, or the first and all but every
    fourth."""
    if get("layer_types", list) is not None:
        return named_layers(get, config, LINEAR)
    full, linear = stated.get("full_attn_layers"), stated.get("kda_layers")
    if full is None or linear is None:
        return [layer == 0 or layer % 4 != 0 for layer in range(config.n_layers)]
    every = range(1, config.n_layers + 1)
    if not (isinstance(full, list) and isinstance(linear, list)) or sorted([*full, *linear]) != list(every):
        raise ModelError(
            f"config.json has full_attn_layers = {full!r:.60} and kda_layers = {linear!r:.60}: each of"
            f" {counted(config.n_layers, 'layer')} in one of them expected"
        )
    return [layer in linear for layer in every]


def _with_latent_states(
    config: ModelConfig, state: StateForm, keeps: list[bool], latent: LatentAttention
) -> ModelConfig:
    return with_latent(with_states(with_kind(config, rope=None), state, keeps), latent, 0.0)


def _kimi_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    heads, dim, layers = config.n_heads, get("kda.head_dim", int, 128), headless_layers(get, config.n_layers)
    latent = latent_of_gguf(get, config.norm_eps)
    state = StateForm(KDA, get("ssm.conv_kernel", int, 4), heads, heads, dim, dim)
    return _with_latent_states(routed(get, config, SOFTMAX), state, layers, latent)


_KIMI: Names = {
    "self_attn.q_proj.weight": OfLayer(("state_q", "q")), "self_attn.k_proj.weight": "state_k",
    "self_attn.v_proj.weight": "state_v",
    **{f"self_attn.{part}_conv1d.weight": OtherForm(f"{part}_taps") for part in "qkv"},
    **{f"self_attn.{part}_proj.weight": f"state_{part}" for part in ("f_a", "f_b", "g_a", "g_b", "b")},
    "self_attn.A_log": OtherForm("rates", negated_exponential=True), "self_attn.dt_bias": "time_offsets",
    "self_attn.o_norm.weight": "state_scale", "self_attn.q_a_proj.weight": "q_a",
    "self_attn.q_a_layernorm.weight": "q_a_norm", "self_attn.q_b_proj.weight": "q_b",
    "self_attn.kv_a_proj_with_mqa.weight": "kv_a", "self_attn.kv_a_layernorm.weight": "kv_a_norm",
    "self_attn.kv_b_proj.weight": HeadParts("k_b", "v_b"), **fed("block_sparse_moe.shared_experts"),
    **fed("block_sparse_moe"),
}  # fmt: skip
"""Rows of latent attention keep their places, since nothing rotates them. The last names are of dense layers
as transformers saves them."""

KIMI_LINEAR = Family(
    "kimilinear",
    hf=("kimi_linear",),
    gguf=("kimi-linear",),
    from_hf=_kimi,
    from_gguf=_kimi_gguf,
    hf_fields={
        "n_routed_experts": "num_experts", "num_experts_per_tok": "num_experts_per_token",
        "n_shared_experts": "num_shared_experts", "norm_topk_prob": "moe_renormalize",
        "n_group": "num_expert_group",
    },
    hf_only={
        **dict.fromkeys(("attention_bias", "rope_scaling", "rope_parameters"), None), "mla_use_nope": True,
        "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid",
    },
    gguf_defaults={"norm_topk_prob": True},
    hf_names=_KIMI,
    gguf_names={
        **GGUF_LATENT, "attn_q.weight": OfLayer(("state_q", "q")), "attn_k.weight": "state_k",
        "attn_v.weight": "state_v", "attn_q_b.weight": "q_b", "attn_kv_a_mqa.weight": "kv_a",
        **{f"ssm_conv1d_{part}.weight": OtherForm(f"{part}_taps") for part in "qkv"},
        **{f"ssm_{part}.weight": f"state_{part}" for part in ("f_a", "f_b", "g_a", "g_b")},
        "ssm_beta.weight": "state_b",
    },
    hf_defaults={
        "rms_norm_eps": 1e-5, "qk_rope_head_dim": 64, "first_k_dense_replace": 1, "num_attention_heads": 32,
        "num_hidden_layers": 27, "num_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1,
        "moe_intermediate_size": 1024, "routed_scaling_factor": 2.446,
    },
    latent=True,
)  # fmt: skip


STATE, ATTENTION, DENSE, MIXTURE = "linear_attention", "full_attention", "mlp", "moe"
IN_PATTERNS = {"M": STATE, "*": ATTENTION, "-": DENSE, "E": MIXTURE}
OLDER = {"mamba": STATE, "attention": ATTENTION}


def _nemotron(get: Get, config: ModelConfig) -> ModelConfig:
    check_time_steps(get, "time_step_limit", "mamba_dt_limit")
    kinds = _kinds(get)
    groups, heads = get("mamba_n_groups", int, get("n_groups", int, 8)), get("mamba_num_heads", int, 128)
    state = StateForm(
        MAMBA2,
        get("mamba_d_conv", int, get("conv_kernel", int, 4)),
        heads,
        groups,
        get("ssm_state_size", int, 128),
        get("mamba_head_dim", int, 64),
        get("mamba_conv_bias", bool, get("use_conv_bias", bool, True)),
        norm_groups=groups,
    )
    shared = get("moe_shared_expert_intermediate_size", int, 7688)
    experts = _latent_experts(get, shared) if MIXTURE in kinds else None
    config = replace(config, norm_eps=get("layer_norm_epsilon", float, 1e-5))
    return _of_halves(config, kinds, state, experts)


def _latent_experts(get: Get, shared: int) -> Experts | None:
    """The mixture, with the products between which experts compute where the file states their width."""
    experts, latent = routed_experts(get, shared=shared), get("moe_latent_size", int, 0)
    return experts and replace(experts, latent=latent)


def _kinds(get: Get) -> list[str]:
    """The half of every layer, from a list or a pattern of letters."""
    pattern = get("hybrid_override_pattern", str)
    stated: list[Any] | None = get("layers_block_type", list, get("layer_types", list))
    if stated is None and pattern is not None:
        stated = [IN_PATTERNS.get(letter, letter) for letter in pattern]
    if stated is None:
        return [STATE, MIXTURE, ATTENTION, DENSE]
    kinds = [OLDER.get(kind, kind) if isinstance(kind, str) else "" for kind in stated]
    if not 1 <= len(kinds) <= LARGEST["n_layers"] or not set(kinds) <= set(IN_PATTERNS.values()):
        raise ModelError(
            f"config.json has layers {stated!r:.60}: each of {', '.join(IN_PATTERNS.values())} expected"
        )
    return kinds


def _of_halves(
    config: ModelConfig, kinds: list[str], state: StateForm, experts: Experts | None
) -> ModelConfig:
    """Make the config's layers single halves of these kinds, without positions in attention."""
    halves = {
        STATE: LayerForm(None, None, state),
        ATTENTION: LayerForm(LayerKind(None, None), None),
        DENSE: LayerForm(None, config.ffn),
        MIXTURE: LayerForm(None, experts or config.ffn),
    }
    return replace(config, forms=tuple(halves[kind] for kind in kinds))


def _nemotron_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    n_layers = config.n_layers
    stated = n_layers + get("nextn_predict_layers", int, 0)
    heads, widths = (listed(get, key, stated) for key in ("attention.head_count_kv", "feed_forward_length"))
    kinds = [
        MIXTURE if width else ATTENTION if kv else STATE
        for kv, width in zip(heads[:n_layers], widths[:n_layers], strict=True)
    ]
    experts = _latent_experts(get, get("expert_shared_feed_forward_length", int, 0))
    state = mamba_gguf(get)
    return _of_halves(config, kinds, replace(state, norm_groups=state.groups), experts)


NEMOTRON_H = Family(
    "nemotronh",
    hf=("nemotron_h",),
    gguf=("nemotron_h", "nemotron_h_moe"),
    from_hf=_nemotron,
    from_gguf=_nemotron_gguf,
    hf_only={
        **dict.fromkeys(("attention_bias", "mamba_proj_bias", "use_bias"), False),
        "sliding_window": None,
        "mlp_hidden_act": "relu2",
        "mamba_hidden_act": "silu",
    },
    ffn_form=FeedForwardForm("relu2", gated=False),
    hf_defaults={
        "num_hidden_layers": 1,  # told by their list
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 21504,
        "max_position_embeddings": 4096,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
    },
    hf_text_prefixes=("backbone.",),
    hf_ignored=("mtp.",),
    more_layers=True,
    global_names={"model.embeddings.weight": "embed", "model.norm_f.weight": "final_norm"},
    hf_names={
        "norm.weight": "attn_norm",
        **{f"mixer.{part}_proj.weight": part for part in ("q", "k", "v", "o")},
        **fed("mixer"),
        **fed("mixer.experts.{e}", "experts.{e}."),
        **{f"mixer.experts.{part}_proj": TensorCut((part,), of_experts=True) for part in ("up", "down")},
        **fed("mixer.shared_experts"),
        "mixer.fc1_latent_proj.weight": "latent_in",
        "mixer.fc2_latent_proj.weight": "latent_out",
    },
    gguf_names={"ffn_latent_down.weight": "latent_in", "ffn_latent_up.weight": "latent_out"},
)

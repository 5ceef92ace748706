"""Hybrids with mixtures as DeepSeek has them. Kimi Linear: the delta rule with a decay for each number of a
key in three of four layers, latent attention without positions in the others. Nemotron-H: layers of one half
each, by a pattern: Mamba 2, attention without positions, or a feed-forward layer without a gate, which may be
a mixture."""

from __future__ import annotations

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
    fed,
    headless_layers,
    listed,
    named_layers,
    with_kind,
    with_states,
)
from phasewise.serving.loaders.families.hybrids import check_time_steps, mamba_gguf
from phasewise.serving.models.packed_model import LARGEST, LayerForm, LayerKind, ModelConfig
from phasewise.serving.models.parts.attention import LatentAttention
from phasewise.serving.models.parts.experts import SOFTMAX, Experts
from phasewise.serving.models.parts.feed_forward import FeedForwardForm
from phasewise.serving.models.parts.states import KDA, MAMBA2, StateForm

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
    return _with_states(config, state, _state_layers(get, config, stated), latent_of_hf(get))


def _state_layers(get: Get, config: ModelConfig, stated: dict[str, Any]) -> list[bool]:
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


def _with_states(
    config: ModelConfig, state: StateForm, keeps: list[bool], latent: LatentAttention
) -> ModelConfig:
    return with_latent(with_states(with_kind(config, rope=None), state, keeps), latent, 0.0)


def _kimi_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    heads, dim, layers = config.n_heads, get("kda.head_dim", int, 128), headless_layers(get, config.n_layers)
    latent = latent_of_gguf(get, config.norm_eps)
    state = StateForm(KDA, get("ssm.conv_kernel", int, 4), heads, heads, dim, dim)
    return _with_states(routed(get, config, SOFTMAX), state, layers, latent)


_HF: Names = {
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
    hf_names=_HF,
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

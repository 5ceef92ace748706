"""DeepSeek's latent attention, and mixtures in the form that others took over: groups of experts, a bias for
the choice alone, shared experts, and first layers without experts. DeepSeek V3.2 and GLM 5: DeepSeek V3 with
an indexer, which chooses the `index_topk` positions that a token sees. In GLM 5.2 layers share choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Cut, HeadParts, HeadStack, Names, Turned
from phasewise.serving.loaders.families.family import (
    LAYER_HEAD,
    Family,
    Get,
    experts_of,
    named_layers,
    positive,
    whole_number,
    with_experts,
    with_rope,
    yarn_magnitude,
)
from phasewise.serving.models.packed_model import LARGEST, ModelConfig
from phasewise.serving.models.parts.attention import Indexer, LatentAttention
from phasewise.serving.models.parts.experts import LOGISTIC, SOFTMAX, Experts
from phasewise.serving.models.rope import YarnScaling

GATING = {1: SOFTMAX, 2: LOGISTIC}
"""The function from logits to scores, by its number in GGUF files."""


def routed(
    get: Get,
    config: ModelConfig,
    scores: str = LOGISTIC,
    *,
    dense: list[bool] | None = None,
    **changes: Any,
) -> ModelConfig:
    """Add the mixture of either format to the config, if there is one. `dense`: true for layers without
    experts, in place of what the common keys say. `changes`: settings of the mixture, in place of the file's.
    """
    dense = _dense_layers(get, config) if dense is None else dense
    experts = None if all(dense) else routed_experts(get, scores)
    return config if experts is None else with_experts(config, replace(experts, **changes), dense)


def routed_experts(get: Get, scores: str = LOGISTIC, shared: int | None = None) -> Experts | None:
    """The mixture of either format; None where there is none. `scores`: of a file that states none:
    "logistic", with a bias for the choice and groups ranked by their two best, or "softmax", with neither.
    `shared`: the shared expert's width, in place of what the common keys say."""
    if get("n_routed_experts", int) == 0:
        return None
    gating = get("expert_gating_func", int, 0)  # of GGUF files
    if gating and gating not in GATING:
        raise ModelError(f"the GGUF metadata gives expert_gating_func = {gating!r:.60}: 1 or 2 can run")
    scores = GATING.get(gating, scores)
    width, n_shared = (
        whole_number(get, "moe_intermediate_size"),
        whole_number(get, "n_shared_experts", 0, least=0),
    )
    normalised = get("norm_topk_prob", bool, scores == LOGISTIC)
    if shared is None:
        shared = int(n_shared * get("moe_shared_expert_intermediate_size", int, width))
    groups, chosen_groups = get("n_group", int, 1), get("topk_group", int, 1)
    return replace(
        experts_of(get, "n_routed_experts", "num_experts_per_tok", width, normalised, shared_ffn=shared),
        scores=scores,
        choice_bias=scores == LOGISTIC,
        groups=groups,
        chosen_groups=chosen_groups if groups != 1 else 1,
        group_best=2 if scores == LOGISTIC and groups != 1 else 1,
        scale=positive(get, "routed_scaling_factor", 1.0),
    )


def _dense_layers(get: Get, config: ModelConfig) -> list[bool]:
    """True for each layer without experts: those of a list, or the first ones and of the others all but every
    `moe_layer_freq`-th."""
    if get("mlp_layer_types", list) is not None:
        return named_layers(get, config, "dense", "sparse", "mlp_layer_types")
    first, every = (
        whole_number(get, "first_k_dense_replace", 0, least=0),
        whole_number(get, "moe_layer_freq", 1),
    )
    return [layer < first or layer % every != 0 for layer in range(config.n_layers)]


NORM_EPS = 1e-6
"""The epsilon of the norms of queries and latent vectors, which config.json does not state."""
GREEDY, BY_GROUPS = "greedy", "group_limited_greedy"


def _v2(get: Get, config: ModelConfig) -> ModelConfig:
    method = get("topk_method", str, GREEDY)
    if method not in (GREEDY, BY_GROUPS):
        raise ModelError(f"config.json has topk_method = {method!r:.60}: {GREEDY} or {BY_GROUPS} can run")
    plain: dict[str, Any] = {"groups": 1, "chosen_groups": 1} if method == GREEDY else {}
    return _latent_hf(get, routed(get, config, SOFTMAX, **plain))


def deepseek_v3(get: Get, config: ModelConfig) -> ModelConfig:
    return _latent_hf(get, routed(get, config))


def latent_of_hf(get: Get) -> LatentAttention:
    return LatentAttention(
        kv_rank=get("kv_lora_rank", int, 512),
        rope_dim=get("qk_rope_head_dim", int, 64),
        key_dim=get("qk_nope_head_dim", int, 128),
        value_dim=get("v_head_dim", int, 128),
        q_rank=get("q_lora_rank", int, 0),
        norm_eps=NORM_EPS,
    )


def _latent_hf(get: Get, config: ModelConfig) -> ModelConfig:
    latent = latent_of_hf(get)
    rope = get("rope_parameters", dict) or get("rope_scaling", dict) or {}
    weight = rope.get("mscale_all_dim") or 0.0
    if type(weight) not in (int, float) or not 0 <= weight <= 1e3:
        raise ModelError(f"config.json has mscale_all_dim = {weight!r:.60}: a number from 0 to 1000 expected")
    return with_latent(config, latent, float(weight))


def with_latent(config: ModelConfig, latent: LatentAttention, weight: float) -> ModelConfig:
    """Add latent attention. `weight`: of YaRN's magnitude in the scale of scores (`mscale_all_dim`)."""
    if not 1 <= latent.query <= LARGEST["hidden"]:
        raise ModelError(f"queries of {latent.query} numbers")
    scale, scaling = latent.query**-0.5, config.rope.scaling
    if isinstance(scaling, YarnScaling) and weight:
        scale *= yarn_magnitude(scaling.factor, weight) ** 2
    return replace(
        with_rope(config, dim=latent.rope_dim),
        latent=latent,
        head_dim=latent.vector,
        n_kv_heads=1,
        attention_scale=scale,
    )


def latent_of_gguf(get: Get, norm_eps: float) -> LatentAttention:
    """The latent attention of GGUF metadata, where `key_length` may be that of latent vectors."""
    turned = get("rope.dimension_count", int, 64)
    return LatentAttention(
        kv_rank=get("attention.kv_lora_rank", int, 0),
        rope_dim=turned,
        key_dim=get("attention.key_length_mla", int, get("attention.key_length", int, 0)) - turned,
        value_dim=get("attention.value_length_mla", int, get("attention.value_length", int, 0)),
        q_rank=get("attention.q_lora_rank", int, 0),
        norm_eps=norm_eps,
    )


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return latent_gguf(get, config, SOFTMAX, config.norm_eps)


def latent_gguf(get: Get, config: ModelConfig, scores: str, norm_eps: float) -> ModelConfig:
    """Add latent attention and experts of GGUF metadata. `scores`: of a file that states none; `norm_eps`: of
    the norms of queries and latent vectors."""
    if get("attention.temperature_scale", float, 0.0):
        raise ModelError("the GGUF metadata gives a temperature of attention, which cannot run")
    weight = get("rope.scaling.yarn_log_multiplier", float, 0.0) / 0.1  # as the converter writes it
    scaling = config.rope.scaling
    if (
        isinstance(scaling, YarnScaling) and weight
    ):  # both weights are one: cosines and sines stay as they are
        magnitude = scaling.magnitude / yarn_magnitude(scaling.factor, 1.0)
        config = with_rope(config, scaling=replace(scaling, magnitude=magnitude))
    return with_latent(routed(get, config, scores), latent_of_gguf(get, norm_eps), weight)


HF_LATENT: Names = {
    "self_attn.q_proj.weight": Turned("q", "n_heads"),
    "self_attn.q_a_proj.weight": "q_a",
    "self_attn.q_a_layernorm.weight": "q_a_norm",
    "self_attn.q_b_proj.weight": Turned("q_b", "n_heads"),
    "self_attn.kv_a_proj_with_mqa.weight": Turned("kv_a"),
    "self_attn.kv_a_layernorm.weight": "kv_a_norm",
    "self_attn.kv_b_proj.weight": HeadParts("k_b", "v_b"),
}
GGUF_LATENT: Names = {
    "attn_q.weight": Turned("q", "n_heads"), "attn_q_a.weight": "q_a",
    "attn_q_a_norm.weight": "q_a_norm", "attn_q_b.weight": Turned("q_b", "n_heads"),
    "attn_kv_a_mqa.weight": Turned("kv_a"), "attn_kv_a_norm.weight": "kv_a_norm",
    "attn_kv_b.weight": HeadParts("k_b", "v_b"), "attn_k_b.weight": HeadStack("k_b"),
    "attn_v_b.weight": HeadStack("v_b"),
}  # fmt: skip

_ONLY = {"attention_bias": False, "rope_interleave": True}
_ONLY_V3 = _ONLY | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}

DEEPSEEK2 = Family(
    "deepseek2",
    hf=("deepseek_v2",),
    from_hf=_v2,
    from_gguf=_gguf,
    hf_names=HF_LATENT,
    gguf_names=GGUF_LATENT,
    hf_only=_ONLY | {"norm_topk_prob": False},
    hf_defaults={"q_lora_rank": 1536, "n_routed_experts": 64, "n_shared_experts": 2, "qk_rope_head_dim": 64},
    more_layers=True,
    gguf_head=True,
    latent=True,
)
DEEPSEEK3 = Family(
    "deepseek3",
    hf=("deepseek_v3", "kimi_k2"),
    gguf=(),
    from_hf=deepseek_v3,
    hf_only=_ONLY_V3,
    hf_names=HF_LATENT,
    hf_defaults={
        "max_position_embeddings": 4096, "q_lora_rank": 1536, "n_routed_experts": 256,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
        "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048,
        "qk_rope_head_dim": 64,
    },
    more_layers=True,
    hf_head=LAYER_HEAD,
    latent=True,
)  # fmt: skip
GLM4_MOE_LITE = replace(
    DEEPSEEK3,
    name="glm4moelite",
    hf=("glm4_moe_lite",),
    hf_defaults={
        "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "q_lora_rank": 768, "qk_nope_head_dim": 192,
        "v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1,
        "routed_scaling_factor": 1.8, "moe_intermediate_size": 1536, "qk_rope_head_dim": 64,
        "first_k_dense_replace": 1,
    },
)  # fmt: skip


def _indexed(get: Get, config: ModelConfig, period: int = 1, first: int = 2) -> ModelConfig:
    """Add the indexer. Of a file that names no layers: the first `first` layers choose, and behind them every
    `period`-th one (index_skip_topk_offset, index_topk_freq)."""
    assert config.latent is not None
    of_index = ("index_n_heads", "index_head_dim", "index_topk")
    latent = replace(config.latent, indexer=Indexer(*(whole_number(get, key) for key in of_index)))
    reused = _reusing(get, config, period, first)
    forms = tuple(
        replace(form, reuses_choice=reuses) for form, reuses in zip(config.forms, reused, strict=True)
    )
    return replace(config, latent=latent, head_dim=latent.kept, forms=forms)


def _reusing(get: Get, config: ModelConfig, period: int, first: int) -> list[bool]:
    """True for each layer whose tokens see what the indexer of an earlier one chose (GLM 5.2)."""
    stated = get("attention.indexer.types", list)  # of GGUF files, true for layers with an indexer
    if stated is not None:
        if len(stated) != config.n_layers:
            n_stated = counted(len(stated), "layer")
            raise ModelError(f"the GGUF metadata gives attention.indexer.types of {n_stated}")
        return [not own for own in stated]
    if get("indexer_types", list) is not None:
        return named_layers(get, config, "shared", "full", "indexer_types")
    pattern, first = get("index_topk_pattern", str), get("index_skip_topk_offset", int, first)
    period = whole_number(get, "index_topk_freq", period)
    if pattern is not None and (len(pattern) != config.n_layers or not set(pattern) <= set("FS")):
        raise ModelError(
            f"config.json has index_topk_pattern = {pattern!r:.60}: F or S for each layer expected"
        )
    if pattern is not None:
        return [letter == "S" for letter in pattern]
    return [max(layer - first + 1, 0) % period != 0 for layer in range(config.n_layers)]


def _indexed_hf(get: Get, config: ModelConfig) -> ModelConfig:
    return _indexed(get, deepseek_v3(get, config))


def _indexed_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    own = latent_gguf(get, config, LOGISTIC, NORM_EPS)
    is_long = config.context_length >= GLM_52_CONTEXT
    return _indexed(get, own, 4, 3) if is_long else _indexed(get, own)


GLM_52_CONTEXT = 1 << 20
"""Positions by which llama.cpp knows a GLM 5.2 whose file does not say which layers have an indexer."""


_HF_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
_GGUF_INDEXER = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
_PLAIN: tuple[str | Cut, ...] = ("index_q", "index_k", "index_k_norm", "index_k_norm_bias", "index_w")
_PAIRS: tuple[str | Cut, ...] = (
    Turned("index_q", "index_heads", is_tail=False),
    *(Turned(ours, is_tail=False) for ours in ("index_k", "index_k_norm", "index_k_norm_bias")),
    "index_w",
)
"""Our names of an indexer's tensors, whose rotated rows are as ours, or pairs side by side."""


def _hf_names(ours: tuple[str | Cut, ...]) -> Names:
    indexer = {f"self_attn.indexer.{name}": own for name, own in zip(_HF_INDEXER, ours, strict=True)}
    return {**HF_LATENT, **indexer}


def _gguf_names(ours: tuple[str | Cut, ...]) -> Names:
    return {**GGUF_LATENT, **{f"indexer.{name}": own for name, own in zip(_GGUF_INDEXER, ours, strict=True)}}


_INDEXER_DEFAULTS = {"index_topk": 2048, "index_head_dim": 128, "bos_token_id": 0, "eos_token_id": 1}

DEEPSEEK32 = replace(
    DEEPSEEK3,
    name="deepseek32",
    hf=("deepseek_v32",),
    gguf=None,
    from_hf=_indexed_hf,
    from_gguf=_indexed_gguf,
    hf_names=_hf_names(_PLAIN),
    gguf_names=_gguf_names(_PLAIN),
    hf_defaults={
        **DEEPSEEK3.hf_defaults,
        **_INDEXER_DEFAULTS,
        "max_position_embeddings": 163840,
        "index_n_heads": 64,
    },
    gguf_head=True,
)
GLM_DSA: Family = replace(
    DEEPSEEK32,
    name="glm-dsa",
    hf=("glm_moe_dsa",),
    hf_names=_hf_names(_PAIRS),
    gguf_names=_gguf_names(_PAIRS),
    hf_defaults={
        **DEEPSEEK3.hf_defaults,
        **_INDEXER_DEFAULTS,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_n_heads": 32,
    },
)

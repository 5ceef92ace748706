"""Nemotron-H: layers of one half each, by a pattern: Mamba 2, attention without positions, or a feed-forward
layer without a gate, which may be a mixture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.deepseek import routed
from phasewise.serving.loaders.families.family import Family, Get, fed, listed, must_be_off, positive
from phasewise.serving.loaders.families.hybrids import check_time_steps, mamba_gguf
from phasewise.serving.models.layers import SingleHalves
from phasewise.serving.models.packed_model import LARGEST, LayerKind, ModelConfig
from phasewise.serving.models.parts.experts import LOGISTIC
from phasewise.serving.models.parts.feed_forward import FeedForwardForm
from phasewise.serving.models.parts.states import MAMBA2, StateLayers

STATE, ATTENTION, DENSE, MIXTURE = "linear_attention", "full_attention", "mlp", "moe"
IN_PATTERNS = {"M": STATE, "*": ATTENTION, "-": DENSE, "E": MIXTURE}
OLDER = {"mamba": STATE, "attention": ATTENTION}


def _nemotron(get: Get, config: ModelConfig) -> ModelConfig:
    off = ("attention_bias", "mamba_proj_bias", "use_bias", "moe_latent_size", "sliding_window")
    must_be_off(get, *off)
    check_time_steps(get, "time_step_limit", "mamba_dt_limit")
    for key, only in (("mlp_hidden_act", "relu2"), ("mamba_hidden_act", "silu")):
        if get(key, str, only) != only:
            raise ModelError(f"config.json has {key} = {get(key)!r:.60}: {only} can run")
    kinds = _kinds(get)
    groups, heads = get("mamba_n_groups", int, get("n_groups", int, 8)), get("mamba_num_heads", int, 128)
    state = StateLayers(
        MAMBA2,
        _layers(kinds, STATE),
        get("mamba_d_conv", int, get("conv_kernel", int, 4)),
        heads,
        groups,
        get("ssm_state_size", int, 128),
        get("mamba_head_dim", int, 64),
        get("mamba_conv_bias", bool, get("use_conv_bias", bool, True)),
        norm_groups=groups,
    )
    config = replace(config, norm_eps=get("layer_norm_epsilon", float, 1e-5), n_layers=len(kinds))
    if MIXTURE in kinds:
        config = routed(
            get,
            config,
            keys=("n_routed_experts", "num_experts_per_tok"),
            widths=(
                get("moe_intermediate_size", int, 7688),
                get("moe_shared_expert_intermediate_size", int, 7688),
            ),
            scores=(
                LOGISTIC,
                get("norm_topk_prob", bool, True),
                positive(get, "routed_scaling_factor", 1.0),
            ),
            groups=(get("n_group", int, 1), get("topk_group", int, 1)),
            dense=_layers(kinds, DENSE),
        )
    return _of_halves(config, kinds, state)


def _kinds(get: Get) -> list[str]:
    """Every layer's half, by a list or by a pattern of letters."""
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


def _layers(kinds: list[str], *wanted: str) -> tuple[int, ...]:
    return tuple(layer for layer, kind in enumerate(kinds) if kind in wanted)


def _of_halves(config: ModelConfig, kinds: list[str], state: StateLayers) -> ModelConfig:
    """The config with layers of these kinds, whose tokens leave their positions to the states."""
    return replace(
        config,
        n_layers=len(kinds),
        layer_kinds=(LayerKind(None, None),) * len(kinds),
        state=state if state.layers else None,
        halves=SingleHalves(_layers(kinds, STATE, ATTENTION), _layers(kinds, DENSE, MIXTURE)),
    )


def _nemotron_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    n_layers = config.n_layers - get("nextn_predict_layers", int, 0)
    heads, widths = (
        listed(get, key, config.n_layers) for key in ("attention.head_count_kv", "feed_forward_length")
    )
    of_experts = get("expert_count", int, 0)
    feeding = MIXTURE if of_experts else DENSE
    kinds = [
        feeding if width else ATTENTION if kv else STATE
        for kv, width in zip(heads[:n_layers], widths[:n_layers], strict=True)
    ]
    config = replace(config, n_layers=n_layers)
    if of_experts:
        config = routed(
            get,
            config,
            keys=("expert_count", "expert_used_count"),
            widths=(
                get("expert_feed_forward_length", int, config.ffn),
                get("expert_shared_feed_forward_length", int, 0),
            ),
            scores=(
                LOGISTIC,
                get("expert_weights_norm", bool, False),
                get("expert_weights_scale", float, 1.0) or 1.0,
            ),
            groups=(get("expert_group_count", int, 1) or 1, get("expert_group_used_count", int, 1) or 1),
            dense=(),
        )
    state = mamba_gguf(get, _layers(kinds, STATE))
    return _of_halves(config, kinds, replace(state, norm_groups=state.groups))


NEMOTRON_H = Family(
    "nemotronh",
    hf=("nemotron_h",),
    gguf=("nemotron_h", "nemotron_h_moe"),
    from_hf=_nemotron,
    from_gguf=_nemotron_gguf,
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
    },
)

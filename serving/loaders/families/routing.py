"""Mixtures as DeepSeek has them and others took over: groups of experts, a bias that chooses alone, shared
experts, and first layers without any.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Get
from phasewise.serving.loaders.families.reading import experts_of, positive
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.experts import LOGISTIC, SOFTMAX
from phasewise.serving.models.parts.feed_forward import MOST_WIDTH

GATING = {1: SOFTMAX, 2: LOGISTIC}
"""GGUF's numbers of what scores are of logits."""


def routed_hf(get: Get, config: ModelConfig, scores: str = LOGISTIC) -> ModelConfig:
    """The config with the mixture of config.json. scores: "logistic" has a bias of choices, and groups by
    their two best; "softmax" neither."""
    dense = hf_dense_layers(get, config)
    normalised = get("norm_topk_prob", bool, scores == LOGISTIC)
    return routed(
        get,
        config,
        keys=("n_routed_experts", "num_experts_per_tok"),
        widths=_widths(get("moe_intermediate_size", int), get("n_shared_experts", int, 0)),
        scores=(scores, normalised, positive(get, "routed_scaling_factor", 1.0)),
        groups=(get("n_group", int, 1), get("topk_group", int, 1)),
        dense=dense,
    )


def routed_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    """The config with the mixture of GGUF metadata; without any, as it is."""
    if not get("expert_count", int, 0):
        return config
    gating = get("expert_gating_func", int, 1) or 1
    if gating not in GATING:
        raise ModelError(f"the GGUF metadata gives expert_gating_func = {gating!r:.60}: 1 or 2 can run")
    scale = get("expert_weights_scale", float, 1.0) or 1.0  # 0 is that of files that have none
    return routed(
        get,
        config,
        keys=("expert_count", "expert_used_count"),
        widths=_widths(get("expert_feed_forward_length", int), get("expert_shared_count", int, 0)),
        scores=(GATING[gating], get("expert_weights_norm", bool, False), scale),
        groups=(get("expert_group_count", int, 1) or 1, get("expert_group_used_count", int, 1) or 1),
        dense=_first(get("leading_dense_block_count", int, 0), config.n_layers),
    )


def hf_dense_layers(get: Get, config: ModelConfig) -> tuple[int, ...]:
    """Layers without experts: the first ones, or those that a list names, and of the others all but every
    `moe_layer_freq`-th."""
    named = get("mlp_layer_types", list)
    if named is not None:
        if len(named) != config.n_layers or any(kind not in ("dense", "sparse") for kind in named):
            raise ModelError(
                f"config.json has mlp_layer_types = {named!r:.60}: dense or sparse for each of"
                f" {counted(config.n_layers, 'layer')} expected"
            )
        return tuple(layer for layer, kind in enumerate(named) if kind == "dense")
    first, every = get("first_k_dense_replace", int, 0), get("moe_layer_freq", int, 1)
    if every < 1:
        raise ModelError(f"config.json has moe_layer_freq = {every!r:.60}: 1 or more expected")
    dense = set(_first(first, config.n_layers))
    return tuple(layer for layer in range(config.n_layers) if layer in dense or layer % every)


def _first(count: int, n_layers: int) -> tuple[int, ...]:
    if not 0 <= count <= 1 << 20:
        raise ModelError(f"the first {count!r:.60} layers have no experts: 0 or more expected")
    return tuple(range(min(count, n_layers)))


def _widths(width: int | None, n_shared: int) -> tuple[int | None, int]:
    """The widths of one expert, and of as many of them that are shared, as one."""
    if width is not None and 1 <= width <= MOST_WIDTH and not 0 <= n_shared <= MOST_WIDTH:
        raise ModelError(f"{n_shared!r:.60} experts are shared: 0 or more expected")
    return width, n_shared * (width or 0)


def routed(
    get: Get,
    config: ModelConfig,
    keys: tuple[str, str],
    widths: tuple[int | None, int],
    scores: tuple[str, bool, float],
    groups: tuple[int, int],
    dense: tuple[int, ...],
) -> ModelConfig:
    """The config with a mixture. widths: of one expert, and of the one that is shared, 0 for none. scores: of
    logits, whether they are normalised, and what multiplies them. groups: all, and those that can be
    chosen."""
    if len(dense) == config.n_layers:
        return config
    width, shared = widths
    if type(width) is not int or not 1 <= width <= MOST_WIDTH:
        raise ModelError(f"experts of width {width!r:.60}: from 1 to {MOST_WIDTH} expected")
    kind, normalised, scale = scores
    plain = experts_of(get, *keys, normalised, shared_ffn=shared)
    experts = replace(
        plain,
        scores=kind,
        choice_bias=kind == LOGISTIC,
        groups=groups[0],
        chosen_groups=groups[1] if groups[0] != 1 else 1,
        group_best=2 if kind == LOGISTIC and groups[0] != 1 else 1,
        scale=scale,
        dense_layers=dense,
        dense_ffn=config.ffn if dense else 0,
    )
    return replace(config, experts=experts, ffn=width)

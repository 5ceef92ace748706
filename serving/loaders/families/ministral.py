"""Ministral 3 (YaRN, queries that grow with positions), and the language models of Mistral 3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import TEXT_PREFIXES, Family, Get, other_parts
from phasewise.serving.loaders.families.reading import yarn_magnitude
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.attention import QueryGrowth
from phasewise.serving.models.rope import RopeSpec, YarnScaling

OLDER_WINDOW = 4096  # of a Mistral whose config says nothing of it
USUAL_ROPE: dict[str, Any] = {"original_max_position_embeddings": 16384, "llama_4_scaling_beta": 0.1}
USUAL_FACTOR, USUAL_THETA = 16.0, 1e6


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    kind = get("model_type", str)
    if kind == "mistral":
        return replace(config, sliding_window=get("sliding_window", None, OLDER_WINDOW))
    if kind != "ministral3":
        raise ModelError(
            f"config.json has a text_config with model_type = {kind!r:.60}; mistral and ministral3 can run"
        )
    stated = get("rope_parameters", dict) or get("rope_scaling", dict)
    if stated is None:
        usual = YarnScaling(USUAL_FACTOR, USUAL_ROPE["original_max_position_embeddings"], 1.0)
        config = replace(config, rope=RopeSpec(USUAL_THETA, config.head_dim, usual))
    growth = _growth(config, (USUAL_ROPE if stated is None else stated).get("llama_4_scaling_beta"))
    return replace(config, sliding_window=get("sliding_window", int), query_growth=growth)


def _growth(config: ModelConfig, beta: object) -> QueryGrowth | None:
    """Queries grow by the original context of the model's YaRN."""
    if beta is None or beta == 0:
        return None
    if isinstance(beta, bool) or not isinstance(beta, int | float):
        raise ModelError(f"the config has llama_4_scaling_beta = {beta!r:.60}: a number expected")
    if not isinstance(config.rope.scaling, YarnScaling):
        raise ModelError("the config has queries that grow with positions, and no YaRN, which cannot run")
    return QueryGrowth(float(beta), config.rope.scaling.original_context)


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    window = get("attention.sliding_window", int) or None
    if get("expert_count", int, 0):
        raise ModelError("mistral3 models with experts cannot run")
    scaling, weight = config.rope.scaling, get("rope.scaling.yarn_log_multiplier", float, 0.0)
    if isinstance(scaling, YarnScaling) and weight > 0:
        magnitude = scaling.magnitude / yarn_magnitude(scaling.factor, weight)
        config = replace(config, rope=replace(config.rope, scaling=replace(scaling, magnitude=magnitude)))
    growth = _growth(config, get("attention.temperature_scale", float))
    return replace(config, sliding_window=window, query_growth=growth)


MISTRAL3 = Family(
    "mistral3",
    hf=("ministral3", "mistral3"),
    from_hf=_hf,
    from_gguf=_gguf,
    hf_defaults={
        "head_dim": 128,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
    },
    hf_text_prefixes=TEXT_PREFIXES,
    hf_ignored=other_parts("vision_tower", "multi_modal_projector"),
    gguf_interleaved_heads=True,
)

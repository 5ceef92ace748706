"""Falcon-H1: Mamba 2 beside attention in every layer, and a multiplier for each product.

GGUF files have the multipliers in their weights.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.hybrids.mamba import mamba_gguf, mamba_hf
from phasewise.serving.loaders.families.reading import must_be_off, positive
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.part import ProductFactors


def _falcon(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "attention_bias", "projectors_bias")
    state = mamba_hf(get, tuple(range(config.n_layers)), _inner(get, config.hidden))
    normalised = get("mamba_rms_norm", bool, False)
    if normalised and get("mamba_norm_before_gate", bool, True):
        raise ModelError("config.json has mamba_norm_before_gate = True, which cannot run")
    state = replace(state, beside=True, norm_groups=state.groups if normalised else 0)
    return _multiplied(get, replace(config, state=state))


def _inner(get: Get, hidden: int) -> int:
    """Values of all heads: null is another word than none."""
    if get("mamba_d_ssm", None, 1024) is None:
        return int(get("mamba_expand", int, 2)) * hidden
    return int(get("mamba_d_ssm", int, 1024))


def _multiplied(get: Get, config: ModelConfig) -> ModelConfig:
    """The config with its multipliers. Scores have those of queries and keys, whose norm has that of outputs
    too, since what values give is multiplied by it."""
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
    state = mamba_gguf(get, tuple(range(config.n_layers)))
    return replace(config, state=replace(state, beside=True, norm_groups=state.groups))


_IN = TensorCut(("state_gate", "state_in", "state_time"))

FALCON_H1 = Family(
    "falconh1",
    hf=("falcon_h1",),
    gguf=("falcon-h1",),
    from_hf=_falcon,
    from_gguf=_falcon_gguf,
    hf_defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
    global_names={"model.final_layernorm.weight": "final_norm"},
    hf_names={"mamba.in_proj.weight": _IN, "pre_ff_layernorm.weight": "ffn_norm"},
    gguf_names={"ssm_in.weight": _IN, "ffn_norm": "ffn_norm"},
    gguf_optional_state_norm=True,
)

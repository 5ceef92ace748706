"""gpt-oss: experts in MXFP4 with biases and a clamped gate, attention with sinks, windows in every other
layer.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise._words import number
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.names import FED
from phasewise.serving.loaders.families.reading import (
    all_but_every,
    experts_of,
    layer_types,
    with_windows,
    yarn_magnitude,
)
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.feed_forward import FeedForwardForm
from phasewise.serving.models.rope import RopeSpec, YarnScaling

PERIOD = 2
USUAL = YarnScaling(32.0, 4096, yarn_magnitude(32.0), truncate=False)
LIMIT, ALPHA = 7.0, 1.702  # of the clamped gate: families/rows/elementwise.c


def _common(get: Get, config: ModelConfig) -> ModelConfig:
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", normalised=True, biases=True)
    form = FeedForwardForm("clamped_silu")
    return replace(config, ffn_form=form, sinks=True, out_bias=True, experts=experts)


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    if get("swiglu_limit", float, LIMIT) != LIMIT or get("swiglu_alpha", float, ALPHA) != ALPHA:
        raise ModelError(
            f"config.json has another clamped gate than one of {number(LIMIT)} and {number(ALPHA)}"
        )
    if not (get("rope_parameters", dict) or get("rope_scaling", dict)):
        config = replace(config, rope=replace(config.rope, scaling=USUAL))
    return with_windows(_common(get, config), layer_types(get, config, PERIOD), get("sliding_window", int))


def _smooth(rope: RopeSpec) -> RopeSpec:
    """The ramp of its YaRN does not begin and end at whole pairs, which GGUF files do not say."""
    return (
        replace(rope, scaling=replace(rope.scaling, truncate=False))
        if isinstance(rope.scaling, YarnScaling)
        else rope
    )


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    width = get("expert_feed_forward_length", int, config.ffn)
    own = replace(_common(get, config), ffn=width, rope=_smooth(config.rope))
    sliding = all_but_every(PERIOD, config.n_layers)
    return with_windows(own, sliding, get("attention.sliding_window", int, 128))


GPT_OSS = Family(
    "gpt-oss",
    hf=("gpt_oss",),
    from_hf=_hf,
    from_gguf=_gguf,
    hf_defaults={
        "attention_bias": True,
        "head_dim": 64,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 150000.0,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "rms_norm_eps": 1e-5,
    },
    hf_names={
        "self_attn.sinks": "sinks",
        "mlp.router.weight": "router",
        "mlp.router.bias": "router_bias",
        "mlp.experts.gate_up_proj": TensorCut(
            ("gate", "up"), of_experts=True, alternating=True, transposed=True
        ),
        "mlp.experts.gate_up_proj.mxfp4": TensorCut(("gate", "up"), of_experts=True, alternating=True),
        "mlp.experts.gate_up_proj_bias": TensorCut(
            ("gate_bias", "up_bias"), of_experts=True, alternating=True
        ),
        "mlp.experts.down_proj": TensorCut(("down",), of_experts=True, transposed=True),
        "mlp.experts.down_proj.mxfp4": TensorCut(("down",), of_experts=True),
        "mlp.experts.down_proj_bias": TensorCut(("down_bias",), of_experts=True),
    },
    gguf_names={
        "attn_sinks.weight": "sinks",
        "ffn_gate_inp.bias": "router_bias",
        **{f"ffn_{part}_exps.bias": TensorCut((f"{part}_bias",), of_experts=True) for part in FED},
    },
)

"""A `ModelConfig` that exists makes sense, and survives JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.models.config_json import config_from_json, config_to_json
from phasewise.serving.models.packed_model import Experts, LayerKind, ModelConfig
from phasewise.serving.models.parts.feed_forward import FeedForwardForm
from phasewise.serving.models.rope import FrequencyFactors, LinearScaling, Llama3Scaling, RopeSpec, Scaling

CONFIG = ModelConfig(
    architecture="llama",
    n_layers=2,
    hidden=64,
    ffn=96,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab_size=272,
    context_length=256,
    norm_eps=1e-5,
    rope=RopeSpec(10000.0, 16),
    tied_embeddings=True,
    eos_token_ids=(2, 0),
)
SCALINGS: list[Scaling | None] = [
    None,
    LinearScaling(4.0),
    Llama3Scaling(8.0, 1.0, 4.0, 8192),
    FrequencyFactors((1.0,) * 4 + (8.0,) * 4),
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_config_survives_json(scaling: Scaling | None) -> None:
    config = replace(CONFIG, rope=RopeSpec(10000.0, 16, scaling), sliding_window=128)

    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_fall_and_scaling_never_raises_them(scaling: Scaling | None) -> None:
    plain = RopeSpec(10000.0, 16).inv_freq()
    scaled = RopeSpec(10000.0, 16, scaling).inv_freq()

    assert plain[0] == 1
    assert (np.diff(plain) < 0).all()
    assert (scaled <= plain).all()
    assert (scaled >= plain / 8).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"n_layers": 0},
        {"hidden": 1 << 40},
        {"vocab_size": -1},
        {"ffn": 96.0},
        {"n_kv_heads": 3},
        {"n_kv_heads": 8},
        {"head_dim": 15, "rope": RopeSpec(10000.0, 15)},
        {"rope": RopeSpec(10000.0, 18)},
        {"layer_kinds": (LayerKind(4, None),)},
        {"layer_kinds": (LayerKind(0, None), LayerKind(4, None))},
        {"experts": Experts(0, 0, True)},
        {"experts": Experts(4, 5, True)},
        {"experts": Experts(4, True, True)},
        {"experts": Experts(4, 2, True, scores="relu")},
        {"experts": Experts(4, 2, True, groups=3)},
        {"experts": Experts(4, 2, True, groups=2, chosen_groups=3)},
        {"experts": Experts(4, 3, True, groups=2)},
        {"experts": Experts(4, 2, True, groups=4, chosen_groups=2, group_best=2)},
        {"experts": Experts(4, 2, True, scale=0.0)},
        {"experts": Experts(4, 2, True, dense_layers=(1, 0), dense_ffn=8)},
        {"experts": Experts(4, 2, True, dense_layers=(9,), dense_ffn=8)},
        {"experts": Experts(4, 2, True, dense_layers=(0,))},
        {"experts": Experts(4, 2, True, dense_layers=(0, 1), dense_ffn=8)},
        {"attention_cap": 0.0},
        {"logit_cap": float("nan")},
        {"embed_scale": float("inf")},
        {"residual_scale": 1e-5},
        {"rope": RopeSpec(0.0, 16)},
        {"rope": RopeSpec(float("inf"), 16)},
        {"rope": RopeSpec(1e4, 16, LinearScaling(0.0))},
        {"rope": RopeSpec(1e4, 16, FrequencyFactors((1.0,) * 7))},
        {"rope": RopeSpec(1e4, 16, FrequencyFactors((float("nan"),) * 8))},
        {"norm_eps": 0.0},
        {"norm_eps": float("nan")},
        {"sliding_window": 0},
        {"bos_token_id": 272},
        {"eos_token_ids": (0, -1)},
    ],
    ids=str,
)
def test_a_shape_that_no_model_has_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(("activation", "gated"), [("relu", True), ("clamped_silu", False)])
def test_an_activation_of_the_other_kind_is_refused(activation: str, gated: bool) -> None:
    with pytest.raises(ModelError, match=activation):
        FeedForwardForm(activation, gated)

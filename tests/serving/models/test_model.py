"""A `ModelConfig` that exists makes sense, and survives JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phasewise.serving.errors import ModelError
from phasewise.serving.models.config_json import config_from_json, config_to_json
from phasewise.serving.models.packed_model import LayerForm, LayerKind, ModelConfig, alike
from phasewise.serving.models.parts.attention import HeadShape
from phasewise.serving.models.parts.experts import Experts
from phasewise.serving.models.parts.feed_forward import FeedForwardForm
from phasewise.serving.models.parts.states import MAMBA2, SHORT_CONV, StateForm
from phasewise.serving.models.rope import FrequencyFactors, LinearScaling, Llama3Scaling, RopeSpec, Scaling

ROPE = RopeSpec(10000.0, 16)
PLAIN = LayerForm(LayerKind(None, ROPE), 96)
CONFIG = ModelConfig(
    architecture="llama",
    forms=(PLAIN,) * 2,
    hidden=64,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    vocab_size=272,
    context_length=256,
    norm_eps=1e-5,
    tied_embeddings=True,
    eos_token_ids=(2, 0),
)
MAMBA = StateForm(MAMBA2, 4, 4, 1, 16, 16)
SCALINGS: list[Scaling | None] = [
    None,
    LinearScaling(4.0),
    Llama3Scaling(8.0, 1.0, 4.0, 8192),
    FrequencyFactors((1.0,) * 4 + (8.0,) * 4),
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_config_survives_json(scaling: Scaling | None) -> None:
    rope = RopeSpec(10000.0, 16, scaling)
    config = replace(CONFIG, forms=(LayerForm(LayerKind(128, rope), 96), LayerForm(None, 80, MAMBA)))

    assert config_from_json(json.loads(json.dumps(config_to_json(config)))) == config


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_fall_and_scaling_never_raises_them(scaling: Scaling | None) -> None:
    plain = RopeSpec(10000.0, 16).inv_freq()
    scaled = RopeSpec(10000.0, 16, scaling).inv_freq()

    assert plain[0] == 1
    assert (np.diff(plain) < 0).all()
    assert (scaled <= plain).all()
    assert (scaled >= plain / 8).all()


def turned(rope: RopeSpec) -> dict[str, Any]:
    """Changes of a config, whose layers all have this RoPE."""
    return {"forms": alike(2, LayerKind(None, rope), 96)}


def mixed(*settings: Any, **more: Any) -> dict[str, Any]:
    """Changes of a config, whose layers all have this mixture."""
    return {"forms": (replace(PLAIN, feed_forward=Experts(*settings, **more)),) * 2}


def layers(*forms: LayerForm) -> dict[str, Any]:
    return {"forms": forms}


SHARING = replace(PLAIN, shares=True)
MORE_HEADS = LayerKind(None, ROPE, HeadShape(4, 16))


@pytest.mark.parametrize(
    "changes",
    [
        layers(),
        layers(LayerForm(PLAIN.attention, 96.0)),  # type: ignore[arg-type]
        layers(SHARING, PLAIN),
        layers(replace(PLAIN, attention=LayerKind(8, ROPE)), SHARING),
        layers(LayerForm(None, 96, MAMBA), LayerForm(None, 96)),
        layers(PLAIN, LayerForm(None, None, MAMBA), LayerForm(None, None, replace(MAMBA, taps=3))),
        layers(
            replace(PLAIN, feed_forward=Experts(4, 2, 8, True)),
            replace(PLAIN, feed_forward=Experts(4, 1, 8, True)),
        ),
        layers(PLAIN, LayerForm(MORE_HEADS, 96)),
        layers(*(LayerForm(LayerKind(window, ROPE), 96) for window in range(1, 6))),
        {"hidden": 1 << 40},
        {"vocab_size": -1},
        {"n_kv_heads": 3},
        {"n_kv_heads": 8},
        {"head_dim": 15, **turned(RopeSpec(10000.0, 15))},
        turned(RopeSpec(10000.0, 18)),
        layers(LayerForm(LayerKind(0, None), 96), LayerForm(LayerKind(4, None), 96)),
        mixed(0, 0, 8, True),
        mixed(4, 5, 8, True),
        mixed(4, True, 8, True),
        mixed(4, 2, 8, True, scores="relu"),
        mixed(4, 2, 8, True, groups=3),
        mixed(4, 2, 8, True, groups=2, chosen_groups=3),
        mixed(4, 3, 8, True, groups=2),
        mixed(4, 2, 8, True, groups=4, chosen_groups=2, group_best=2),
        mixed(4, 2, 8, True, scale=0.0),
        {"attention_cap": 0.0},
        {"logit_cap": float("nan")},
        {"embed_scale": float("inf")},
        {"residual_scale": 1e-5},
        turned(RopeSpec(0.0, 16)),
        turned(RopeSpec(float("inf"), 16)),
        turned(RopeSpec(1e4, 16, LinearScaling(0.0))),
        turned(RopeSpec(1e4, 16, FrequencyFactors((1.0,) * 7))),
        turned(RopeSpec(1e4, 16, FrequencyFactors((float("nan"),) * 8))),
        {"norm_eps": 0.0},
        {"norm_eps": float("nan")},
        {"bos_token_id": 272},
        {"eos_token_ids": (0, -1)},
    ],
    ids=str,
)
def test_a_shape_that_no_model_has_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        replace(CONFIG, **changes)


@pytest.mark.parametrize(
    "make",
    [
        lambda: alike(0, LayerKind(None, ROPE), 96),
        lambda: alike(True, LayerKind(None, ROPE), 96),
        lambda: alike(1 << 11, LayerKind(None, ROPE), 96),
        lambda: alike(2, LayerKind(None, ROPE), 1 << 21),
        lambda: LayerForm(None, None),
        lambda: LayerForm(None, 96, shares=True),
        lambda: LayerForm(PLAIN.attention, 96, StateForm(SHORT_CONV, 4)),
        lambda: replace(PLAIN, sparsity=float("nan")),
    ],
)
def test_what_does_not_fit_in_one_layer_is_refused_where_it_is_made(make: Callable[[], object]) -> None:
    with pytest.raises(ModelError):
        make()


@pytest.mark.parametrize(("activation", "gated"), [("relu", True), ("clamped_silu", False)])
def test_an_activation_of_the_other_kind_is_refused(activation: str, gated: bool) -> None:
    with pytest.raises(ModelError, match=activation):
        FeedForwardForm(activation, gated)

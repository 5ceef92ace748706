"""Cohere 2 (Command R7B, Command A): attention and feed-forward read one LayerNorm, which has no bias.

RoPE turns neighbours, in layers with a window alone; every fourth layer sees all, and knows no positions.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import (
    gguf_windows,
    layer_types,
    must_be_off,
    positive,
)
from phasewise.serving.models.packed_model import LayerKind, ModelConfig

PERIOD = 4
EPS, WINDOW, LOGIT_SCALE = 1e-5, 4096, 0.0625


def _cohere2(
    config: ModelConfig, sliding: list[bool], window: int | None, norm_eps: float, logit_scale: float
) -> ModelConfig:
    if window is None and any(sliding):
        raise ModelError("the config has layers with a window and sliding_window = None: a number expected")
    local, whole = LayerKind(window, config.rope), LayerKind(None, None)
    return replace(
        config,
        layer_norms=True,
        parallel=True,
        norm_eps=norm_eps,
        logit_scale=logit_scale,
        layer_kinds=tuple(local if slides else whole for slides in sliding),
    )


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "use_qk_norm")
    sliding = layer_types(get, config, get("sliding_window_pattern", int, PERIOD))
    eps = positive(get, "layer_norm_eps", EPS)
    scale = positive(get, "logit_scale", LOGIT_SCALE)
    return _cohere2(config, sliding, get("sliding_window", int), eps, scale)


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    sliding, window = gguf_windows(get, config.n_layers, PERIOD)
    eps = positive(get, "attention.layer_norm_epsilon", EPS)
    scale = positive(get, "logit_scale", LOGIT_SCALE)
    return _cohere2(config, sliding, window, eps, scale)


COHERE2 = Family(
    "cohere2",
    from_hf=_hf,
    from_gguf=_gguf,
    hf_defaults={
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "sliding_window": WINDOW,
        "bos_token_id": 5,
        "eos_token_id": 255001,
    },
    hf_interleaved_heads=True,
    gguf_interleaved_heads=True,
)

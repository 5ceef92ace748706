"""Gemma 3n: layers that read inputs of their own or keys and values of earlier ones, and several streams, of
which they change one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import Names, OtherForm, TensorCut
from phasewise.serving.loaders.families.family import (
    FULL,
    SLIDING,
    TEXT_PREFIXES,
    Family,
    Get,
    TensorShapes,
    by_layer,
    gguf_windows,
    layer_types,
    number_of,
    positive,
    positive_or_none,
    sharing,
)
from phasewise.serving.loaders.families.gemma import (
    DEFAULTS_WITH_INPUTS,
    GGUF_INPUTS,
    GLOBAL_INPUTS,
    HF_INPUTS,
    LOCAL_THETA,
    OTHER_PARTS,
    as_gemma,
)
from phasewise.serving.models.packed_model import LayerForm, LayerKind, ModelConfig
from phasewise.serving.models.parts.feed_forward import FeedForwardForm
from phasewise.serving.models.parts.streams import MOST_STREAMS, LayerInputs, Streams
from phasewise.serving.models.rope import RopeSpec

PERIOD = 5
GLOBAL_THETA = 1e6
SPARSE_LAYERS, SPARSE_SHARE = 10, 0.95
LEAST_DEVIATION = 1e-30  # for none, which would mean that all gates count
KEEPING_LAYERS = 20
"""Layers that keep keys and values in all published models, where a GGUF file states no number."""
GGUF_STREAMS, GGUF_INPUT_SIZE, GGUF_LAUREL_RANK = 4, 256, 64
ROPE_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    window, n_layers = get("sliding_window", int), config.n_layers
    local = LayerKind(window, _hf_rope(get, SLIDING, "rope_local_base_freq", LOCAL_THETA, config.head_dim))
    whole = LayerKind(None, _hf_rope(get, FULL, "rope_theta", GLOBAL_THETA, config.head_dim))
    return _with_layers(
        config,
        [local if slides else whole for slides in layer_types(get, config, PERIOD)],
        by_layer(get("intermediate_size"), n_layers, "intermediate_size"),
        _hf_deviations(get, n_layers),
        shared=get("num_kv_shared_layers", int, 0),
        streams=Streams(
            get("altup_num_inputs", int),
            get("altup_active_idx", int),
            get("altup_correct_scale", bool),
            get("laurel_rank", int),
        ),
        layer_inputs=LayerInputs(
            get("hidden_size_per_layer_input", int), get("vocab_size_per_layer_input", int)
        ),
        logit_cap=positive_or_none(get, "final_logit_softcapping"),
    )


def _with_layers(
    config: ModelConfig,
    kinds: list[LayerKind],
    widths: list[int],
    deviations: tuple[float, ...],
    shared: int,
    **settings: Any,
) -> ModelConfig:
    """Add the layers to the config: the attention, the width and the deviations of gates of each. `shared`:
    last layers that read keys and values of others. `settings`: of the whole model."""
    layers = zip(kinds, widths, deviations, strict=True)
    forms = sharing([LayerForm(kind, width, sparsity=own) for kind, width, own in layers], shared)
    return replace(as_gemma(config, 1.0), forms=forms, qk_norm=True, value_norms=True, **settings)


def _hf_rope(get: Get, name: str, older: str, theta: float, head_dim: int) -> RopeSpec:
    """RoPE of layers of one kind, from the fields of transformers 5 or the `older` key."""
    fields = (get("rope_parameters", dict) or {}).get(name) or {}
    if (
        not isinstance(fields, Mapping)
        or fields.get("rope_type", "default") != "default"
        or set(fields) - set(ROPE_KEYS)
    ):
        raise ModelError(f"config.json asks for RoPE {fields!r:.80} in {name}: the default can run")
    if fields.get("partial_rotary_factor") not in (None, 1.0):
        raise ModelError(f"config.json turns a part of each head in {name}, which gemma3n models do not")
    stated = fields.get("rope_theta")
    return RopeSpec(positive(get, older, theta) if stated is None else number_of(stated), head_dim)


def _hf_deviations(get: Get, n_layers: int) -> tuple[float, ...]:
    """Standard deviations above the mean, by layer, below which the stated share of normal gates lies."""
    shares = get("activation_sparsity_pattern", list)
    if shares is None:
        shares = _usual_shares(n_layers)
    numbers = [np.float32(number_of(share)) for share in shares]
    if len(numbers) != n_layers or not all(0 <= share < 1 for share in numbers):
        raise ModelError(
            f"config.json has activation_sparsity_pattern = {shares!r:.60}:"
            " a share from 0 to 1 for every layer expected"
        )
    return tuple(_deviations(float(share)) for share in numbers)


def _usual_shares(n_layers: int) -> list[float]:
    n_sparse = SPARSE_LAYERS if n_layers > SPARSE_LAYERS else 0
    return [SPARSE_SHARE] * n_sparse + [0.0] * (n_layers - n_sparse)


def _deviations(share: float) -> float:
    """The deviations of a share of gates; 0: all gates count."""
    return (NormalDist().inv_cdf(share) or LEAST_DEVIATION) if share else 0.0


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    n_layers = config.n_layers
    sliding, window = gguf_windows(get, config, PERIOD)
    by_layer(get("attention.head_count_kv"), n_layers, "attention.head_count_kv")
    local = LayerKind(window, RopeSpec(get("rope.freq_base_swa", float, LOCAL_THETA), config.rope.dim))
    whole = LayerKind(None, config.rope)
    count, size = get("altup.num_inputs", int, GGUF_STREAMS), get("embedding_length_per_layer_input", int)
    if count != GGUF_STREAMS:
        raise ModelError(f"the GGUF metadata gives altup.num_inputs = {count!r:.60}: {GGUF_STREAMS} can run")
    return _with_layers(
        config,
        [local if slides else whole for slides in sliding],
        by_layer(get("feed_forward_length"), n_layers, "feed_forward_length"),
        _gguf_deviations(get, n_layers),
        shared=_gguf_shared(get, n_layers),
        streams=Streams(count, get("altup.active_idx", int, 0), True, GGUF_LAUREL_RANK),
        layer_inputs=LayerInputs(size or GGUF_INPUT_SIZE, config.vocab_size),
        logit_cap=positive_or_none(get, "final_logit_softcapping", 30.0),
    )


def _gguf_shared(get: Get, n_layers: int) -> int:
    """The number of layers that share keys and values, which files of 2025 have as a fraction."""
    stated = get("attention.shared_kv_layers")
    if stated is None:
        return max(0, n_layers - KEEPING_LAYERS)
    if type(stated) not in (int, float) or stated != stated // 1:
        raise ModelError(f"the GGUF metadata gives attention.shared_kv_layers = {stated!r:.60}")
    return int(stated)


def _gguf_deviations(get: Get, n_layers: int) -> tuple[float, ...]:
    """Standard deviations by layer; files have minus infinity where all gates count."""
    stated = get("activation_sparsity_scale", list)
    if stated is None:
        return tuple(_deviations(float(np.float32(share))) for share in _usual_shares(n_layers))
    if len(stated) != n_layers or not all(type(number) is float and number < 10 for number in stated):
        raise ModelError(
            f"the GGUF metadata gives activation_sparsity_scale = {stated!r:.60}:"
            " deviations below 10 for every layer expected"
        )
    return tuple(0.0 if number == -math.inf else number or LEAST_DEVIATION for number in stated)


def _by_gguf_tensors(config: ModelConfig, shapes: TensorShapes) -> ModelConfig:
    """Set the rank of the way round attention, which a file's tensors alone tell."""
    laurel, streams = shapes.get("blk.0.laurel_l.weight"), config.streams
    if laurel is None or streams is None:
        return config
    return replace(config, streams=replace(streams, laurel_rank=laurel[0]))


_HF_NAMES: Names = {
    **HF_INPUTS,
    "altup.router_norm.weight": "stream_norm",
    "altup.modality_router.weight": OtherForm("stream_router"),
    "altup.prediction_coefs.weight": OtherForm("stream_predict"),
    "altup.correction_coefs.weight": OtherForm("stream_correct"),
    "altup.correct_output_scale": "stream_scale",
    "laurel.linear_left.weight": "laurel_in",
    "laurel.linear_right.weight": "laurel_out",
    "laurel.post_laurel_norm.weight": "laurel_norm",
}
_GGUF_NAMES: Names = {
    **GGUF_INPUTS,
    "altup_router_norm.weight": "stream_norm",
    "altup_router.weight": OtherForm("stream_router"),
    "altup_predict_coef.weight": OtherForm("stream_predict"),
    "altup_correct_coef.weight": OtherForm("stream_correct"),
    "altup_correct_scale.weight": "stream_scale",
    "laurel_l.weight": "laurel_in",
    "laurel_r.weight": "laurel_out",
    "laurel_post_norm.weight": "laurel_norm",
}


def _streams_named(stem: str, count: int) -> tuple[str, ...]:
    """Names of products of all streams but the first."""
    return tuple(f"{stem}.{number}" for number in range(1, count))


GEMMA3N = Family(
    "gemma3n",
    hf=("gemma3n_text", "gemma3n"),
    from_hf=_hf,
    from_gguf=_gguf,
    from_gguf_tensors=_by_gguf_tensors,
    hf_names=_HF_NAMES,
    gguf_names=_GGUF_NAMES,
    global_names={
        **GLOBAL_INPUTS,
        **{
            f"model.{theirs}.{index}.weight": ours
            for theirs, stem in {
                "altup_projections": "stream_in",
                "altup_unembed_projections": "stream_out",
            }.items()
            for index, ours in enumerate(_streams_named(stem, MOST_STREAMS))
        },
        "altup_proj.weight": TensorCut(_streams_named("stream_in", GGUF_STREAMS), stacked=True),
        "altup_unembd_proj.weight": TensorCut(_streams_named("stream_out", GGUF_STREAMS), stacked=True),
    },
    hf_only=dict.fromkeys(("attention_bias", "use_bidirectional_attention", "rope_scaling")),
    hf_defaults={
        **DEFAULTS_WITH_INPUTS,
        "vocab_size": 262400,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "final_logit_softcapping": 30.0,
        "altup_active_idx": 0,
        "altup_correct_scale": True,
        "altup_num_inputs": 4,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
    },
    hf_text_prefixes=TEXT_PREFIXES,
    hf_ignored=OTHER_PARTS,
    ffn_form=FeedForwardForm("gelu_tanh"),
    own_layers=True,
)

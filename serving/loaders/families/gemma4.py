"""Families of Gemma whose layers differ. Gemma 4: longer heads in layers without a window, layers that read
inputs of their own or keys and values of earlier ones, and mixtures of experts beside a feed-forward layer,
with norms of their own. Gemma 3n: layers that read inputs of their own or keys and values of earlier ones,
and several streams, of which they change one."""

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
    experts_of,
    gguf_windows,
    layer_types,
    number_of,
    positive,
    positive_or_none,
    sharing,
    stacked,
    whole_number,
    with_kinds,
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
from phasewise.serving.models.packed_model import LARGEST, LayerForm, LayerKind, ModelConfig
from phasewise.serving.models.parts.attention import HeadShape
from phasewise.serving.models.parts.experts import Experts
from phasewise.serving.models.parts.feed_forward import FeedForwardForm
from phasewise.serving.models.parts.streams import MOST_STREAMS, LayerInputs, Streams
from phasewise.serving.models.rope import FrequencyFactors, RopeSpec, Scaling

PERIOD = 6
GLOBAL_HEAD_DIM = 512
UNTURNED = 1e30
"""The divisor of a frequency that rotates nothing, as llama.cpp's converter writes it."""
USUAL_ROPE: Mapping[str, Mapping[str, Any]] = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
ROPE_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    window, same = get("sliding_window", int), get("attention_k_eq_v", bool, False)
    sliding = [
        *layer_types(get, config, PERIOD)[:-1],
        False,
    ]  # the last layer sees all, whatever it is called
    kinds = []
    for layer, slides in enumerate(sliding):
        own = {
            "num_key_value_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            **_overrides(get, layer, slides),
        }
        heads = HeadShape(own["num_key_value_heads"], own["head_dim"], same and not slides)
        kinds.append(LayerKind(window if slides else None, _hf_rope(get, slides, heads.head_dim), heads))
    size, shared = get("hidden_size_per_layer_input", int, 0), get("num_kv_shared_layers", int, 0)
    mixture = None
    if get("enable_moe_block", bool, False):
        mixture = _mixture(get, "num_experts", "top_k_experts", "moe_intermediate_size")
    wide, first = get("use_double_wide_mlp", bool, False), config.n_layers - shared
    return _with_layers(
        replace(config, logit_cap=positive_or_none(get, "final_logit_softcapping")),
        kinds,
        [config.ffn * (2 if wide and layer >= first else 1) for layer in range(config.n_layers)],
        shared=shared,
        inputs=LayerInputs(size, get("vocab_size_per_layer_input", int)) if size else None,
        mixture=mixture,
    )


def _mixture(get: Get, count: str, chosen: str, width: str) -> Experts:
    """The mixture beside the feed-forward layer, by the keys of its numbers."""
    return replace(experts_of(get, count, chosen, whole_number(get, width), normalised=True), own_norms=True)


def _with_layers(
    config: ModelConfig,
    kinds: list[LayerKind],
    widths: list[int],
    shared: int,
    inputs: LayerInputs | None,
    mixture: Experts | None,
) -> ModelConfig:
    """Add the layers' own settings. `kinds`, `widths`: of every layer's attention, with heads, and
    feed-forward layer. `shared`: last layers that read keys and values of others."""
    heads = [kind.heads for kind in kinds if kind.heads is not None]
    for shape in heads:
        if not all(type(n) is int and n > 0 for n in (shape.n_kv_heads, shape.head_dim)):
            raise ModelError(
                f"a layer has {shape.n_kv_heads!r:.60} KV heads of {shape.head_dim!r:.60} numbers"
            )
    head_dim, n_kv_heads = max(h.head_dim for h in heads), max(h.n_kv_heads for h in heads)
    plain = HeadShape(n_kv_heads, head_dim)
    kinds = [replace(kind, heads=None) if kind.heads == plain else kind for kind in kinds]
    forms = [
        LayerForm(kind, width if mixture is None else replace(mixture, shared_ffn=width))
        for kind, width in zip(kinds, widths, strict=True)
    ]
    return replace(
        as_gemma(config, 1.0),
        head_dim=head_dim,
        n_kv_heads=n_kv_heads,
        forms=sharing(forms, shared),
        qk_norm=True,
        value_norms=True,
        layer_scales=True,
        layer_inputs=inputs,
    )


def _overrides(get: Get, layer: int, slides: bool) -> dict[str, Any]:
    """Fields of one layer's heads in config.json, as transformers 5 saves them, or as published files do."""
    overrides = get("per_layer_config", dict)
    if overrides is None:
        if slides:
            return {}
        own = {"head_dim": get("global_head_dim", int, GLOBAL_HEAD_DIM)}
        n_kv_heads = get("num_global_key_value_heads", int) if get("attention_k_eq_v", bool, False) else None
        return own if n_kv_heads is None else {**own, "num_key_value_heads": n_kv_heads}
    stated = [value for key, value in overrides.items() if key.isdecimal() and int(key) == layer]
    for value in stated:
        if not isinstance(value, dict) or set(value) - {"head_dim", "num_key_value_heads"}:
            raise ModelError(
                f"config.json has per_layer_config {value!r:.60}: heads of layers alone can differ"
            )
    if len(stated) > 1:
        raise ModelError(f"config.json has layer {layer} in per_layer_config twice")
    return stated[0] if stated else {}


def _hf_rope(get: Get, slides: bool, head_dim: int) -> RopeSpec:
    by_kind, name = get("rope_parameters", dict) or USUAL_ROPE, SLIDING if slides else FULL
    fields = by_kind.get(name)
    if not isinstance(fields, Mapping) or "rope_theta" not in fields:
        raise ModelError(f"config.json has no rope_theta for {name} in its rope_parameters")
    others = {key: value for key, value in fields.items() if key not in ROPE_KEYS and value is not None}
    kind, share = fields.get("rope_type", "default"), fields.get("partial_rotary_factor")
    share = 1.0 if share is None else number_of(share)
    if (
        others
        or kind not in ("default", "proportional")
        or not 0 < share <= 1
        or (kind == "default" and share != 1)
    ):
        raise ModelError(
            f"config.json asks for RoPE {dict(fields)!r:.80} in {name}: default and proportional can run"
        )
    if type(head_dim) is not int or not 2 <= head_dim <= LARGEST["head_dim"]:
        raise ModelError(f"config.json has heads of {head_dim!r:.60} numbers")
    turned = int(share * head_dim // 2)
    factors = (1.0,) * turned + (UNTURNED,) * (head_dim // 2 - turned)
    scaling: Scaling | None = None if turned == head_dim // 2 else FrequencyFactors(factors)
    return RopeSpec(number_of(fields["rope_theta"]), head_dim, scaling)


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    n_layers = config.n_layers
    sliding, window = gguf_windows(get, config)
    local_dim = get("attention.key_length_swa", int, config.head_dim)
    n_kv_heads = by_layer(get("attention.head_count_kv"), n_layers, "attention.head_count_kv")
    widths = by_layer(get("feed_forward_length"), n_layers, "feed_forward_length")
    size, shared = get("embedding_length_per_layer_input", int, 0), get("attention.shared_kv_layers", int, 0)
    if get("rope.dimension_count_swa", int, local_dim) != local_dim:
        raise ModelError("the GGUF metadata turns a part of heads in layers with a window, which cannot run")
    local_rope = RopeSpec(get("rope.freq_base_swa", float, LOCAL_THETA), local_dim)
    kinds = [
        LayerKind(window, local_rope, HeadShape(n_heads, local_dim))
        if slides
        else LayerKind(None, config.rope, HeadShape(n_heads, config.head_dim))
        for slides, n_heads in zip(sliding, n_kv_heads, strict=True)
    ]
    inputs = LayerInputs(size, config.vocab_size) if size else None
    own = replace(config, logit_cap=positive_or_none(get, "final_logit_softcapping"))
    return _with_layers(own, kinds, widths, shared, inputs, _gguf_mixture(get))


def _gguf_mixture(get: Get) -> Experts | None:
    """The mixture of a GGUF file, which states its sizes; other settings must be llama.cpp's."""
    if not get("expert_count", int, 0):
        return None
    for key, kind, usual in (("expert_gating_func", int, 1), ("expert_weights_scale", float, 1.0)):
        if get(key, kind, usual) != usual:
            raise ModelError(
                f"the GGUF metadata gives {key} = {get(key)!r:.60}: {usual!r} can run in gemma4 models"
            )
    return _mixture(get, "expert_count", "expert_used_count", "expert_feed_forward_length")


def _by_gguf_tensors(config: ModelConfig, shapes: TensorShapes) -> ModelConfig:
    """Let layers without a product for values use that of keys for both."""
    without = {
        config.forms[layer].attention
        for layer in config.attention_layers
        if f"blk.{layer}.attn_v.weight" not in shapes
    }
    kinds = []
    for form in config.forms:
        assert form.attention is not None
        same = replace(form.attention.heads or config.plain_heads, keys_are_values=True)
        is_same = form.attention in without
        kinds.append(replace(form.attention, heads=same) if is_same else form.attention)
    return with_kinds(config, kinds)


_HF_EXPERTS: Names = {
    "router.proj.weight": "router",
    "router.scale": "router_norm",
    "router.per_expert_scale": "expert_factors",
    **stacked("experts"),
    "pre_feedforward_layernorm_2.weight": "experts_norm",
    "post_feedforward_layernorm_1.weight": "shared_post_norm",
    "post_feedforward_layernorm_2.weight": "experts_post_norm",
}
_GGUF_EXPERTS: Names = {
    "ffn_gate_up_exps.weight": TensorCut(("gate", "up"), of_experts=True),
    "ffn_gate_inp.scale": "router_norm",
    "ffn_down_exps.scale": "expert_factors",
    "pre_ffw_norm_2.weight": "experts_norm",
    "post_ffw_norm_1.weight": "shared_post_norm",
    "post_ffw_norm_2.weight": "experts_post_norm",
}

GEMMA4 = Family(
    "gemma4",
    hf=("gemma4_text", "gemma4"),
    from_hf=_hf,
    from_gguf=_gguf,
    from_gguf_tensors=_by_gguf_tensors,
    hf_names={**HF_INPUTS, **_HF_EXPERTS, "layer_scalar": "out_scale"},
    gguf_names={**GGUF_INPUTS, **_GGUF_EXPERTS, "layer_output_scale.weight": "out_scale"},
    global_names=GLOBAL_INPUTS,
    hf_defaults=DEFAULTS_WITH_INPUTS,
    hf_only={"attention_bias": False, "use_bidirectional_attention": "vision"},  # between parts of an image
    hf_text_prefixes=TEXT_PREFIXES,
    hf_ignored=OTHER_PARTS,
    ffn_form=FeedForwardForm("gelu_tanh"),
    own_layers=True,
)


PERIOD_3N = 5
GLOBAL_THETA = 1e6
SPARSE_LAYERS, SPARSE_SHARE = 10, 0.95
LEAST_DEVIATION = 1e-30  # for none, which would mean that all gates count
KEEPING_LAYERS = 20
"""Layers that keep keys and values in all published models, where a GGUF file states no number."""
GGUF_STREAMS, GGUF_INPUT_SIZE, GGUF_LAUREL_RANK = 4, 256, 64
ROPE_KEYS = ("rope_type", "rope_theta", "partial_rotary_factor")


def _gemma3n_hf(get: Get, config: ModelConfig) -> ModelConfig:
    window, n_layers = get("sliding_window", int), config.n_layers
    local = LayerKind(
        window, _gemma3n_rope(get, SLIDING, "rope_local_base_freq", LOCAL_THETA, config.head_dim)
    )
    whole = LayerKind(None, _gemma3n_rope(get, FULL, "rope_theta", GLOBAL_THETA, config.head_dim))
    return _with_streams(
        config,
        [local if slides else whole for slides in layer_types(get, config, PERIOD_3N)],
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


def _with_streams(
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


def _gemma3n_rope(get: Get, name: str, older: str, theta: float, head_dim: int) -> RopeSpec:
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


def _gemma3n_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    n_layers = config.n_layers
    sliding, window = gguf_windows(get, config, PERIOD_3N)
    by_layer(get("attention.head_count_kv"), n_layers, "attention.head_count_kv")
    local = LayerKind(window, RopeSpec(get("rope.freq_base_swa", float, LOCAL_THETA), config.rope.dim))
    whole = LayerKind(None, config.rope)
    count, size = get("altup.num_inputs", int, GGUF_STREAMS), get("embedding_length_per_layer_input", int)
    if count != GGUF_STREAMS:
        raise ModelError(f"the GGUF metadata gives altup.num_inputs = {count!r:.60}: {GGUF_STREAMS} can run")
    return _with_streams(
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


def _laurel_by_tensors(config: ModelConfig, shapes: TensorShapes) -> ModelConfig:
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
    from_hf=_gemma3n_hf,
    from_gguf=_gemma3n_gguf,
    from_gguf_tensors=_laurel_by_tensors,
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

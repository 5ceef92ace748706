"""Tiny Gemma 3n and 4: configs, tensors beside the common ones, and what GGUF files say of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from tests.support.models.tensor_shapes import Shapes, shapes_of

GEMMA3N, GEMMA4 = "gemma3n_text", "gemma4_text"
FULL, SLIDING = "full_attention", "sliding_attention"
_COMMON: dict[str, Any] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
SHARED: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 7,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 3,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 272,
    "final_logit_softcapping": 5.0,
    "intermediate_size": 48,
}
"""Shaped like E2B."""
DENSE: dict[str, Any] = {
    **_COMMON,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
"""Shaped like 31B: keys of layers without a window are values too."""
MIXTURE: dict[str, Any] = {
    **DENSE,
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 3,
    "moe_intermediate_size": 32,
    "final_logit_softcapping": 5.0,
}
"""Shaped like 26B-A4B: experts beside the feed-forward layer."""
STREAMS: dict[str, Any] = {
    "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": 24,
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 256,
    "final_logit_softcapping": 30.0,
    "intermediate_size": [96, 96, 64, 64, 64, 64],
    "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.5, 0.0, 0.0],
    "altup_num_inputs": 4,
    "altup_active_idx": 0,
    "altup_correct_scale": True,
    "laurel_rank": 8,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
"""A small Gemma 3n, whose last tokens have no inputs of layers of their own."""
WHOLE_TABLE: dict[str, Any] = {**STREAMS, "vocab_size_per_layer_input": 272, "laurel_rank": 16}
"""The same with inputs for every token, as GGUF files have them."""


def is_shared(f: Mapping[str, Any], layer: int) -> bool:
    return layer >= f["num_hidden_layers"] - f["num_kv_shared_layers"]


_LAYER = """
    self_attn.q_proj.weight    q h
    self_attn.q_norm.weight    d
    self_attn.o_proj.weight    h q
    mlp.{gate,up}_proj.weight  width h
    mlp.down_proj.weight       h width
    {input_layernorm,post_attention_layernorm}.weight               h
    {pre_feedforward_layernorm,post_feedforward_layernorm}.weight   h
"""
_KEYS = """
    self_attn.k_proj.weight  kv h
    self_attn.k_norm.weight  d
"""
_EXPERTS = """
    router.proj.weight                            n h
    router.scale                                  h
    router.per_expert_scale                       n
    experts.gate_up_proj                          n 2*moe h
    experts.down_proj                             n h moe
    pre_feedforward_layernorm_2.weight            h
    post_feedforward_layernorm_{1,2}.weight       h
"""
_STREAMS = """
    altup.router_norm.weight         h
    altup.modality_router.weight     count h
    altup.prediction_coefs.weight    count**2 count
    altup.correction_coefs.weight    count count
    altup.correct_output_scale       h
    laurel.linear_left.weight        rank h
    laurel.linear_right.weight       h rank
    laurel.post_laurel_norm.weight   h
"""
_INPUTS = """
    per_layer_input_gate.weight       size h
    per_layer_projection.weight       h size
    post_per_layer_input_norm.weight  h
"""
_OUTER = """
    model.embed_tokens_per_layer.weight        vocab_size_per_layer_input size*num_hidden_layers
    model.per_layer_model_projection.weight    size*num_hidden_layers hidden_size
    model.per_layer_projection_norm.weight     size
    model.{altup_projections,altup_unembed_projections}.{:streams}.weight  hidden_size hidden_size
"""


def layer_shapes(f: Mapping[str, Any], layer: int) -> Shapes:
    """Tensors of a layer by the names that published checkpoints give them."""
    full, widths = f["layer_types"][layer] == FULL, f["intermediate_size"]
    same = full and f.get("attention_k_eq_v", False)
    head_dim = f["global_head_dim"] if full and "global_head_dim" in f else f["head_dim"]
    doubled = is_shared(f, layer) and f.get("use_double_wide_mlp")
    sizes = {
        "h": f["hidden_size"], "d": head_dim, "q": head_dim * f["num_attention_heads"],
        "kv": head_dim * (f["num_global_key_value_heads"] if same else f["num_key_value_heads"]),
        "width": widths[layer] if isinstance(widths, list) else widths * (2 if doubled else 1),
        "n": f.get("num_experts"), "moe": f.get("moe_intermediate_size"), "rank": f.get("laurel_rank"),
        "count": f.get("altup_num_inputs"), "size": f["hidden_size_per_layer_input"],
    }  # fmt: skip
    tables = [_LAYER, _STREAMS if "laurel_rank" in f else "layer_scalar 1"]
    tables += [_EXPERTS] * bool(f.get("enable_moe_block")) + [_INPUTS] * bool(sizes["size"])
    if not is_shared(f, layer):
        tables += [_KEYS] if same else [_KEYS, "self_attn.v_proj.weight kv h"]
    return {name: shape for table in tables for name, shape in shapes_of(table, sizes).items()}


def outer_shapes(f: Mapping[str, Any]) -> Shapes:
    size = f["hidden_size_per_layer_input"]
    more = {"size": size, "streams": f.get("altup_num_inputs", 1) - 1}
    return shapes_of(_OUTER, {**f, **more}) if size else {}


def write_gemma4_settings(writer: Any, f: Mapping[str, Any]) -> None:
    """Fields that llama.cpp's converter writes of layers that differ."""
    full = [kind == FULL for kind in f["layer_types"]]
    ffn, layers = f["intermediate_size"], range(f["num_hidden_layers"])
    writer.add_shared_kv_layers(f["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(f["hidden_size_per_layer_input"])
    writer.add_sliding_window_pattern([not is_full for is_full in full])
    writer.add_key_length(f["global_head_dim"])
    writer.add_value_length(f["global_head_dim"])
    writer.add_key_length_swa(f["head_dim"])
    writer.add_value_length_swa(f["head_dim"])
    writer.add_rope_dimension_count(f["global_head_dim"])
    writer.add_rope_dimension_count_swa(f["head_dim"])
    writer.add_rope_freq_base_swa(f["rope_parameters"][SLIDING]["rope_theta"])
    if f.get("use_double_wide_mlp"):
        writer.add_feed_forward_length([ffn * (1 + is_shared(f, layer)) for layer in layers])
    else:
        writer.add_feed_forward_length(ffn)
    kv, of_full = f["num_key_value_heads"], f.get("num_global_key_value_heads")
    writer.add_head_count_kv(kv if of_full is None else [of_full if is_full else kv for is_full in full])
    if f.get("enable_moe_block"):
        writer.add_expert_count(f["num_experts"])
        writer.add_expert_used_count(f["top_k_experts"])
        writer.add_expert_feed_forward_length(f["moe_intermediate_size"])
    if cap := f.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(cap)


def write_gemma3n_settings(writer: Any, f: Mapping[str, Any]) -> None:
    """The same of layers with several streams. No sparse gates are a share of minus infinity deviations."""
    writer.add_altup_active_idx(f["altup_active_idx"])
    writer.add_altup_num_inputs(f["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(f["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(f["num_kv_shared_layers"])
    shares = [float(np.float32(share)) for share in f["activation_sparsity_pattern"]]
    writer.add_activation_sparsity_scale(
        [NormalDist().inv_cdf(share) if share else -math.inf for share in shares]
    )
    writer.add_sliding_window_pattern([kind == SLIDING for kind in f["layer_types"]])
    writer.add_final_logit_softcapping(f["final_logit_softcapping"])


_GGUF_STEMS = {
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "experts.gate_up_proj": "experts.gate_up_proj.weight",
    "experts.down_proj": "experts.down_proj.weight",
    "altup.correct_output_scale": "altup.correct_output_scale.weight",
    "layer_scalar": "layer_scalar.weight",
}


def gguf_place(name: str) -> tuple[str, bool]:
    """The name by which the gguf package knows a tensor, and True where several of that name are a stack."""
    for theirs, known_as in _GGUF_STEMS.items():
        if name.endswith(f".{theirs}"):
            return name.removesuffix(theirs) + known_as, False
    stacked = re.sub(r"(\.altup_(?:unembed_)?projections)\.\d", r"\1", name)
    return stacked, stacked != name


def rope_factors(f: Mapping[str, Any]) -> list[float]:
    """Divisors of frequencies in layers without a window: those of pairs that nothing turns are huge."""
    pairs = f["global_head_dim"] // 2
    turned = int(f["rope_parameters"][FULL]["partial_rotary_factor"] * f["global_head_dim"] / 2)
    return [1.0] * turned + [1e30] * (pairs - turned)

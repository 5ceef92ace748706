"""Tiny Gemma 3n and 4: configs, tensors beside the common ones, and what GGUF files say of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

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


def layer_shapes(f: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a layer by the names that published checkpoints give them."""
    hidden, full = f["hidden_size"], f["layer_types"][layer] == FULL
    widths = f["intermediate_size"]
    same = full and f.get("attention_k_eq_v", False)
    head_dim = f["global_head_dim"] if full and "global_head_dim" in f else f["head_dim"]
    kv = head_dim * (f["num_global_key_value_heads"] if same else f["num_key_value_heads"])
    q = head_dim * f["num_attention_heads"]
    width = (
        widths[layer]
        if isinstance(widths, list)
        else widths * (2 if is_shared(f, layer) and f.get("use_double_wide_mlp") else 1)
    )
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
    }
    shapes |= _stream_shapes(f) if "laurel_rank" in f else {"layer_scalar": (1,)}
    if f.get("enable_moe_block"):
        shapes |= _expert_shapes(f)
    if not is_shared(f, layer):
        shapes |= {"self_attn.k_proj.weight": (kv, hidden), "self_attn.k_norm.weight": (head_dim,)}
        shapes |= {} if same else {"self_attn.v_proj.weight": (kv, hidden)}
    norms = ["input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"]
    norms += ["post_feedforward_layernorm"]
    if size := f["hidden_size_per_layer_input"]:
        shapes |= {
            "per_layer_input_gate.weight": (size, hidden),
            "per_layer_projection.weight": (hidden, size),
        }
        norms.append("post_per_layer_input_norm")
    return shapes | {f"{name}.weight": (hidden,) for name in norms}


def _expert_shapes(f: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, count, width = f["hidden_size"], f["num_experts"], f["moe_intermediate_size"]
    norms = ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2")
    return {
        "router.proj.weight": (count, hidden),
        "router.scale": (hidden,),
        "router.per_expert_scale": (count,),
        "experts.gate_up_proj": (count, 2 * width, hidden),
        "experts.down_proj": (count, hidden, width),
        **{f"{norm}.weight": (hidden,) for norm in norms},
    }


def _stream_shapes(f: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, rank, count = f["hidden_size"], f["laurel_rank"], f["altup_num_inputs"]
    return {
        "altup.router_norm.weight": (hidden,),
        "altup.modality_router.weight": (count, hidden),
        "altup.prediction_coefs.weight": (count**2, count),
        "altup.correction_coefs.weight": (count, count),
        "altup.correct_output_scale": (hidden,),
        "laurel.linear_left.weight": (rank, hidden),
        "laurel.linear_right.weight": (hidden, rank),
        "laurel.post_laurel_norm.weight": (hidden,),
    }


def outer_shapes(f: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    size = f["hidden_size_per_layer_input"]
    width = size * f["num_hidden_layers"]
    if not size:
        return {}
    streams = range(f.get("altup_num_inputs", 1) - 1)
    parts = ("altup_projections", "altup_unembed_projections")
    square = (f["hidden_size"], f["hidden_size"])
    return {f"model.{part}.{i}.weight": square for i in streams for part in parts} | {
        "model.embed_tokens_per_layer.weight": (f["vocab_size_per_layer_input"], width),
        "model.per_layer_model_projection.weight": (width, f["hidden_size"]),
        "model.per_layer_projection_norm.weight": (size,),
    }


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

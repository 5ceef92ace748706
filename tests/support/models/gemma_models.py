"""Tiny Gemma 3n and 4: configs, and what GGUF files say of them."""

from __future__ import annotations

import re
from typing import Any

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

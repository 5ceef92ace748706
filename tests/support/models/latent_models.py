"""Tiny models with latent attention: configs, and tensors of their GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Fields = Mapping[str, Any]

LATENT: dict[str, Any] = {
    "num_hidden_layers": 3, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "mlp_bias": False,
}  # fmt: skip
V2: dict[str, Any] = {
    **LATENT, "q_lora_rank": None, "topk_method": "greedy", "routed_scaling_factor": 1.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                     "mscale": 0.707, "mscale_all_dim": 0.707, "beta_fast": 32, "beta_slow": 1},
}  # fmt: skip
V2_GROUPS: dict[str, Any] = {
    **LATENT, "q_lora_rank": 48, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 4.0,
}  # fmt: skip
V3: dict[str, Any] = {
    **LATENT, "q_lora_rank": 48, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True, "n_shared_experts": 1,
}  # fmt: skip
GLM_LITE: dict[str, Any] = {
    **LATENT, "q_lora_rank": 48, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.8,
    "norm_topk_prob": True, "n_shared_experts": 1, "v_head_dim": 16, "qk_nope_head_dim": 32,
}  # fmt: skip


def latent_gguf_tensors(
    f: Fields, name: str, values: np.ndarray, split: bool
) -> dict[str, np.ndarray] | None:
    """A tensor as the converter writes it; None where it stays as it is."""
    if name.endswith(".e_score_correction_bias"):
        return {name.replace("_bias", ".bias"): values}
    if not name.endswith(".kv_b_proj.weight") or not split:
        return None
    by_head = values.reshape(f["num_attention_heads"], -1, f["kv_lora_rank"])
    keys, own = np.split(by_head, [f["qk_nope_head_dim"]], axis=1)
    return {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): own}

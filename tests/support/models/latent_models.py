"""Tiny models with latent attention: shapes of their tensors; settings and tensors of their GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.models.tensor_shapes import Shapes, shapes_of

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


_LAYER = """
    self_attn.kv_a_proj_with_mqa.weight                rank+turned h
    self_attn.kv_a_layernorm.weight                    rank
    self_attn.kv_b_proj.weight                         heads*(keys+values) rank
    self_attn.o_proj.weight                            h heads*values
    {input_layernorm,post_attention_layernorm}.weight  h
"""
_LOW_RANK_QUERIES = """
    self_attn.q_a_proj.weight       q_rank h
    self_attn.q_a_layernorm.weight  q_rank
    self_attn.q_b_proj.weight       heads*(keys+turned) q_rank
"""
_DENSE = """
    mlp.{gate,up}_proj.weight  f h
    mlp.down_proj.weight       h f
"""
_EXPERTS = """
    mlp.gate.weight                           n h
    mlp.shared_experts.{gate,up}_proj.weight  shared h
    mlp.shared_experts.down_proj.weight       h shared
    mlp.experts.{:n}.{gate,up}_proj.weight    width h
    mlp.experts.{:n}.down_proj.weight         h width
"""


def latent_layer_shapes(kind: str, f: Fields, layer: int) -> Shapes:
    """Tensors of a layer."""
    sizes = {
        "h": f["hidden_size"], "f": f["intermediate_size"], "heads": f["num_attention_heads"],
        "rank": f["kv_lora_rank"], "q_rank": f["q_lora_rank"], "keys": f["qk_nope_head_dim"],
        "turned": f["qk_rope_head_dim"], "values": f["v_head_dim"], "n": f["n_routed_experts"],
        "width": f["moe_intermediate_size"], "shared": f["moe_intermediate_size"] * f["n_shared_experts"],
    }  # fmt: skip
    queries = _LOW_RANK_QUERIES if f["q_lora_rank"] else "self_attn.q_proj.weight heads*(keys+turned) h"
    shapes = shapes_of(_LAYER, sizes) | shapes_of(queries, sizes)
    if layer < f["first_k_dense_replace"]:
        return shapes | shapes_of(_DENSE, sizes)
    if kind != "deepseek_v2":
        shapes["mlp.gate.e_score_correction_bias"] = (sizes["n"],)
    return shapes | shapes_of(_EXPERTS, sizes)


def write_latent_settings(writer: Any, kind: str, f: Fields, split: bool) -> None:
    """split: the tensor of keys and values by head as two, as files are written today."""
    keys, values = f["qk_nope_head_dim"] + f["qk_rope_head_dim"], f["v_head_dim"]
    if split:
        writer.add_key_length_mla(keys)
        writer.add_value_length_mla(values)
        keys, values = f["kv_lora_rank"] + f["qk_rope_head_dim"], f["kv_lora_rank"]
    writer.add_head_count_kv(1 if split else f["num_attention_heads"])
    writer.add_key_length(keys)
    writer.add_value_length(values)
    writer.add_rope_dimension_count(f["qk_rope_head_dim"])
    writer.add_kv_lora_rank(f["kv_lora_rank"])
    if f["q_lora_rank"]:
        writer.add_q_lora_rank(f["q_lora_rank"])
    writer.add_leading_dense_block_count(f["first_k_dense_replace"])
    writer.add_expert_count(f["n_routed_experts"])
    writer.add_expert_used_count(f["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(f["moe_intermediate_size"])
    writer.add_expert_shared_count(f["n_shared_experts"])
    writer.add_expert_weights_scale(f["routed_scaling_factor"])
    writer.add_expert_weights_norm(f.get("norm_topk_prob", False))
    writer.add_uint32("deepseek2.expert_gating_func", 1 if kind == "deepseek_v2" else 2)
    if f.get("n_group"):
        writer.add_expert_group_count(f["n_group"])
        writer.add_expert_group_used_count(f["topk_group"])
    if weight := (f.get("rope_scaling") or {}).get("mscale_all_dim"):
        writer.add_rope_scaling_yarn_log_mul(0.1 * weight)


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

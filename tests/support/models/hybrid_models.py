"""Tiny hybrids of Mamba 2 with attention beside it, or in layers of one half."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

Fields = Mapping[str, Any]

FALCON, NEMOTRON, KIMI = "falcon_h1", "nemotron_h", "kimi_linear"
HYBRIDS = (FALCON, NEMOTRON, KIMI)
LETTERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}

FALCON_H1: dict[str, Any] = {
    "num_hidden_layers": 3, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_n_groups": 2,
    "mamba_d_state": 20, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 16,
    "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_rms_norm": False,
    "mamba_norm_before_gate": False, "rope_theta": 1e5,
    "projectors_bias": False, "attention_bias": False, "mlp_bias": False, "head_dim": 16,
    "embedding_multiplier": 3.0, "lm_head_multiplier": 0.75, "key_multiplier": 0.6,
    "attention_in_multiplier": 1.25, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.7, "mlp_multipliers": [0.8, 1.2],
    "ssm_multipliers": [0.7, 0.9, 1.1, 1.3, 0.5],
}  # fmt: skip
FALCON_H1_NORM: dict[str, Any] = {**FALCON_H1, "mamba_rms_norm": True}
_NEMOTRON: dict[str, Any] = {
    "hidden_act": "relu2", "head_dim": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2,
    "ssm_state_size": 20, "conv_kernel": 4, "expand": 2, "chunk_size": 16, "use_conv_bias": True,
    "mlp_hidden_act": "relu2", "layer_norm_epsilon": 1e-5,
    "use_bias": False, "mlp_bias": False, "attention_bias": False,
}  # fmt: skip
_MIXTURE: dict[str, Any] = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 48, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip


def _pattern(letters: str) -> dict[str, Any]:
    return {"num_hidden_layers": len(letters), "layers_block_type": [LETTERS[letter] for letter in letters]}


NEMOTRON_H: dict[str, Any] = {**_NEMOTRON, **_pattern("MM-*M--")}
NEMOTRON_H_MOE: dict[str, Any] = {**_NEMOTRON, **_MIXTURE, **_pattern("MEM*EE")}
NEMOTRON_H_MIXED: dict[str, Any] = {
    **_NEMOTRON, **_MIXTURE, "num_hidden_layers": 6, "hybrid_override_pattern": "-ME*EM",
}  # fmt: skip


KIMI_LINEAR: dict[str, Any] = {
    "num_hidden_layers": 5, "num_key_value_heads": 4, "kv_lora_rank": 32, "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8, "v_head_dim": 32, "q_lora_rank": None, "num_experts": 8,
    "num_experts_per_token": 3, "num_shared_experts": 1, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "moe_renormalize": True, "routed_scaling_factor": 2.4,
    "num_expert_group": 1, "topk_group": 1, "model_max_length": 256,
    "linear_attn_config": {"full_attn_layers": [3], "kda_layers": [1, 2, 4, 5], "head_dim": 20,
                           "num_heads": 4, "short_conv_kernel_size": 4},
}  # fmt: skip


def _sizes(f: Fields) -> tuple[int, int, int, int]:
    """Values, numbers of all keys, heads and taps."""
    if "mamba_d_ssm" in f:
        keys = f["mamba_n_groups"] * f["mamba_d_state"]
        return f["mamba_d_ssm"], keys, f["mamba_n_heads"], f["mamba_d_conv"]
    heads = f["mamba_num_heads"]
    return heads * f["mamba_head_dim"], f["n_groups"] * f["ssm_state_size"], heads, f["conv_kernel"]


def _kimi_gguf_tensors(f: Fields, name: str, values: np.ndarray) -> dict[str, np.ndarray] | None:
    if name.endswith("_conv1d.weight"):
        return {name: values[None]}
    if name.endswith(".A_log"):
        return {name: -np.exp(values.astype(np.float64))}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): values}
    if name.endswith(".kv_b_proj.weight"):
        by_head = values.reshape(f["num_attention_heads"], -1, f["kv_lora_rank"])
        keys, own = np.split(by_head, [f["qk_nope_head_dim"]], axis=1)
        return {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): own}
    return None


def hybrid_gguf_tensors(kind: str, f: Fields, name: str, values: np.ndarray) -> dict[str, np.ndarray] | None:
    """A tensor as the converter writes it; None where it stays as it is, or is one of a stack."""
    if kind == KIMI:
        return _kimi_gguf_tensors(f, name, values)
    if kind not in HYBRIDS:
        return None
    if kind == FALCON:
        values = values * _multipliers(f, name)
    if name.endswith(".conv1d.weight"):
        return {name: values[:, 0]}
    if name.endswith((".A_log", ".D")):
        return {name: (-np.exp(values.astype(np.float64)) if "A_log" in name else values)[:, None]}
    if name.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return {name: values.reshape(f.get("mamba_n_groups", f.get("n_groups")), -1)}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias" if kind == FALCON else ".dt.bias"): values}
    return {name: values} if kind == FALCON else None


def _multipliers(f: Fields, name: str) -> Any:
    """The factor by which llama.cpp's converter multiplies a Falcon-H1's tensor."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    into = f["attention_in_multiplier"]
    by_part = {
        "embed_tokens": f["embedding_multiplier"], "lm_head": f["lm_head_multiplier"],
        "q_proj": into, "k_proj": into * f["key_multiplier"], "v_proj": into,
        "o_proj": f["attention_out_multiplier"], "out_proj": f["ssm_out_multiplier"],
        "gate_proj": f["mlp_multipliers"][0], "down_proj": f["mlp_multipliers"][1],
    }  # fmt: skip
    if part != "in_proj":
        return by_part.get(part, 1.0)
    inner, keys, heads, _ = _sizes(f)
    of_rows = np.repeat(f["ssm_multipliers"], (inner, inner, keys, keys, heads))
    return f["ssm_in_multiplier"] * of_rows[:, None]

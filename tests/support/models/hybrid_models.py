"""Tiny hybrids of Mamba 2 with attention beside it, or in layers of one half: shapes of their tensors;
settings and tensors of their GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests.support.models.tensor_shapes import Shapes, shapes_of

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


_MAMBA = """
    in_proj.weight     2*values+2*keys+heads h
    conv1d.weight      values+2*keys 1 taps
    conv1d.bias        values+2*keys
    {A_log,dt_bias,D}  heads
    norm.weight        values
    out_proj.weight    h values
"""
_ATTENTION = """
    q_proj.weight      q h
    {k,v}_proj.weight  kv h
    o_proj.weight      h q
"""
_PLAIN = """
    up_proj.weight    f h
    down_proj.weight  h f
"""
_FALCON_OWN = """
    feed_forward.{gate,up}_proj.weight        f h
    feed_forward.down_proj.weight             h f
    {input_layernorm,pre_ff_layernorm}.weight h
"""
_NEMOTRON_EXPERTS = """
    gate.weight                       n h
    gate.e_score_correction_bias      n
    shared_experts.up_proj.weight     shared h
    shared_experts.down_proj.weight   h shared
    experts.{:n}.up_proj.weight       width h
    experts.{:n}.down_proj.weight     h width
"""
_BY_KEY = """
    {q,k,v}_proj.weight    keys h
    {q,k,v}_conv1d.weight  keys 1 taps
    {f,g}_a_proj.weight    dim h
    {f,g}_b_proj.weight    keys dim
    b_proj.weight          heads h
    A_log                  1 1 heads 1
    dt_bias                keys
    o_norm.weight          dim
    o_proj.weight          h keys
"""
_LATENT = """
    q_proj.weight              heads*(keys+more) h
    kv_a_proj_with_mqa.weight  rank+more h
    kv_a_layernorm.weight      rank
    kv_b_proj.weight           heads*(keys+values) rank
    o_proj.weight              h heads*values
"""
_GATED = """
    {gate,up}_proj.weight  f h
    down_proj.weight       h f
"""
_KIMI_EXPERTS = """
    gate.weight                                 n h
    gate.e_score_correction_bias                n
    experts.{:n}.{w1,w3}.weight                 width h
    experts.{:n}.w2.weight                      h width
    shared_experts.{gate_proj,up_proj}.weight   shared h
    shared_experts.down_proj.weight             h shared
"""


def hybrid_shapes(kind: str, f: Fields) -> Shapes:
    """Every tensor of a model."""
    stem = "backbone" if kind == NEMOTRON else "model"
    first, last = {FALCON: ("embed_tokens", "final_layernorm"), NEMOTRON: ("embeddings", "norm_f")}.get(
        kind, ("embed_tokens", "norm")
    )
    outer = f"{{{stem}.{first},lm_head}}.weight vocab_size hidden_size \n {stem}.{last}.weight hidden_size"
    shapes = shapes_of(outer, f)
    for i in range(f["num_hidden_layers"]):
        layer = f"{stem}.layers.{i}."
        if kind == KIMI:
            shapes |= _kimi(f, i, layer)
        else:
            shapes |= _falcon(f, layer) if kind == FALCON else _nemotron(f, halves(f)[i], layer)
    return shapes


def halves(f: Fields) -> list[str]:
    """The halves of a Nemotron-H's layers."""
    pattern = f.get("hybrid_override_pattern")
    return [LETTERS[letter] for letter in pattern] if pattern else f["layers_block_type"]


def _letters(f: Fields) -> dict[str, int]:
    """Sizes by the names that the tables have."""
    values, keys, heads, taps = _sizes(f)
    q, kv = (f[key] * f["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    sizes = {"h": f["hidden_size"], "f": f["intermediate_size"], "q": q, "kv": kv}
    return sizes | {"values": values, "keys": keys, "heads": heads, "taps": taps}


def _falcon(f: Fields, stem: str) -> Shapes:
    sizes = _letters(f)
    shapes = shapes_of(_MAMBA, sizes, f"{stem}mamba.")
    if not f["mamba_rms_norm"]:
        del shapes[f"{stem}mamba.norm.weight"]
    return shapes | shapes_of(_ATTENTION, sizes, f"{stem}self_attn.") | shapes_of(_FALCON_OWN, sizes, stem)


def _nemotron(f: Fields, half: str, stem: str) -> Shapes:
    tables = {
        "linear_attention": _MAMBA,
        "full_attention": _ATTENTION,
        "mlp": _PLAIN,
        "moe": _NEMOTRON_EXPERTS,
    }
    sizes = _letters(f) | {
        "n": f.get("n_routed_experts", 0),
        "width": f.get("moe_intermediate_size", 0),
        "shared": f.get("moe_shared_expert_intermediate_size", 0),
    }
    return shapes_of("norm.weight h", sizes, stem) | shapes_of(tables[half], sizes, f"{stem}mixer.")


def _kimi(f: Fields, layer: int, stem: str) -> Shapes:
    own, hidden, width = f["linear_attn_config"], f["hidden_size"], f["moe_intermediate_size"]
    if layer + 1 in own["full_attn_layers"]:
        sizes = {"heads": f["num_attention_heads"], "rank": f["kv_lora_rank"], "keys": f["qk_nope_head_dim"]}
        sizes |= {"h": hidden, "more": f["qk_rope_head_dim"], "values": f["v_head_dim"]}
        shapes = shapes_of(_LATENT, sizes, f"{stem}self_attn.")
    else:
        heads, dim, taps = own["num_heads"], own["head_dim"], own["short_conv_kernel_size"]
        sizes = {"h": hidden, "heads": heads, "dim": dim, "keys": heads * dim, "taps": taps}
        shapes = shapes_of(_BY_KEY, sizes, f"{stem}self_attn.")
    sizes = {"h": hidden, "f": f["intermediate_size"], "n": f["num_experts"], "width": width}
    sizes["shared"] = width * f["num_shared_experts"]
    shapes |= shapes_of("{input,post_attention}_layernorm.weight h", sizes, stem)
    if layer < f["first_k_dense_replace"]:
        return shapes | shapes_of(_GATED, sizes, f"{stem}mlp.")
    return shapes | shapes_of(_KIMI_EXPERTS, sizes, f"{stem}block_sparse_moe.")


def _sizes(f: Fields) -> tuple[int, int, int, int]:
    """Values, numbers of all keys, heads and taps."""
    if "mamba_d_ssm" in f:
        keys = f["mamba_n_groups"] * f["mamba_d_state"]
        return f["mamba_d_ssm"], keys, f["mamba_n_heads"], f["mamba_d_conv"]
    heads = f["mamba_num_heads"]
    return heads * f["mamba_head_dim"], f["n_groups"] * f["ssm_state_size"], heads, f["conv_kernel"]


def write_hybrid_settings(writer: Any, kind: str, f: Fields) -> None:
    if kind == KIMI:
        _write_kimi_settings(writer, f)
        return
    values, _, heads, taps = _sizes(f)
    writer.add_ssm_conv_kernel(taps)
    writer.add_ssm_state_size(f.get("mamba_d_state", f.get("ssm_state_size")))
    writer.add_ssm_group_count(f.get("mamba_n_groups", f.get("n_groups")))
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(values)
    if kind == FALCON:
        return
    feeding = [half in ("mlp", "moe") for half in halves(f)]
    width = f.get("moe_intermediate_size", f["intermediate_size"])
    writer.add_feed_forward_length([width * feeds for feeds in feeding])
    if "n_routed_experts" in f:
        writer.add_expert_count(f["n_routed_experts"])
        writer.add_expert_used_count(f["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(f["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(f["n_shared_experts"])
        writer.add_expert_weights_norm(f["norm_topk_prob"])
        writer.add_expert_weights_scale(f["routed_scaling_factor"])
        writer.add_expert_group_count(f["n_group"])


def _write_kimi_settings(writer: Any, f: Fields) -> None:
    own, more = f["linear_attn_config"], f["qk_rope_head_dim"]
    full = own["full_attn_layers"]
    writer.add_head_count_kv([int(layer + 1 in full) for layer in range(f["num_hidden_layers"])])
    writer.add_ssm_conv_kernel(own["short_conv_kernel_size"])
    writer.add_uint32("kimi-linear.kda.head_dim", own["head_dim"])
    writer.add_kv_lora_rank(f["kv_lora_rank"])
    writer.add_rope_dimension_count(more)
    writer.add_key_length(f["kv_lora_rank"] + more)
    writer.add_key_length_mla(f["qk_nope_head_dim"] + more)
    writer.add_value_length_mla(f["v_head_dim"])
    writer.add_expert_feed_forward_length(f["moe_intermediate_size"])
    writer.add_expert_shared_count(f["num_shared_experts"])
    writer.add_leading_dense_block_count(f["first_k_dense_replace"])
    writer.add_expert_weights_scale(f["routed_scaling_factor"])
    writer.add_uint32("kimi-linear.expert_gating_func", 2)


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

"""The models of `family_models` as GGUF files, from the same raw bits.

Tensor names and metadata keys are the gguf package's; what llama.cpp's converter does to values beside that
(interleaving, splitting, adding one) is written here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import gemma_models, hybrid_models, latent_models, tiny_models
from tests.support.models.family_cases import FAMILY_CASES, FULL, SHAPE, FamilyCase
from tests.support.models.family_models import Arrays, family_weights

NEXTN = {
    "eh_proj": "eh_proj.weight",
    "enorm": "enorm.weight",
    "hnorm": "hnorm.weight",
    "shared_head": "shared_head_norm.weight",
}


def write_family_gguf(path: Path, name: str, head: Arrays | None = None) -> Path:
    """The same model as llama.cpp's converter would write it, in float32. head: tensors of a layer more."""
    import gguf

    case, f = FAMILY_CASES[name], FAMILY_CASES[name].fields
    if head is not None:
        f = {**f, "num_nextn_predict_layers": 1}
    writer = gguf.GGUFWriter(path, case.gguf)
    _write_settings(writer, case, f)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == case.gguf)
    names = gguf.get_tensor_name_map(arch, f["num_hidden_layers"] + (head is not None))
    for tensor, values in _converted(case, f, family_weights(name) | (head or {})).items():
        theirs = names.get_name(tensor, try_suffixes=(".weight", ".bias", ".scale"))
        if theirs is None and head is not None and tensor in head:
            theirs = (
                f"blk.{f['num_hidden_layers']}.nextn.{NEXTN[tensor.rpartition('.layers.')[2].split('.')[1]]}"
            )
        assert theirs is not None, tensor
        writer.add_tensor(theirs, np.ascontiguousarray(values, np.float32))
    if f.get("num_nextn_predict_layers") and head is None:
        writer.add_tensor(
            f"blk.{f['num_hidden_layers']}.nextn.eh_proj.weight", np.ones((64, 128), np.float32)
        )
    if case.gguf == "gemma4":
        writer.add_tensor("rope_freqs.weight", np.array(gemma_models.rope_factors(f), np.float32))
    scaling = f.get("rope_scaling") or {}
    if "short_factor" in scaling:
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(scaling[f"{kind}_factor"], np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_settings(writer: Any, case: FamilyCase, f: Mapping[str, Any]) -> None:
    head_dim = f.get("head_dim", f["hidden_size"] // f["num_attention_heads"])
    n_more = f.get("num_nextn_predict_layers", 0)
    writer.add_block_count(f["num_hidden_layers"] + n_more)
    if n_more:
        writer.add_nextn_predict_layers(n_more)
    writer.add_context_length(f["max_position_embeddings"])
    writer.add_embedding_length(f["hidden_size"])
    if case.model_type != hybrid_models.NEMOTRON and case.gguf != "gemma4":
        writer.add_feed_forward_length(f["intermediate_size"])
    writer.add_head_count(f["num_attention_heads"])
    kv = f["num_key_value_heads"]
    kinds = f.get("layer_types", [])
    if case.model_type == hybrid_models.NEMOTRON:
        kinds = hybrid_models.halves(f)
    by_layer = case.gguf in ("lfm2", "granitehybrid") or case.model_type == hybrid_models.NEMOTRON
    if case.model_type == hybrid_models.KIMI:
        pass
    elif case.model_type == gemma_models.GEMMA4:
        gemma_models.write_gemma4_settings(writer, f)
    elif "kv_lora_rank" in f:
        latent_models.write_latent_settings(writer, case.model_type, f, split=not case.whole_kv_b)
    else:
        writer.add_head_count_kv([kv * (kind == FULL) for kind in kinds] if by_layer else kv)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
        turned = f.get("rotary_dim", int(head_dim * f.get("partial_rotary_factor", 1.0)))
        writer.add_rope_dimension_count(turned)
    if case.model_type in hybrid_models.HYBRIDS:
        hybrid_models.write_hybrid_settings(writer, case.model_type, f)
    if case.model_type == gemma_models.GEMMA3N:
        gemma_models.write_gemma3n_settings(writer, f)
    if case.gguf == "lfm2":
        writer.add_shortconv_l_cache(f["conv_L_cache"])
    if case.gguf == "granitehybrid":
        writer.add_ssm_conv_kernel(f["mamba_d_conv"])
        writer.add_ssm_state_size(f["mamba_d_state"])
        writer.add_ssm_group_count(f["mamba_n_groups"])
        writer.add_ssm_time_step_rank(f["mamba_n_heads"])
        writer.add_ssm_inner_size(f["mamba_expand"] * f["hidden_size"])
        writer.add_rope_scaling_finetuned(f.get("position_embedding_type") == "rope")
    if case.gguf in ("qwen3next", "qwen35", "qwen35moe"):
        writer.add_ssm_conv_kernel(f["linear_conv_kernel_dim"])
        writer.add_ssm_state_size(f["linear_key_head_dim"])
        writer.add_ssm_group_count(f["linear_num_key_heads"])
        writer.add_ssm_time_step_rank(f["linear_num_value_heads"])
        writer.add_ssm_inner_size(f["linear_num_value_heads"] * f["linear_value_head_dim"])
        writer.add_uint32(f"{case.gguf}.full_attention_interval", 3)
    if "shared_expert_intermediate_size" in f:
        writer.add_expert_shared_feed_forward_length(f["shared_expert_intermediate_size"])
    if case.gguf in ("cohere2", "starcoder2"):
        writer.add_layer_norm_eps(f.get("layer_norm_eps", f.get("norm_epsilon")))
    else:
        writer.add_layer_norm_rms_eps(f["rms_norm_eps"])
    if case.gguf == "cohere2":
        writer.add_logit_scale(f["logit_scale"])
    if beta := f.get("rope_parameters", {}).get("llama_4_scaling_beta"):
        writer.add_attn_temperature_scale(beta)
        writer.add_rope_scaling_yarn_log_mul(f["rope_parameters"]["mscale_all_dim"])
    rope = f.get("rope_parameters", f)
    writer.add_rope_freq_base(rope.get(FULL, rope).get("rope_theta", 1e4))
    if f.get("sliding_window"):
        writer.add_sliding_window(f["sliding_window"])
    if case.gguf in ("glm4moe", "minimax-m2"):
        _write_routing(writer, f)
    n_experts = f.get("num_experts", f.get("num_local_experts"))
    if n_experts and case.model_type != gemma_models.GEMMA4:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(f.get("num_experts_per_tok", f.get("num_experts_per_token")))
    if shared := f.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(shared)
    if case.model_type in ("qwen2_moe", "qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"):
        writer.add_expert_feed_forward_length(f.get("moe_intermediate_size", f["intermediate_size"]))
    if case.model_type == "gemma2":
        writer.add_attn_logit_softcapping(f["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(f["final_logit_softcapping"])
    if "residual_multiplier" in f:
        writer.add_embedding_scale(f["embedding_multiplier"])
        writer.add_residual_scale(f["residual_multiplier"])
        writer.add_attention_scale(f["attention_multiplier"])
        writer.add_logit_scale(f["logits_scaling"])
    _write_scaling(writer, f)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(
        [*tiny_models.vocabulary(SHAPE)[:-1], "ab"]
    )  # the writer takes no empty list of merges
    writer.add_token_types([3] * 3 + [1] * 256 + [5] * (SHAPE.vocab_size - 260) + [1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)


def _write_routing(writer: Any, f: Mapping[str, Any]) -> None:
    import gguf

    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_feed_forward_length(f.get("moe_intermediate_size", f["intermediate_size"]))
    if "n_routed_experts" in f:
        writer.add_expert_count(f["n_routed_experts"])
        writer.add_expert_used_count(f["num_experts_per_tok"])
        writer.add_expert_shared_count(f["n_shared_experts"])
        writer.add_leading_dense_block_count(f["first_k_dense_replace"])
        writer.add_expert_weights_scale(f["routed_scaling_factor"])
        writer.add_expert_weights_norm(f["norm_topk_prob"])


def _write_scaling(writer: Any, f: Mapping[str, Any]) -> None:
    import gguf

    scaling = f.get("rope_scaling") or f.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if kind == "longrope":
        original = f["original_max_position_embeddings"]
        factor = f["max_position_embeddings"] / original
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))


def _converted(case: FamilyCase, f: Mapping[str, Any], weights: Arrays) -> Arrays:
    """Tensors as the converter changes them, by names that the gguf package knows."""
    out: Arrays = {}
    stacks: dict[str, list[np.ndarray]] = {}
    for name, values in weights.items():
        heads = {"q": f["num_attention_heads"], "k": f["num_key_value_heads"]}.get(
            name.rpartition("_proj")[0][-1:], 0
        )
        if case.interleaved and heads and ".self_attn." in name:
            values = tiny_models.interleave_heads(values, heads)
        if case.unit_norms and "norm" in name and "linear_attn" not in name:
            values = values + 1
        changed = hybrid_models.hybrid_gguf_tensors(case.model_type, f, name, values)
        if changed is None:
            changed = _state_tensors(case, f, name, values)
        if changed is not None:
            out |= changed
        elif case.model_type in (gemma_models.GEMMA3N, gemma_models.GEMMA4):
            theirs, is_stacked = gemma_models.gguf_place(name)
            if is_stacked:
                stacks.setdefault(theirs, []).append(values)
            else:
                out[theirs] = values
        elif name.endswith(".e_score_correction_bias"):
            out[f"{name.removesuffix('_bias')}.bias"] = values
        elif (latent := latent_models.latent_gguf_tensors(f, name, values, not case.whole_kv_b)) is not None:
            out |= latent
        elif name.endswith(".sinks"):
            out[f"{name}.weight"] = values
        elif case.model_type == "gpt_oss" and ".experts." in name:
            out |= _gpt_oss_experts(name, values)
        elif case.gguf in ("granitemoe", "granitehybrid") and "input_linear" in name:
            part = "shared_expert" if "shared_mlp" in name else "experts"
            mlp = f"{name.rpartition('.input_linear')[0].rpartition('.')[0]}.mlp.{part}"
            gate, up = np.split(values, 2, axis=-2)
            out[f"{mlp}.gate_proj.weight"], out[f"{mlp}.up_proj.weight"] = gate, up
        elif (parts := name.split(".experts."))[0] != name:
            rest = parts[1].split(".", 1)[1]
            of_all = f"{parts[0].replace('backbone.', 'model.').replace('.mixer', '.mlp')}.experts.{rest}"
            stacks.setdefault(of_all, []).append(values)
        else:
            out[name] = values
    return out | {name: np.stack(values) for name, values in stacks.items()}


def _state_tensors(case: FamilyCase, f: Mapping[str, Any], name: str, values: np.ndarray) -> Arrays | None:
    """Tensors of layers with a state, and of Qwen 3 Next's experts, as the converter changes them."""
    if case.gguf in ("qwen35", "qwen35moe") and ".linear_attn." in name:
        values = _tiled(f, name, values)
    if name.endswith((".conv.conv.weight", ".conv1d.weight")):
        return {name: values[:, 0]}
    if case.gguf == "granitehybrid" and ".mamba." in name and name.endswith((".A_log", ".D")):
        return {name: (-np.exp(values.astype(np.float64)) if "A_log" in name else values)[:, None]}
    if case.gguf == "granitehybrid" and name.endswith("mamba.norm.weight"):
        return {name: values[None]}
    if case.gguf == "granitehybrid" and name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): values}
    if case.gguf not in ("qwen3next", "qwen35", "qwen35moe"):
        return None
    if name.endswith(".A_log"):
        return {name: -np.exp(values.astype(np.float64)).astype(np.float32)}
    if name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): values}
    if name.endswith(".in_proj_qkvz.weight"):
        groups, key, value = (
            f[f"linear_{size}"] for size in ("num_key_heads", "key_head_dim", "value_head_dim")
        )
        each = f["linear_num_value_heads"] // groups * value
        cut = np.split(values.reshape(groups, -1, values.shape[1]), [key, 2 * key, 2 * key + each], axis=1)
        q, k, v, z = (part.reshape(-1, values.shape[1]) for part in cut)
        stem = name.removesuffix("qkvz.weight")
        return {f"{stem}qkv.weight": np.concatenate([q, k, v]), f"{stem}z.weight": z}
    if ".mlp.experts." in name:
        stem = name.rpartition(".")[0]
        if name.endswith("down_proj"):
            return {f"{stem}.down_proj.weight": values}
        gate, up = np.split(values, 2, axis=1)
        return {f"{stem}.gate_proj.weight": gate, f"{stem}.up_proj.weight": up}
    return {name: values} if ".linear_attn." in name else None


def _tiled(f: Mapping[str, Any], name: str, values: np.ndarray) -> np.ndarray:
    """Value heads as llama.cpp orders them: the first of every key head, then the second ones."""
    groups, heads = f["linear_num_key_heads"], f["linear_num_value_heads"]
    part = name.rpartition(".linear_attn.")[2]
    if part == "norm.weight":
        return values
    size = (
        1
        if part in ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
        else f["linear_value_head_dim"]
    )
    order = np.arange(heads * size).reshape(groups, heads // groups, size).swapaxes(0, 1).ravel()
    if part == "out_proj.weight":
        return values[:, order]
    kept = len(values) - len(order)
    return np.concatenate([values[:kept], values[kept:][order]])


def _gpt_oss_experts(name: str, values: np.ndarray) -> Arrays:
    suffix = ".bias" if name.endswith("_bias") else ".weight"
    stem = name.removesuffix("_bias")
    if suffix == ".weight":
        values = values.swapaxes(1, 2)
    if "down_proj" in stem:
        return {f"{stem}{suffix}": values}
    gate_up = stem.removesuffix("gate_up_proj")
    return {f"{gate_up}gate_proj{suffix}": values[:, ::2], f"{gate_up}up_proj{suffix}": values[:, 1::2]}

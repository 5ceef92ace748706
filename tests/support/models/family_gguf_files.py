"""The models of `family_models` as GGUF files, from the same raw bits.

Metadata and values that belong to RoPE are those that llama.cpp's converter was recorded to write
(tests/data/reference/converted.json), tensor names the gguf package's; what the converter does to values
(interleaving, splitting, adding one) is written here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import tiny_models
from tests.support.models.family_cases import FAMILY_CASES, SHAPE, FamilyCase
from tests.support.models.family_models import Arrays, family_weights
from tests.support.models.reference_models import FIXTURES

GEMMAS = ("gemma3n_text", "gemma4_text")
FALCON, NEMOTRON, KIMI = "falcon_h1", "nemotron_h", "kimi_linear"
NEXTN = {
    "eh_proj": "eh_proj.weight",
    "enorm": "enorm.weight",
    "hnorm": "hnorm.weight",
    "shared_head": "shared_head_norm.weight",
}


def write_family_gguf(
    path: Path, name: str, head: Arrays | None = None, changes: Mapping[str, Any] | None = None
) -> Path:
    """The same model as llama.cpp's converter would write it, in float32. head: tensors of a layer more.
    changes: of its metadata; None: left out."""
    import gguf

    case, f = FAMILY_CASES[name], FAMILY_CASES[name].fields
    n_layers, writer = f["num_hidden_layers"], tiny_models.GgufWriter()
    recorded = json.loads((FIXTURES / "converted.json").read_text())[name]
    stated = _changed(case, f, has_head=head is not None)
    for key, value in {**recorded["metadata"], **stated, **(changes or {})}.items():
        if value is not None:
            writer.add(key, value)
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == case.gguf)
    names = gguf.get_tensor_name_map(arch, n_layers + (head is not None))
    for tensor, values in _converted(case, f, family_weights(name) | (head or {})).items():
        theirs = names.get_name(tensor, try_suffixes=(".weight", ".bias", ".scale"))
        if theirs is None and head is not None and tensor in head:
            theirs = f"blk.{n_layers}.nextn.{NEXTN[tensor.rpartition('.layers.')[2].split('.')[1]]}"
        assert theirs is not None, tensor
        writer.add_tensor(theirs, values.astype(np.float32), "F32")
    if f.get("num_nextn_predict_layers") and head is None:
        writer.add_tensor(f"blk.{n_layers}.nextn.eh_proj.weight", np.ones((64, 128), np.float32), "F32")
    for tensor, numbers in recorded["values"].items():
        writer.add_tensor(tensor, np.array(numbers, np.float32), "F32")
    path.write_bytes(writer.to_bytes())
    return path


def _changed(case: FamilyCase, f: Mapping[str, Any], *, has_head: bool) -> dict[str, Any]:
    """Metadata of the case that the recorded file has otherwise: it was converted from a published config."""
    stated: dict[str, Any] = {"context_length": f["max_position_embeddings"]}
    if f.get("sliding_window"):
        stated["attention.sliding_window"] = f["sliding_window"]
    if case.gguf == "granitehybrid":
        stated["rope.scaling.finetuned"] = f.get("position_embedding_type") == "rope"
    if case.whole_kv_b:  # keys and values by head are one tensor, as in older files
        keys = f["qk_nope_head_dim"] + f["qk_rope_head_dim"]
        stated |= {"attention.key_length": keys, "attention.value_length": f["v_head_dim"]}
        stated |= {"attention.key_length_mla": None, "attention.value_length_mla": None}
        stated["attention.head_count_kv"] = f["num_attention_heads"]
    if has_head:
        stated |= {"block_count": f["num_hidden_layers"] + 1, "nextn_predict_layers": 1}
    return {f"{case.gguf}.{key}": value for key, value in stated.items()} | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": [*tiny_models.vocabulary(SHAPE)[:-1], "ab"],
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 256 + [5] * (SHAPE.vocab_size - 260) + [1],
        "tokenizer.ggml.merges": ["a b"],  # the gguf package takes no empty list
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


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
        changed = _hybrid_tensors(case.model_type, f, name, values)
        if changed is None:
            changed = _state_tensors(case, f, name, values)
        if ".act_fn." in name:
            continue  # in the recorded metadata
        if changed is not None:
            out |= changed
        elif case.model_type in GEMMAS:
            theirs, is_stacked = _gguf_place(name)
            if is_stacked:
                stacks.setdefault(theirs, []).append(values)
            else:
                out[theirs] = values
        elif name.endswith(".e_score_correction_bias"):
            out[f"{name.removesuffix('_bias')}.bias"] = values
        elif (latent := _latent_tensors(f, name, values, not case.whole_kv_b)) is not None:
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


def _hybrid_tensors(kind: str, f: Mapping[str, Any], name: str, values: np.ndarray) -> Arrays | None:
    """A tensor as the converter writes it; None where it stays as it is, or is one of a stack."""
    if kind == KIMI and name.endswith("_conv1d.weight"):
        return {name: values[None]}
    if kind == KIMI and name.endswith(".A_log"):
        return {name: -np.exp(values.astype(np.float64))}
    if kind == KIMI and name.endswith(".dt_bias"):
        return {name.replace(".dt_bias", ".dt_proj.bias"): values}
    if kind not in (FALCON, NEMOTRON):
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


def _multipliers(f: Mapping[str, Any], name: str) -> Any:
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
    inner, keys, heads = f["mamba_d_ssm"], f["mamba_n_groups"] * f["mamba_d_state"], f["mamba_n_heads"]
    of_rows = np.repeat(f["ssm_multipliers"], (inner, inner, keys, keys, heads))
    return f["ssm_in_multiplier"] * of_rows[:, None]


def _latent_tensors(f: Mapping[str, Any], name: str, values: np.ndarray, split: bool) -> Arrays | None:
    """A tensor as the converter writes it; None where it stays as it is."""
    if not name.endswith(".kv_b_proj.weight") or not split:
        return None
    by_head = values.reshape(f["num_attention_heads"], -1, f["kv_lora_rank"])
    keys, own = np.split(by_head, [f["qk_nope_head_dim"]], axis=1)
    return {name.replace("kv_b", "k_b"): keys.swapaxes(1, 2), name.replace("kv_b", "v_b"): own}


_GGUF_STEMS = {
    "router.scale": "router.proj.scale",
    "router.per_expert_scale": "experts.down_proj.scale",
    "experts.gate_up_proj": "experts.gate_up_proj.weight",
    "experts.down_proj": "experts.down_proj.weight",
    "altup.correct_output_scale": "altup.correct_output_scale.weight",
    "layer_scalar": "layer_scalar.weight",
}


def _gguf_place(name: str) -> tuple[str, bool]:
    """The name by which the gguf package knows a tensor, and True where several of that name are a stack."""
    for theirs, known_as in _GGUF_STEMS.items():
        if name.endswith(f".{theirs}"):
            return name.removesuffix(theirs) + known_as, False
    stacked = re.sub(r"(\.altup_(?:unembed_)?projections)\.\d", r"\1", name)
    return stacked, stacked != name

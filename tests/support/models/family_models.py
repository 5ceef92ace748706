"""A tiny random model of every family in `family_cases`, as a Hugging Face directory.

Tensors have the names of published checkpoints. The same raw bits as a GGUF file: `family_gguf_files`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import gemma_models, hybrid_models, latent_models, tiny_models
from tests.support.models.family_cases import ALL_CASES, FULL, LONG_CASES, N_LONG_PROMPT, SHAPE, FamilyCase
from tests.support.models.reference_models import FIXTURES, raw_values

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
Arrays = dict[str, np.ndarray]


def write_long_hf(folder: Path, name: str) -> Path:
    """A Hugging Face directory of one of LONG_CASES."""
    changes = {"max_position_embeddings": 16384, **LONG_CASES[name]}
    return write_family_hf(folder, name, changes)


def long_prompt(name: str) -> list[int]:
    """Token ids of the prompt of one of LONG_CASES."""
    drawn = np.random.PCG64(list(LONG_CASES).index(name)).random_raw(N_LONG_PROMPT)
    return (drawn % np.uint64(SHAPE.vocab_size)).astype(int).tolist()


def family_weights(name: str) -> Arrays:
    """Every tensor in float32 by the name that published checkpoints give it."""
    shapes = _recorded_shapes(name) or _shapes(ALL_CASES[name])
    values = {tensor: raw_values(f"{name}/{tensor}", shape) for tensor, shape in shapes.items()}
    if ALL_CASES[name].fields["tie_word_embeddings"]:  # else every token would predict itself
        values["model.embed_tokens.weight"] *= np.float32(0.05)
    if ALL_CASES[name].logit_size != 1:
        values[_last_norm(ALL_CASES[name])] *= np.float32(ALL_CASES[name].logit_size)
    if ALL_CASES[name].unit_norms:
        values |= {
            tensor: value - 1
            for tensor, value in values.items()
            if "norm" in tensor and "linear_attn" not in tensor
        }
    return values


def _recorded_shapes(name: str) -> dict[str, tuple[int, ...]]:
    """Those that transformers gave the tensors of a family; of experts the first one's stand for all."""
    recorded = json.loads((FIXTURES / "family_shapes.json").read_text()).get(name, {})
    fields = ALL_CASES[name].fields
    count = next((fields[key] for key in EXPERT_COUNTS if key in fields), 1)
    return {
        tensor.replace(".experts.0.", f".experts.{expert}."): tuple(shape)
        for tensor, shape in recorded.items()
        for expert in range(count if ".experts.0." in tensor else 1)
    }


def _last_norm(case: FamilyCase) -> str:
    return "model.embedding_norm.weight" if case.model_type.startswith("lfm2") else "model.norm.weight"


def _shapes(case: FamilyCase) -> dict[str, tuple[int, ...]]:
    f = case.fields
    if case.model_type in hybrid_models.HYBRIDS:
        return hybrid_models.hybrid_shapes(case.model_type, f)
    hidden, n_heads, kv = f["hidden_size"], f["num_attention_heads"], f["num_key_value_heads"]
    head_dim = f.get("head_dim", hidden // n_heads)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (f["vocab_size"], hidden)}
    for i in range(f["num_hidden_layers"]):
        if "kv_lora_rank" in f:
            of_layer = latent_models.latent_layer_shapes(case.model_type, f, i)
            shapes |= {f"model.layers.{i}.{tensor}": shape for tensor, shape in of_layer.items()}
            continue
        if case.model_type in (gemma_models.GEMMA3N, gemma_models.GEMMA4):
            of_layer = gemma_models.layer_shapes(f, i)
            shapes |= {f"model.layers.{i}.{tensor}": shape for tensor, shape in of_layer.items()}
            continue
        layer = _attention_shapes(
            case.model_type, hidden, n_heads * head_dim, kv * head_dim, head_dim, n_heads
        )
        layer |= _bias_shapes(case.model_type, f, n_heads * head_dim, kv * head_dim)
        if f.get("layer_types", [FULL] * (i + 1))[i] not in (FULL, "sliding_attention"):
            layer = {name: shape for name, shape in layer.items() if not name.startswith("self_attn")}
            layer |= _state_shapes(case.model_type, f)
        dense = i < f.get("first_k_dense_replace", 0)
        layer |= _feed_forward_shapes("dense" if dense else case.model_type, f)
        shapes |= {f"model.layers.{i}.{tensor}": shape for tensor, shape in layer.items()}
    shapes[_last_norm(case)] = (hidden,)
    if case.model_type in (gemma_models.GEMMA3N, gemma_models.GEMMA4):
        shapes |= gemma_models.outer_shapes(f)
    if case.model_type == "starcoder2":
        shapes["model.norm.bias"] = (hidden,)
    if not f["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (f["vocab_size"], hidden)
    return shapes


def _bias_shapes(kind: str, f: Mapping[str, Any], q: int, kv: int) -> dict[str, tuple[int, ...]]:
    hidden, shapes = f["hidden_size"], {}
    if f.get("use_qk_norm"):
        shapes |= {f"self_attn.{name}_norm.weight": (f["head_dim"],) for name in "qk"}
    is_biased = f.get("attention_bias") and kind in ("glm4", "glm4_moe", "cohere2")
    if f.get("use_bias") or is_biased or kind == "qwen2":
        shapes |= {f"self_attn.{part}_proj.bias": (n,) for part, n in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {} if "glm4" in kind or kind == "qwen2" else {"self_attn.o_proj.bias": (hidden,)}
    if kind == "starcoder2":
        norms = ("input_layernorm", "post_attention_layernorm")
        shapes |= {f"{norm}.bias": (hidden,) for norm in norms}
    return shapes


def _attention_shapes(
    kind: str, hidden: int, q: int, kv: int, head_dim: int, n_heads: int
) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"self_attn.o_proj.weight": (hidden, q)}
    if kind == "lfm2":
        shapes = {"self_attn.out_proj.weight": (hidden, q)}
        shapes |= {f"self_attn.{name}_layernorm.weight": (head_dim,) for name in "qk"}
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    if kind == "phi3":
        shapes["self_attn.qkv_proj.weight"] = (q + 2 * kv, hidden)
    else:
        shapes |= {
            f"self_attn.{name}_proj.weight": (n, hidden) for name, n in (("q", q), ("k", kv), ("v", kv))
        }
    if kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):  # each head's queries, then its gate
        shapes["self_attn.q_proj.weight"] = (2 * q, hidden)
    if kind in ("gemma3_text", "qwen3", "qwen3_moe"):
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    if kind in ("olmo2", "olmoe", "minimax_m2"):
        shapes |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
    if kind == "gpt_oss":
        sizes = (("q", q), ("k", kv), ("v", kv), ("o", hidden))
        shapes |= {f"self_attn.{name}_proj.bias": (n,) for name, n in sizes}
        shapes["self_attn.sinks"] = (n_heads,)
    if kind == "lfm2":
        return shapes | {"operator_norm.weight": (hidden,), "ffn_norm.weight": (hidden,)}
    norms = ["post_attention_layernorm"] + (["input_layernorm"] if kind != "olmo2" else [])
    if kind in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    if kind == "olmo2":
        norms += ["post_feedforward_layernorm"]
    if kind == "glm4":
        norms += ["post_self_attn_layernorm", "post_mlp_layernorm"]
    if kind == "cohere2":
        norms = ["input_layernorm"]
    return shapes | {f"{name}.weight": (hidden,) for name in norms}


def _state_shapes(kind: str, f: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden = f["hidden_size"]
    if kind == "lfm2":
        return {
            "conv.in_proj.weight": (3 * hidden, hidden),
            "conv.conv.weight": (hidden, 1, f["conv_L_cache"]),
            "conv.out_proj.weight": (hidden, hidden),
        }
    if kind == "granitemoehybrid":
        inner, heads = f["mamba_expand"] * hidden, f["mamba_n_heads"]
        channels = inner + 2 * f["mamba_n_groups"] * f["mamba_d_state"]
        shapes = {
            "in_proj.weight": (inner + channels + heads, hidden),
            "conv1d.weight": (channels, 1, f["mamba_d_conv"]),
            "conv1d.bias": (channels,),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        }
        shapes |= dict.fromkeys(("A_log", "dt_bias", "D"), (heads,))
        return {f"mamba.{name}": shape for name, shape in shapes.items()}
    heads, keys = f["linear_num_value_heads"], f["linear_num_key_heads"] * f["linear_key_head_dim"]
    values = heads * f["linear_value_head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "conv1d.weight": (2 * keys + values, 1, f["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (f["linear_value_head_dim"],),
        "out_proj.weight": (hidden, values),
    }
    if kind == "qwen3_next":
        rows = {"qkvz": 2 * keys + 2 * values, "ba": 2 * heads}
    else:
        rows = {"qkv": 2 * keys + values, "z": values, "b": heads, "a": heads}
    shapes |= {f"in_proj_{part}.weight": (n, hidden) for part, n in rows.items()}
    return {f"linear_attn.{name}": shape for name, shape in shapes.items()}


def _feed_forward_shapes(kind: str, f: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn = f["hidden_size"], f.get("moe_intermediate_size", f["intermediate_size"])
    if kind == "dense":
        ffn = f["intermediate_size"]
    n = f.get("num_experts", f.get("num_local_experts", f.get("n_routed_experts", 0)))
    if kind == "lfm2":
        of_one = {"w1": (ffn, hidden), "w3": (ffn, hidden), "w2": (hidden, ffn)}
        return {f"feed_forward.{name}.weight": shape for name, shape in of_one.items()}
    if kind in ("phi3", "glm4"):
        return {"mlp.gate_up_proj.weight": (2 * ffn, hidden), "mlp.down_proj.weight": (hidden, ffn)}
    if kind == "starcoder2":
        return {
            "mlp.c_fc.weight": (ffn, hidden),
            "mlp.c_fc.bias": (ffn,),
            "mlp.c_proj.weight": (hidden, ffn),
            "mlp.c_proj.bias": (hidden,),
        }
    if kind == "granitemoehybrid" and n == 0:
        shared = f["shared_intermediate_size"]
        return {
            "shared_mlp.input_linear.weight": (2 * shared, hidden),
            "shared_mlp.output_linear.weight": (hidden, shared),
        }
    if kind in ("granitemoe", "granitemoeshared", "granitemoehybrid"):
        shapes = {
            "block_sparse_moe.router.layer.weight": (n, hidden),
            "block_sparse_moe.input_linear.weight": (n, 2 * ffn, hidden),
            "block_sparse_moe.output_linear.weight": (n, hidden, ffn),
        }
        if shared := f.get("shared_intermediate_size"):
            shapes["shared_mlp.input_linear.weight"] = (2 * shared, hidden)
            shapes["shared_mlp.output_linear.weight"] = (hidden, shared)
        return shapes
    if kind == "gpt_oss":
        return {
            "mlp.router.weight": (n, hidden),
            "mlp.router.bias": (n,),
            "mlp.experts.gate_up_proj": (n, hidden, 2 * ffn),
            "mlp.experts.gate_up_proj_bias": (n, 2 * ffn),
            "mlp.experts.down_proj": (n, ffn, hidden),
            "mlp.experts.down_proj_bias": (n, hidden),
        }
    if kind in ("mixtral", "minimax_m2"):
        of_one = {"w1": (ffn, hidden), "w3": (ffn, hidden), "w2": (hidden, ffn)}
        bias = {"block_sparse_moe.e_score_correction_bias": (n,)} if kind == "minimax_m2" else {}
        return {"block_sparse_moe.gate.weight": (n, hidden), **bias} | {
            f"block_sparse_moe.experts.{e}.{name}.weight": shape
            for e in range(n)
            for name, shape in of_one.items()
        }
    names = {"gate_proj": (ffn, hidden), "up_proj": (ffn, hidden), "down_proj": (hidden, ffn)}
    if kind == "arcee":
        del names["gate_proj"]
    if kind in ("qwen3_moe", "olmoe"):
        of_all = {f"mlp.experts.{e}.{name}.weight": shape for e in range(n) for name, shape in names.items()}
        return {"mlp.gate.weight": (n, hidden), **of_all}
    if kind == "glm4_moe":
        shared = f["n_shared_experts"] * ffn
        of_all = {f"mlp.experts.{e}.{name}.weight": shape for e in range(n) for name, shape in names.items()}
        of_shared = _feed_forward_shapes("dense", {**f, "intermediate_size": shared})
        return {
            "mlp.gate.weight": (n, hidden),
            "mlp.gate.e_score_correction_bias": (n,),
            **of_all,
            **{name.replace("mlp.", "mlp.shared_experts."): shape for name, shape in of_shared.items()},
        }
    if kind in ("qwen3_next", "qwen3_5_moe_text"):
        shared = f["shared_expert_intermediate_size"]
        return {
            "mlp.gate.weight": (n, hidden),
            "mlp.experts.gate_up_proj": (n, 2 * ffn, hidden),
            "mlp.experts.down_proj": (n, hidden, ffn),
            "mlp.shared_expert.gate_proj.weight": (shared, hidden),
            "mlp.shared_expert.up_proj.weight": (shared, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared),
            "mlp.shared_expert_gate.weight": (1, hidden),
        }
    return {f"mlp.{name}.weight": shape for name, shape in names.items()}


def family_prompts(name: str) -> list[list[int]]:
    """Token ids of a model's prompts."""
    case = ALL_CASES[name]
    return [
        (np.random.PCG64(seed).random_raw(length) % np.uint64(SHAPE.vocab_size)).astype(int).tolist()
        for length, seed in zip(case.prompt_lengths, case.prompt_seeds or case.prompt_lengths, strict=True)
    ]


def write_family_hf(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> Path:
    """A Hugging Face directory in float32; `changes` replace fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**ALL_CASES[name].fields, **(changes or {})}
    if "vision_config" in fields:
        outer = {
            key: fields.pop(key) for key in ("model_type", "architectures", "vision_config") if key in fields
        }
        fields = {**outer, "text_config": {**fields, "model_type": f"{outer['model_type']}_text"}}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text(tiny_models.tokenizer_json(SHAPE))
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(tiny_models.safetensors_bytes(family_weights(name)))
    return folder


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of MXFP4's codes (OCP Microscaling Formats 1.0, section 5.3.3)."""


def write_mxfp4_hf(folder: Path) -> Arrays:
    """A gpt-oss whose experts are in MXFP4, as published; what they mean, by "layer.part"."""
    from safetensors.numpy import save_file

    write_family_hf(folder, "gpt-oss", {"hidden_size": 64, "intermediate_size": 64})
    rng = np.random.default_rng(5)
    n_experts, shapes = 8, {"gate_up_proj": (128, 64), "down_proj": (64, 64)}
    weights, drawn = family_weights("gpt-oss"), {}
    for layer in range(4):
        stem = f"model.layers.{layer}.mlp.experts."
        for part, (n, k) in shapes.items():
            del weights[f"{stem}{part}"]
            codes = rng.integers(0, 16, (n_experts, n, k), dtype=np.uint8)
            exponents = rng.integers(120, 126, (n_experts, n, k // 32), dtype=np.uint8)
            weights[f"{stem}{part}_bias"] = rng.standard_normal((n_experts, n)).astype(np.float32)
            weights[f"{stem}{part}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).reshape(
                n_experts, n, k // 32, 16
            )
            weights[f"{stem}{part}_scales"] = exponents
            drawn[f"{layer}.{part}"] = E2M1[codes] * np.repeat(2.0 ** (exponents - 127.0), 32, axis=2)
    save_file(weights, folder / "model.safetensors")
    return drawn

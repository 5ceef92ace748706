"""A tiny random model of every family, as a Hugging Face directory and as a GGUF file, from the same raw
bits.

Tensors have the names of published checkpoints. The GGUF side takes its tensor names and metadata keys from
the gguf package; what llama.cpp's converter does to values beside that (interleaving, splitting, adding one)
is written here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models import gemma_models, hybrid_models, latent_models, tiny_models
from tests.support.models.reference_models import raw_values
from tests.support.models.tiny_models import TinyShape

Arrays = dict[str, np.ndarray]

N_GREEDY = 64
FULL = "full_attention"
CHECKED_STEPS = (0, 1, 31, 63)
SHAPE = TinyShape()

_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": SHAPE.vocab_size,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class FamilyCase:
    """`config`: config.json beyond the common fields; `gguf`: the architecture's name there. Of prompts
    longer than `context_length` there is no reference: LongRoPE has its short factors up to there."""

    model_type: str
    gguf: str
    config: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False
    unit_norms: bool = False
    whole_kv_b: bool = False
    prompt_lengths: tuple[int, ...] = (9, 90)
    context_length: int = 256
    prompt_seeds: tuple[int, ...] = ()
    """Of the prompts: such that no two logits of the reference are close at the top. None: the lengths."""
    logit_size: float = 1.0
    """The factor of the last norm's weights: logits of tied embeddings would be small, and close."""

    @property
    def fields(self) -> dict[str, Any]:
        return {**_COMMON, "model_type": self.model_type, **self.config}


_GEMMA = {
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "sliding_window": 24,
}
_FACTORS = {
    "short_factor": [1.0, 1.02, 1.05, 1.1, 1.2, 1.4, 1.7, 2.0],
    "long_factor": [1.0, 1.1, 1.3, 1.8, 2.5, 3.5, 5.0, 8.0],
}
_EXPERTS = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}
_DELTA = {
    "num_hidden_layers": 5, "head_dim": 32, "rope_theta": 1e6, "partial_rotary_factor": 0.25,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention",
                    "linear_attention"],
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 24,
    "linear_value_head_dim": 20, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}

_MAMBA = {
    "num_hidden_layers": 4, "layer_types": ["mamba", "full_attention", "mamba", "mamba"],
    "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 20, "mamba_d_conv": 4,
    "mamba_expand": 2, "mamba_conv_bias": True, "mamba_proj_bias": False, "mamba_chunk_size": 16,
}  # fmt: skip

FAMILY_CASES: dict[str, FamilyCase] = {
    "gemma2": FamilyCase(
        "gemma2",
        "gemma2",
        {**_GEMMA, "num_hidden_layers": 4, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0,
         "query_pre_attn_scalar": 16},
        unit_norms=True,
        prompt_seeds=(1114, 1073),
    ),
    "gemma3": FamilyCase(
        "gemma3_text",
        "gemma3",
        {**_GEMMA, "num_hidden_layers": 7, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
         "rope_scaling": {"rope_type": "linear", "factor": 8.0}, "query_pre_attn_scalar": 16},
        unit_norms=True,
        prompt_seeds=(1153, 1096),
    ),
    "gemma3n": FamilyCase(
        "gemma3n_text", "", gemma_models.STREAMS, prompt_seeds=(1001, 1001), logit_size=6.0
    ),
    "gemma3n-whole": FamilyCase(
        "gemma3n_text", "gemma3n", gemma_models.WHOLE_TABLE, prompt_seeds=(1001, 1000), logit_size=6.0
    ),
    "gemma4": FamilyCase(
        "gemma4_text", "gemma4", gemma_models.SHARED, prompt_seeds=(1043, 1013), logit_size=6.0
    ),
    "gemma4-dense": FamilyCase(
        "gemma4_text", "gemma4", gemma_models.DENSE, prompt_seeds=(1003, 1003), logit_size=6.0
    ),
    "gemma4-moe": FamilyCase(
        "gemma4_text", "gemma4", gemma_models.MIXTURE, prompt_seeds=(1002, 1003), logit_size=6.0
    ),
    "phi3": FamilyCase(
        "phi3", "phi3", {"partial_rotary_factor": 0.75, "sliding_window": 40},
        prompt_seeds=(1007, 90),
    ),
    "phi3-longrope": FamilyCase(
        "phi3",
        "phi3",
        {"original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope", **_FACTORS}},
        prompt_lengths=(40, 90),
        prompt_seeds=(1000, 1010),
    ),
    "phi3-shortrope": FamilyCase(
        "phi3",
        "phi3",
        {"original_max_position_embeddings": 160, "rope_scaling": {"type": "longrope", **_FACTORS}},
        context_length=160,
    ),
    "olmo2": FamilyCase("olmo2", "olmo2", prompt_seeds=(1000, 1006)),
    "granite": FamilyCase("granite", "granite", _GRANITE, interleaved=True, prompt_seeds=(1769, 1044)),
    "smollm3": FamilyCase(
        "smollm3", "smollm3", {"num_hidden_layers": 4, "rope_theta": 5e6, "tie_word_embeddings": True},
        interleaved=True,
        prompt_seeds=(1421, 2023), logit_size=6.0,
    ),
    "llama-yarn": FamilyCase(
        "llama",
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        interleaved=True,
        prompt_seeds=(1001, 1001),
    ),
    "qwen3-yarn": FamilyCase(
        "qwen3",
        "qwen3",
        {"head_dim": 32, "rope_theta": 1e6,
         "rope_scaling": {"rope_type": "yarn", "factor": 2.5, "original_max_position_embeddings": 100}},
        prompt_seeds=(1006, 1001),
    ),
    "mixtral": FamilyCase(
        "mixtral", "llama", {**_EXPERTS, "sliding_window": None, "rope_theta": 1e6}, interleaved=True,
        prompt_seeds=(1005, 1000),
    ),
    "qwen3moe": FamilyCase(
        "qwen3_moe",
        "qwen3moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16,
         "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        prompt_seeds=(1002, 90),
    ),
    "olmoe": FamilyCase(
        "olmoe", "olmoe",
        {"num_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 32, "num_key_value_heads": 4},
    ),
    "granitemoe": FamilyCase(
        "granitemoe", "granitemoe", {**_GRANITE, **_EXPERTS}, interleaved=True,
        prompt_seeds=(1632, 1695),
    ),
    "granitemoe-shared": FamilyCase(
        "granitemoeshared", "granitemoe", {**_GRANITE, **_EXPERTS, "shared_intermediate_size": 80},
        interleaved=True,
        prompt_seeds=(1130, 1046),
    ),
    "lfm2": FamilyCase(
        "lfm2",
        "lfm2",
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "conv"], "conv_L_cache": 3,
         "norm_eps": 1e-5, "block_auto_adjust_ff_dim": False, "rope_theta": 1e6, "tie_word_embeddings": True},
        prompt_seeds=(1071, 1582), logit_size=6.0,
    ),
    "qwen3next": FamilyCase(
        "qwen3_next",
        "qwen3next",
        {**_DELTA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1,
         "mlp_only_layers": []},
        unit_norms=True,
        prompt_seeds=(1000, 1002),
    ),
    "granitehybrid": FamilyCase(
        "granitemoehybrid",
        "granitehybrid",
        {**_GRANITE, **_EXPERTS, **_MAMBA, "shared_intermediate_size": 80},
        interleaved=True,
        prompt_seeds=(1022, 1097),
    ),
    "granitehybrid-dense": FamilyCase(
        "granitemoehybrid",
        "granitehybrid",
        {**_GRANITE, **_MAMBA, "num_local_experts": 0, "shared_intermediate_size": 96,
         "position_embedding_type": "rope"},
        interleaved=True,
        prompt_seeds=(1577, 1108),
    ),
    "qwen35": FamilyCase("qwen3_5_text", "qwen35", _DELTA, unit_norms=True, prompt_seeds=(9, 1000)),
    "glm4": FamilyCase(
        "glm4", "glm4",
        {"num_hidden_layers": 3, "head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True},
        prompt_seeds=(1005, 90),
    ),
    "glm4moe": FamilyCase(
        "glm4_moe", "glm4moe",
        {"num_hidden_layers": 4, "head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": True,
         "use_qk_norm": True, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "n_shared_experts": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
         "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
        prompt_seeds=(1001, 1003),
    ),
    "glm4moe-plain": FamilyCase(
        "glm4_moe", "glm4moe",
        {"num_hidden_layers": 3, "head_dim": 32, "partial_rotary_factor": 0.5, "attention_bias": False,
         "use_qk_norm": False, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
         "n_shared_experts": 2, "first_k_dense_replace": 2, "norm_topk_prob": False,
         "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1},
        prompt_seeds=(1000, 90),
    ),
    "minimax-m2": FamilyCase(
        "minimax_m2", "minimax-m2",
        {**_EXPERTS, "num_hidden_layers": 3, "head_dim": 32, "rotary_dim": 16, "rope_theta": 5e6},
        prompt_seeds=(1002, 90),
    ),
    "qwen35moe": FamilyCase(
        "qwen3_5_moe_text", "qwen35moe",
        {**_DELTA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
         "shared_expert_intermediate_size": 48},
        unit_norms=True,
        prompt_seeds=(9, 1000),
    ),
    "ministral3": FamilyCase(
        "ministral3", "mistral3",
        {"num_hidden_layers": 3, "head_dim": 32, "sliding_window": 40,
         "rope_parameters": {
             "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "original_max_position_embeddings": 32,
             "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
             "llama_4_scaling_beta": 0.4}},
        interleaved=True,
        prompt_seeds=(1004, 1001),
    ),
    "cohere2": FamilyCase(
        "cohere2", "cohere2",
        {"num_hidden_layers": 5, "sliding_window": 24, "layer_norm_eps": 1e-5, "logit_scale": 4.0,
         "tie_word_embeddings": True, "layer_types": [*["sliding_attention"] * 3, FULL, "sliding_attention"]},
        prompt_seeds=(1013, 1003),
    ),
    "cohere2-biases": FamilyCase(
        "cohere2", "",
        {"num_hidden_layers": 4, "sliding_window": 24, "layer_norm_eps": 1e-5, "logit_scale": 4.0,
         "attention_bias": True},
        prompt_seeds=(1000, 1001),
    ),
    "starcoder2": FamilyCase(
        "starcoder2", "starcoder2",
        {"num_hidden_layers": 3, "sliding_window": 40, "norm_epsilon": 1e-5, "use_bias": True,
         "hidden_act": "gelu_pytorch_tanh"},
        prompt_seeds=(1000, 1000),
    ),
    "deepseek2": FamilyCase("deepseek_v2", "deepseek2", latent_models.V2, prompt_seeds=(1000, 1000)),
    "deepseek2-groups": FamilyCase(
        "deepseek_v2", "deepseek2", latent_models.V2_GROUPS, whole_kv_b=True, prompt_seeds=(1001, 1001)
    ),
    "deepseek3": FamilyCase("deepseek_v3", "deepseek2", latent_models.V3, prompt_seeds=(1002, 90)),
    "glm4moelite": FamilyCase("glm4_moe_lite", "deepseek2", latent_models.GLM_LITE),
    "falcon-h1": FamilyCase(
        "falcon_h1", "falcon-h1", hybrid_models.FALCON_H1, prompt_seeds=(1010, 1000)
    ),
    "falcon-h1-norm": FamilyCase(
        "falcon_h1", "falcon-h1", hybrid_models.FALCON_H1_NORM, prompt_seeds=(1000, 90)
    ),
    "nemotron-h": FamilyCase(
        "nemotron_h", "nemotron_h", hybrid_models.NEMOTRON_H, prompt_seeds=(9, 1000)
    ),
    "nemotron-h-moe": FamilyCase(
        "nemotron_h", "nemotron_h_moe", hybrid_models.NEMOTRON_H_MOE, prompt_seeds=(1002, 1002)
    ),
    "nemotron-h-mixed": FamilyCase(
        "nemotron_h", "", hybrid_models.NEMOTRON_H_MIXED, prompt_seeds=(1000, 90)
    ),
    "kimi-linear": FamilyCase(
        "kimi_linear", "kimi-linear", hybrid_models.KIMI_LINEAR, prompt_seeds=(1001, 1001)
    ),
    "arcee": FamilyCase(
        "arcee", "arcee",
        {"hidden_act": "relu2",
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        interleaved=True,
        prompt_seeds=(1008, 1005),
    ),
    "gpt-oss": FamilyCase(
        "gpt_oss",
        "gpt-oss",
        {**_EXPERTS, "num_hidden_layers": 4, "head_dim": 16, "sliding_window": 24, "attention_bias": True,
         "rope_theta": 150000.0, "swiglu_limit": 7.0,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
                          "truncate": False, "original_max_position_embeddings": 64}},
        prompt_seeds=(9, 1001),
    ),
}  # fmt: skip


N_LONG_PROMPT = 8192
_LONG_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048}
LONG_CASES: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 200},
    "gemma3": {"sliding_window": 300},
    "phi3": {"sliding_window": 500},
    "llama-yarn": {"rope_scaling": _LONG_YARN},
    "qwen3-yarn": {"rope_scaling": _LONG_YARN},
    "gpt-oss": {
        "sliding_window": 128,
        "rope_scaling": {**_LONG_YARN, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    },
}
"""Families with windows and YaRN at a context beyond both: what is changed in their config.json."""


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
    shapes = _shapes(FAMILY_CASES[name])
    values = {tensor: raw_values(f"{name}/{tensor}", shape) for tensor, shape in shapes.items()}
    if FAMILY_CASES[name].fields["tie_word_embeddings"]:  # else every token would predict itself
        values["model.embed_tokens.weight"] *= np.float32(0.05)
    if FAMILY_CASES[name].logit_size != 1:
        values[_last_norm(FAMILY_CASES[name])] *= np.float32(FAMILY_CASES[name].logit_size)
    if FAMILY_CASES[name].unit_norms:
        values |= {
            tensor: value - 1
            for tensor, value in values.items()
            if "norm" in tensor and "linear_attn" not in tensor
        }
    return values


def _last_norm(case: FamilyCase) -> str:
    return "model.embedding_norm.weight" if case.model_type == "lfm2" else "model.norm.weight"


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
    if f.get("use_bias") or (f.get("attention_bias") and kind in ("glm4", "glm4_moe", "cohere2")):
        shapes |= {f"self_attn.{part}_proj.bias": (n,) for part, n in (("q", q), ("k", kv), ("v", kv))}
        shapes |= {} if "glm4" in kind else {"self_attn.o_proj.bias": (hidden,)}
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
    case = FAMILY_CASES[name]
    return [
        (np.random.PCG64(seed).random_raw(length) % np.uint64(SHAPE.vocab_size)).astype(int).tolist()
        for length, seed in zip(case.prompt_lengths, case.prompt_seeds or case.prompt_lengths, strict=True)
    ]


def write_family_hf(folder: Path, name: str, changes: Mapping[str, Any] | None = None) -> Path:
    """A Hugging Face directory in float32; `changes` replace fields of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**FAMILY_CASES[name].fields, **(changes or {})}
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


# ---- GGUF
# ------------------------------------------------------------------------------------------------------------


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
    if case.model_type in ("qwen3_moe", "gpt_oss", "qwen3_next", "qwen3_5_moe_text"):
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
    if name.endswith("shared_expert_gate.weight"):
        return {name: values[0]}
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

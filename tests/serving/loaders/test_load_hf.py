"""A safetensors directory loads as the model that was written; a hostile one is one clear error."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from phasewise.cython_kernels.packing import from_bf16, to_bf16, unpack
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.formats.hf_config import config_of
from phasewise.serving.loaders.formats.model_directory import read_entries, tensor_of
from phasewise.serving.loaders.source import SourceFile
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.rope import LinearScaling, Llama3Scaling, RopeSpec
from tests.support.models.tiny_models import (
    TinyShape,
    hf_config,
    safetensors_bytes,
    tiny_weights,
    tokenizer_json,
    write_tiny_hf,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def config(architecture: str = "llama", **changes: Any) -> ModelConfig:
    fields = {**hf_config(architecture), **changes}
    return config_of({key: value for key, value in fields.items() if value != "absent"}, {}, add_bos=False)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_architecture_loads_sharded_or_not(tmp_path: Path, architecture: str, shards: int) -> None:
    shape = TinyShape(tied=False)
    directory = write_tiny_hf(tmp_path / "tiny", architecture, shards=shards, shape=shape)

    model = load_model(str(directory), "native", tmp_path)

    weights = tiny_weights(architecture, shape)
    assert model.config.architecture == architecture
    assert np.array_equal(unpack(model.weights["lm_head"]), weights["lm_head.weight"])
    gate_up = [weights[f"model.layers.1.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert np.array_equal(unpack(model.weights["layers.1.gate_up"]), np.concatenate(gate_up))
    assert ("layers.0.qkv_bias" in model.vectors) == (architecture == "qwen2")
    assert ("layers.0.q_norm" in model.vectors) == (architecture == "qwen3")
    assert model.tokenizer_json == tokenizer_json(shape)
    assert model.config.eos_token_ids == (2, 0)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16")])
def test_native_keeps_every_number(tmp_path: Path, dtype: str, kind: str) -> None:
    directory = write_tiny_hf(tmp_path / "tiny", dtype=dtype)

    weight = load_model(str(directory), "native", tmp_path).weights["embed"]

    plain = tiny_weights("llama")["model.embed_tokens.weight"]
    rounded = from_bf16(to_bf16(plain)) if dtype == "bfloat16" else plain.astype(dtype).astype(np.float32)
    assert weight.kind == kind
    assert np.array_equal(unpack(weight), rounded)


def test_tensors_equal_the_safetensors_packages(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    path.write_bytes(safetensors_bytes(tiny_weights("qwen2"), "float16"))

    with SourceFile(path) as file:
        got = {name: tensor_of(file, name, entry) for name, entry in read_entries(file).items()}
        values = {
            name: tensor.rows(0, 1 if len(tensor.shape) == 1 else tensor.shape[0])
            for name, tensor in got.items()
        }

    expected = load_file(path)
    assert values.keys() == expected.keys()
    assert all(
        np.array_equal(values[name].reshape(expected[name].shape), expected[name]) for name in expected
    )


def test_a_head_in_the_file_is_used_where_the_config_says_tied_and_it_is_another(tmp_path: Path) -> None:
    directory = write_tiny_hf(
        tmp_path / "tiny", shape=TinyShape(tied=False), config={"tie_word_embeddings": True}
    )

    model = load_model(str(directory), "native", tmp_path)

    assert "lm_head" in model.weights


def test_chat_template_file_wins_over_the_tokenizers(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "tiny")
    (directory / "chat_template.jinja").write_text("{{ messages }}")

    assert load_model(str(directory), "native", tmp_path).chat_template == "{{ messages }}"


def test_named_chat_templates_give_the_default(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "tiny")
    named = [{"name": "tool_use", "template": "a"}, {"name": "default", "template": "b"}]
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))

    assert load_model(str(directory), "native", tmp_path).chat_template == "b"


def test_llama3_scaling_matches_its_definition() -> None:
    rope = config(rope_scaling=LLAMA3, rope_theta=500000.0, head_dim=64).rope

    assert rope.scaling == Llama3Scaling(8.0, 1.0, 4.0, 8192)
    plain = RopeSpec(500000.0, 64).inv_freq()
    wavelength = 2 * np.pi / plain
    got = rope.inv_freq()
    assert np.array_equal(got[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    assert np.allclose(got[wavelength > 8192], plain[wavelength > 8192] / 8, rtol=1e-15)
    blend = (8192 / wavelength - 1) / 3
    middle = (wavelength >= 8192 / 4) & (wavelength <= 8192)
    assert middle.any()
    assert np.allclose(got[middle], ((1 - blend) / 8 + blend)[middle] * plain[middle])


def test_rope_is_read_from_old_and_new_places() -> None:
    assert config(rope_scaling={"type": "linear", "factor": 2}).rope.scaling == LinearScaling(2.0)
    new = config(rope_theta="absent", rope_parameters={"rope_type": "default", "rope_theta": 5e5}).rope
    assert (new.theta, new.scaling) == (5e5, None)


def test_sliding_windows_of_mistral_and_qwen() -> None:
    def windows(*args: Any, **fields: Any) -> list[int | None]:
        return [form.attention and form.attention.window for form in config(*args, **fields).forms]

    assert windows("mistral", sliding_window=128) == [128, 128]
    assert windows("mistral", sliding_window=None) == [None, None]
    assert windows("mistral", sliding_window="absent") == [4096, 4096]
    assert windows("llama", sliding_window=128) == [None, None]
    assert windows("qwen2", sliding_window=128, use_sliding_window=False) == [None, None]
    used = {"sliding_window": 128, "use_sliding_window": True}
    assert windows("qwen2", **used) == [None, None]
    assert windows("qwen2", **used, max_window_layers=0) == [128, 128]
    assert windows("qwen2", **used, max_window_layers=1) == [None, 128]


GELU = {"hidden_act": "gelu_pytorch_tanh"}
NOT_JSON = "config.json is not valid JSON: NaN is no number of JSON"
GEMMA4_EXPERTS = {
    "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32,
}  # fmt: skip

HUNYUAN_MOE = {"model_type": "hunyuan_v1_moe", "num_experts": 4}
BAD_CONFIGS = {
    "a base that nothing stretches": ({"model_type": "hunyuan_v1_dense",
     "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "alpha is None"),
    "a base stretched without end": ({"model_type": "hunyuan_v1_dense",
     "rope_scaling": {"type": "dynamic", "alpha": float("inf")}}, "alpha is inf"),
    "yarn in hunyuan": ({"model_type": "hunyuan_v1_dense",
     "rope_scaling": {"type": "yarn", "factor": 2.0}}, "dynamic by alpha can run"),
    "layers that choose otherwise": ({**HUNYUAN_MOE, "moe_topk": [1, 2]}, "one number for all layers"),
    "no word on who is chosen": (HUNYUAN_MOE, "moe_topk = None"),
    "experts in every 0th layer": ({"model_type": "ernie4_5_moe", "moe_layer_interval": 0}, "interval is 0"),
    "the first ling": ({"model_type": "bailing_moe"}, "the first Ling"),
    "choices without a bias": ({"model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"],
     "use_expert_bias": False}, "use_expert_bias = False"),
    "windows without a width": ({"model_type": "olmo3", "sliding_window": 0}, "sliding window is 0"),
    "half of an exaone": ({"model_type": "exaone4", "sliding_window": 8,
     "layer_types": ["sliding_attention"]}, "for each of"),
    "chunks of no length": ({"model_type": "llama4_text", "attention_chunk_size": None,
     "layer_types": ["chunked_attention", "full_attention"]}, "chunks of no length"),
    "chunks in some layers": ({"model_type": "llama4_text", "layer_types": ["chunked_attention"]},
     "for each of"),
    "growth by a word": ({"model_type": "llama4_text", "attn_temperature_tuning": "yes"}, "true or false"),
    "growth in no positions": ({"model_type": "llama4_text", "floor_scale": 0,
     "no_rope_layer_interval": 2}, "queries grow is 0"),
    "a model of compressed positions": ({"model_type": "deepseek_v4"}, "compressed to one"),
    "no positions to choose": ({"model_type": "deepseek_v32", "index_topk": 0}, "index_topk is 0"),
    "an indexer of odd heads": ({"model_type": "deepseek_v32", "index_head_dim": 65}, "641 head dimensions"),
    "an indexer of larger heads": ({"model_type": "deepseek_v32", "index_head_dim": 130}, "is 130"),
    "an indexer of smaller heads": ({"model_type": "deepseek_v32", "index_head_dim": 4}, "turns as many"),
    "a choice that layers share by no rule": ({"model_type": "glm_moe_dsa", "index_topk_pattern": "FX"},
     "F or S for each layer"),
    "choices shared by no layers": ({"model_type": "glm_moe_dsa", "index_topk_freq": 0},
     "index_topk_freq is 0"),
    "experts in every -1st layer": ({"model_type": "llama4_text", "interleave_moe_layer_step": -1},
     "interleave_moe_layer_step is -1"),
    "another activation than xielu": ({"model_type": "apertus"}, "the activation 'silu'"),
    "a mixer of three experts": ({"model_type": "phimoe", "num_experts_per_tok": 3}, "SparseMixer of 3"),
    "a mixer of more noise": ({"model_type": "phimoe", "router_jitter_noise": 0.1}, "jitter_noise = 0.1"),
    "a longrope of two sizes": ({"model_type": "phimoe", "rope_scaling": {"type": "longrope",
     "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "short_mscale": 1.0, "long_mscale": 2.0}},
     "one number for both"),
    "a gemma that looks both ways": ({"model_type": "gemma2", "hidden_act": None,
     "use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    "a pattern with another letter": ({"model_type": "nemotron_h", "hidden_act": "relu2",
     "hybrid_override_pattern": "M?"}, "has layers"),
    "experts wider than the stream": ({"model_type": "nemotron_h", "hidden_act": "relu2",
     "layers_block_type": ["attention", "moe"], "moe_latent_size": 1 << 20}, "experts read is 1048576"),
    "layers that no token leaves": ({"model_type": "nemotron_h", "hidden_act": "relu2",
     "layers_block_type": ["mlp", "mlp"]}, "keep no keys and values"),
    "layers of which none attends": ({"model_type": "nemotron_h", "hidden_act": "relu2",
     "layers_block_type": ["mamba", "mlp"]}, "keep no keys and values"),
    "multipliers of other products": ({"model_type": "falcon_h1", "ssm_multipliers": [1.0]}, "5 numbers"),
    "a multiplier of a gate": ({"model_type": "falcon_h1", "mamba_d_ssm": 128, "mamba_n_heads": 8,
     "mlp_multipliers": [0.0, 1.0]}, "2 numbers above 0"),
    "layers of two kinds at once": ({"model_type": "kimi_linear",
     "linear_attn_config": {"full_attn_layers": [1], "kda_layers": [1, 2]}}, "in one of them"),
    "another architecture": ({"model_type": "gpt2"}, "'gpt2'"),
    "hidden zero": ({"hidden_size": 0}, "hidden is 0"),
    "hidden missing": ({"hidden_size": None}, "hidden is None"),
    "hidden true": ({"hidden_size": True}, "int expected"),
    "heads that do not divide": ({"num_key_value_heads": 3}, "do not divide"),
    "a billion layers": ({"num_hidden_layers": 10**9}, "n_layers"),
    "more layers than there are": ({"num_hidden_layers": 3}, "lacks"),
    "a convolution of one row": ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"],
     "conv_L_cache": 1}, "taps is 1"),
    "layers with states alone": ({"model_type": "lfm2", "layer_types": ["conv", "conv"]},
     "keep no keys and values"),
    "layers of another kind": ({"model_type": "qwen3_next", "layer_types": ["linear_attention",
     "sliding_attention"]}, "linear_attention or full_attention for each"),
    "value heads that do not divide": ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention",
     "full_attention"], "linear_num_value_heads": 5, "linear_num_key_heads": 2},
     "5 value heads do not divide"),
    "a state of a billion numbers": ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention",
     "full_attention"], "linear_key_head_dim": 10**9}, "key_dim is 1000000000"),
    "limits of time steps": ({"model_type": "granitemoehybrid", "time_step_limit": [0.1, 1.0]},
     "time_step_limit = "),
    "a shared expert of less than nothing": ({"model_type": "granitemoeshared",
     "shared_intermediate_size": -80}, "feed-forward layer is -80"),
    "latent vectors of odd panels": ({"model_type": "deepseek_v3", "kv_lora_rank": 40}, "multiples of 16"),
    "latent vectors beyond the kernels": ({"model_type": "deepseek_v3", "kv_lora_rank": 544},
     "latent vectors of 608 numbers; at most 576"),
    "latent values of less than nothing": ({"model_type": "deepseek_v2", "first_k_dense_replace": 2,
     "v_head_dim": -16}, "value_dim is -16"),
    "an odd number of turned numbers": ({"model_type": "glm4_moe_lite", "qk_rope_head_dim": 7},
     "RoPE over 7"),
    "pairs in halves": ({"model_type": "deepseek_v3", "rope_interleave": False},
     "rope_interleave = False, which cannot run"),
    "scores by another function": ({"model_type": "deepseek_v3", "scoring_func": "softmax"},
     "cannot run: 'sigmoid' can"),
    "experts chosen by chance": ({"model_type": "deepseek_v2", "topk_method": "dice"}, "'dice'"),
    "normalised weights that no release agrees on": ({"model_type": "deepseek_v2", "norm_topk_prob": True},
     "norm_topk_prob = True, which cannot run"),
    "groups of 256 experts that do not divide": ({"model_type": "deepseek_v3", "first_k_dense_replace": 1,
     "n_group": 7}, "256 experts do not divide into 7 groups"),
    "more groups chosen than there are": ({"model_type": "deepseek_v3", "first_k_dense_replace": 1,
     "topk_group": 9}, "groups, of 8, that are chosen is 9"),
    "experts of no width": ({"model_type": "deepseek_v3", "first_k_dense_replace": 1,
     "moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
    "experts in every zeroth layer": ({"model_type": "deepseek_v3", "moe_layer_freq": 0},
     "moe_layer_freq is 0"),
    "layers of an unknown kind": ({"model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "dusty"]},
     "dense or sparse for each"),
    "weights times infinity": ({"model_type": "deepseek_v3", "first_k_dense_replace": 1,
     "routed_scaling_factor": float("inf")}, "a number above 0 expected"),
    "a stretch of scores beyond reason": ({"model_type": "deepseek_v3", "rope_scaling": {"type": "yarn",
     "factor": 4.0, "mscale_all_dim": 1e9}}, "mscale_all_dim = 1000000000"),
    "negative heads": ({"num_attention_heads": -4, "head_dim": None}, "n_heads is -4"),
    "odd head": ({"head_dim": 15}, "head dimensions"),
    "odd rotation": ({"model_type": "phi3", "partial_rotary_factor": 0.32}, "RoPE over 5"),
    "two words on RoPE": ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
     "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
     "rope_parameters and rope_scaling, which differ"),
    "two original contexts": ({"original_max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn",
     "factor": 2.0, "original_max_position_embeddings": 32}}, "original context of 32 tokens, and one of 64"),
    "a logit scale of zero": ({"model_type": "cohere2", "logit_scale": 0.0}, "logit_scale = 0.0"),
    "a period of no layers": ({"model_type": "cohere2", "sliding_window_pattern": 0}, "every 0 layers"),
    "queries that grow without YaRN": ({"model_type": "ministral3",
     "rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "no YaRN"),
    "queries that grow at every token of millions": ({"model_type": "ministral3",
     "max_position_embeddings": 1 << 26, "rope_parameters": {"rope_type": "yarn", "factor": 2.0,
     "original_max_position_embeddings": 2, "llama_4_scaling_beta": 0.1}}, "at most 65536 times"),
    "a language model of mistral3 that is none": ({"model_type": "mistral3",
     "text_config": {"model_type": "mistral4"}}, "model_type = 'mistral4'"),
    "all of a head and more": ({"model_type": "minimax_m2", "rotary_dim": 64, "head_dim": 16},
     "RoPE over 64"),
    "another attention of minimax": ({"model_type": "minimax_m2", "attn_type_list": [1, 0]},
     "attn_type_list"),
    "half of a head of a Llama": ({"partial_rotary_factor": 0.5},
     "rotates 0.5 of each head, and llama models"),
    "rotation of infinity": ({"partial_rotary_factor": float("inf")}, "rotates inf"),
    "gelu": ({"hidden_act": "gelu"}, "gelu"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias"),
    "quantised": ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
    "yarn by nothing": ({"rope_scaling": {"type": "yarn", "factor": 0.0}}, "RoPE"),
    "yarn of a negative context": ({"rope_scaling": {"type": "yarn", "factor": 2.0,
     "original_max_position_embeddings": -1}}, "original context"),
    "yarn of a magnitude": ({"rope_scaling": {"type": "yarn", "factor": 2.0, "attention_factor": 1e9}},
     "RoPE"),
    "longrope of few factors": ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7,
     "long_factor": [1.0] * 8}}, "RoPE"),
    "longrope of a million factors": ({"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 10**5,
     "long_factor": [1.0] * 8}}, "list of numbers"),
    "gemma with a cap of nothing": ({"model_type": "gemma2", **GELU, "attn_logit_softcapping": 0.0},
     "softcapping"),
    "gemma with scores of nothing": ({"model_type": "gemma2", **GELU, "query_pre_attn_scalar": 0},
     "query_pre_attn"),
    "gemma of few layer types": ({"model_type": "gemma2", **GELU, "layer_types": ["full_attention"]},
     "layer_types"),
    "gemma 4 with experts of no width": ({"model_type": "gemma4_text", **GELU, "enable_moe_block": True,
     "num_experts": 4, "top_k_experts": 2}, "moe_intermediate_size is None"),
    "gemma 4 with no number of experts": ({"model_type": "gemma4_text", **GELU, "enable_moe_block": True,
     "moe_intermediate_size": 32}, "without num_experts"),
    "gemma 4 with more chosen than experts": ({"model_type": "gemma4_text", **GELU, **GEMMA4_EXPERTS,
     "top_k_experts": 5}, "of 4, that compute a token is 5"),
    "gemma 4 with experts beside two widths": ({"model_type": "gemma4_text", **GELU, **GEMMA4_EXPERTS,
     "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 1,
     "use_double_wide_mlp": True}, "experts that differ"),
    "gemma 4 with heads of text": ({"model_type": "gemma4_text", **GELU,
     "per_layer_config": {"1": {"head_dim": "many"}}}, "heads of 'many'"),
    "gemma 4 with skipped layers": ({"model_type": "gemma4_text", **GELU,
     "per_layer_config": {"1": {"skip": ["mlp"]}}}, "per_layer_config"),
    "gemma 4 with a layer twice": ({"model_type": "gemma4_text", **GELU, "per_layer_config": {"1": {},
     "01": {}}}, "twice"),
    "gemma 4 with yarn": ({"model_type": "gemma4_text", **GELU,
     "rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1e4}}},
     "no rope_theta for sliding|asks for RoPE"),
    "gemma 4 of shared layers alone": ({"model_type": "gemma4_text", **GELU, "num_kv_shared_layers": 2},
     "keep no keys and values"),
    "gemma 4 whose shared layers have no source": ({"model_type": "gemma4_text", **GELU,
     "num_kv_shared_layers": 1}, "none of their kind"),
    "gemma 4 with huge inputs": ({"model_type": "gemma4_text", **GELU, "hidden_size_per_layer_input": 10**6},
     "layer inputs is 1000000"),
    "gemma 3n with widths of one layer": ({"model_type": "gemma3n_text", **GELU, "intermediate_size": [96]},
     "intermediate_size"),
    "gemma 3n of one stream": ({"model_type": "gemma3n_text", **GELU, "altup_num_inputs": 1,
     "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 272}, "number of streams is 1"),
    "gemma 3n whose gates are all off": ({"model_type": "gemma3n_text", **GELU,
     "activation_sparsity_pattern": [1.0, 0.0]}, "a share from 0 to 1"),
    "no experts": ({"model_type": "mixtral", "num_local_experts": 0}, "number of experts is 0"),
    "none chosen": ({"model_type": "olmoe", "num_experts_per_tok": 0}, "of 64, that compute a token is 0"),
    "a sparse step": ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step"),
    "clipped": ({"model_type": "olmo2", "clip_qkv": 8.0}, "clip_qkv"),
    "a multiplier of nothing": ({"model_type": "granite", "residual_multiplier": 0.0}, "residual_multiplier"),
    "logits by nothing": ({"model_type": "granite", "logits_scaling": 0}, "logits_scaling"),
    "a tiny multiplier": ({"model_type": "granite", "residual_multiplier": 1e-4}, "epsilon"),
    "an interval of nothing": ({"model_type": "smollm3", "no_rope_layer_interval": 0},
     "no_rope_layer_interval"),
    "few entries of layers": ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers"),
    "another clamp": ({"model_type": "gpt_oss", "swiglu_limit": 8.0}, "cannot run: 7.0 can"),
    "llama3 without factor": ({"rope_scaling": {**LLAMA3, "factor": None}}, "without factor"),
    "llama3 without a span": ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "RoPE"),
    "linear by zero": ({"rope_scaling": {"type": "linear", "factor": 0.0}}, "RoPE"),
    "theta of zero": ({"rope_theta": 0}, "RoPE"),
    "theta beyond floats": ({"rope_theta": 10**400}, "not valid JSON: a number of 401 digits is too large"),
    "epsilon NaN": ({"rms_norm_eps": float("nan")}, NOT_JSON),
    "eos outside": ({"eos_token_id": 272}, "outside"),
    "window of nothing": ({"model_type": "mistral", "sliding_window": 0}, "sliding window"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_an_absurd_config_is_one_clear_error(tmp_path: Path, case: str) -> None:
    changes, message = BAD_CONFIGS[case]
    directory = write_tiny_hf(tmp_path / "tiny", config=changes)

    with pytest.raises(ModelError, match=message):
        load_model(str(directory), "native", tmp_path)


def hostile_index(directory: Path, name: Any) -> None:
    (directory / "model.safetensors").rename(directory / "inner.safetensors")
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"model.norm.weight": name}})
    )


@pytest.mark.parametrize(
    "name",
    [
        "../outside.safetensors",
        "/etc/passwd",
        "a/b.safetensors",
        "..",
        "",
        7,
        "x.safetensors\n",
        "a\0.safetensors",
    ],
)
def test_an_index_cannot_leave_its_directory(tmp_path: Path, name: Any) -> None:
    directory = write_tiny_hf(tmp_path / "tiny")
    hostile_index(directory, name)
    (tmp_path / "outside.safetensors").write_bytes(safetensors_bytes(tiny_weights("llama")))

    with pytest.raises(ModelError, match=r"plain .* expected"):
        load_model(str(directory), "native", tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "tiny", shards=2)
    (directory / "model-00002-of-00002.safetensors").unlink()

    with pytest.raises(ModelError, match=r"model-00002-of-00002\.safetensors cannot be opened"):
        load_model(str(directory), "native", tmp_path)


def test_a_pipe_in_place_of_a_file_does_not_hang(tmp_path: Path) -> None:
    directory = write_tiny_hf(tmp_path / "tiny")
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")

    with pytest.raises(ModelError, match="not a regular file"):
        load_model(str(directory), "native", tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("config.json", "no config.json"),
        ("tokenizer.json", "no tokenizer.json"),
        ("model.safetensors", "0 safetensors"),
    ],
)
def test_a_directory_without_its_files_says_which(tmp_path: Path, name: str, message: str) -> None:
    directory = write_tiny_hf(tmp_path / "tiny")
    (directory / name).unlink()

    with pytest.raises(ModelError, match=message):
        load_model(str(directory), "native", tmp_path)


def entry(dtype: str = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


BAD_HEADERS: dict[str, tuple[Any, str]] = {
    "a list": ([], "object expected"),
    "an entry of text": ({"x": "F32"}, "not described"),
    "an unknown type": ({"x": entry("F31")}, "unknown type"),
    "a negative size": ({"x": entry(shape=[-2, -2])}, "shape"),
    "a huge size": ({"x": entry(shape=[10**40, 1])}, "shape"),
    "a boolean size": ({"x": entry(shape=[True, 4])}, "shape"),
    "a backward range": ({"x": entry(offsets=[16, 0])}, "byte range"),
    "three offsets": ({"x": entry(offsets=[0, 8, 16])}, "byte range"),
    "too few bytes": ({"x": entry(offsets=[0, 12])}, "needs 16 bytes"),
    "beyond the end": ({"x": entry(offsets=[8, 24])}, "cut short"),
    "an overlap": ({"x": entry(), "y": entry(shape=[2], offsets=[8, 16])}, "inside"),
    "a fourth dimension": ({"model.norm.weight": entry(shape=[2, 2, 1, 1])}, "vector or matrix"),
    "integers": ({"model.norm.weight": entry("I32")}, "vector or matrix"),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_hostile_header_is_one_clear_error(tmp_path: Path, case: str) -> None:
    header, message = BAD_HEADERS[case]
    directory = write_tiny_hf(tmp_path / "tiny")
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))

    with pytest.raises(ModelError, match=message):
        load_model(str(directory), "native", tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (struct.pack("<Q", 1 << 63) + b"{}", "claims a header"),
        (struct.pack("<Q", 3) + b"{}", "claims a header"),
        (struct.pack("<Q", 2) + b"\xff\xfe", "not valid JSON"),
        (struct.pack("<Q", 200_000) + b'{"a":' * 40_000, "not valid JSON"),
        (struct.pack("<Q", 22) + b'{"a": 1, "b":2, "a": 3}'[:22], "not valid JSON"),
        (struct.pack("<Q", 15) + b'{"a":{},"a":{}}', "same key twice"),
    ],
    ids=["empty", "short", "huge", "long", "bytes", "deep", "cut", "twice"],
)
def test_bytes_that_are_no_header_are_one_clear_error(tmp_path: Path, raw: bytes, message: str) -> None:
    directory = write_tiny_hf(tmp_path / "tiny")
    (directory / "model.safetensors").write_bytes(raw)

    with pytest.raises(ModelError, match=message):
        load_model(str(directory), "native", tmp_path)

"""The tiny models of every family: the config of each, and the prompts that its reference answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.support.models import gemma_models, hybrid_models, latent_models
from tests.support.models.tiny_models import TinyShape

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

_VISION = {
    "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [8, 4, 4]},
    "vision_config": {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                      "out_hidden_size": 64, "deepstack_visual_indexes": [0, 1]},
}  # fmt: skip
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
    "qwen2moe": FamilyCase(
        "qwen2_moe", "qwen2moe",
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": False,
         "shared_expert_intermediate_size": 48, "decoder_sparse_step": 1, "mlp_only_layers": []},
        prompt_seeds=(1001, 90),
    ),
    "gemma": FamilyCase(
        "gemma", "gemma",
        {**_GEMMA, "num_key_value_heads": 1, "hidden_act": "gelu", "hidden_activation": None,
         "sliding_window": None},
        unit_norms=True,
        prompt_seeds=(1000, 90), logit_size=6.0,
    ),
    "olmo3": FamilyCase(
        "olmo3", "",
        {"num_hidden_layers": 5, "sliding_window": 24, "rope_theta": 5e5,
         "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                          "attention_factor": 1.1386294361119891, "beta_fast": 32.0, "beta_slow": 1.0}},
        prompt_seeds=(9, 1005),
    ),
    "seed-oss": FamilyCase(
        "seed_oss", "seed_oss", {"head_dim": 32, "attention_bias": True, "attention_out_bias": False},
        prompt_seeds=(9, 1000),
    ),
    "exaone4": FamilyCase(
        "exaone4", "exaone4",
        {"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 24, "rope_theta": 1e6},
        prompt_seeds=(9, 1000),
    ),
    "exaone4-full": FamilyCase(
        "exaone4", "exaone4",
        {"num_hidden_layers": 3, "sliding_window": None, "layer_types": [FULL] * 3, "rope_theta": 1e6},
        prompt_seeds=(1000, 1000),
    ),
    "ernie4.5": FamilyCase(
        "ernie4_5", "ernie4_5",
        {"head_dim": 32, "rope_theta": 5e5, "use_bias": False, "tie_word_embeddings": True}, logit_size=6.0,
        prompt_seeds=(9, 1003),
    ),
    "hunyuan": FamilyCase(
        "hunyuan_v1_dense", "",
        {"head_dim": 32, "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
         "max_position_embeddings": 32768},
        prompt_seeds=(1002, 90),
    ),
    "hunyuan-moe": FamilyCase(
        "hunyuan_v1_moe", "",
        {"num_experts": 8, "moe_topk": [2, 2], "moe_intermediate_size": [96, 96], "head_dim": 16,
         "num_shared_expert": [1, 1]},
        prompt_seeds=(1002, 1002),
    ),
    "dots1": FamilyCase(
        "dots1", "",
        {"num_hidden_layers": 4, "head_dim": 32, "n_routed_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "n_shared_experts": 2, "first_k_dense_replace": 1, "n_group": 4,
         "topk_group": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
        prompt_seeds=(1013, 1000),
    ),
    "ernie4.5-moe": FamilyCase(
        "ernie4_5_moe", "",
        {"num_hidden_layers": 3, "rope_theta": 5e5, "use_bias": False, "tie_word_embeddings": True,
         "moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 32, "moe_num_shared_experts": 2,
         "moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1},
        logit_size=6.0,
        prompt_seeds=(1003, 90),
    ),
    "lfm2moe": FamilyCase(
        "lfm2_moe", "",
        {"num_hidden_layers": 4, "layer_types": ["conv", FULL, "conv", "conv"], "conv_L_cache": 3,
         "norm_eps": 1e-5, "rope_theta": 1e6, "tie_word_embeddings": True, "num_experts": 8,
         "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_dense_layers": 1,
         "use_expert_bias": True, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        logit_size=6.0,
        prompt_seeds=(1009, 1000),
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

WITHOUT_REFERENCE: dict[str, FamilyCase] = {
    "llama3": FamilyCase(
        "llama",
        "llama",
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
        interleaved=True,
        unit_norms=True,
    ),
    "llama-wide": FamilyCase(
        "llama", "llama", {"hidden_size": 256, "intermediate_size": 512}, interleaved=True, unit_norms=True
    ),
    "qwen2": FamilyCase("qwen2", "qwen2", {"rope_theta": 1e6}, unit_norms=True),
    "granite4": FamilyCase(
        "granitemoehybrid",
        "granitehybrid",
        {**_GRANITE, **_MAMBA, "layer_types": [FULL] * 4, "num_local_experts": 0,
         "shared_intermediate_size": 96, "position_embedding_type": "rope"},
        interleaved=True,
        unit_norms=True,
    ),
    "qwen3vl": FamilyCase("qwen3_vl", "qwen3vl", {"head_dim": 32, "rope_theta": 5e6, **_VISION}),
    "qwen3vlmoe": FamilyCase(
        "qwen3_vl_moe", "qwen3vlmoe",
        {"head_dim": 32, "rope_theta": 5e6, **_VISION, "num_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "norm_topk_prob": True, "decoder_sparse_step": 1,
         "mlp_only_layers": []},
    ),
    "bailingmoe2": FamilyCase(
        "bailing_moe", "bailingmoe2",
        {"num_hidden_layers": 3, "head_dim": 32, "partial_rotary_factor": 0.5, "num_experts": 8,
         "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_shared_experts": 1,
         "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "n_group": 1,
         "topk_group": 1, "score_function": "sigmoid", "use_qk_norm": True, "use_bias": False,
         "use_qkv_bias": False, "moe_router_enable_expert_bias": True, "num_nextn_predict_layers": 0},
    ),
}  # fmt: skip
"""Cases that converted files alone have: transformers answers beside them."""
ALL_CASES = FAMILY_CASES | WITHOUT_REFERENCE

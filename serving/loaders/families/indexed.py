"""DeepSeek V3.2 and GLM 5: DeepSeek V3 with an indexer in its layers, which chooses `index_topk` positions
for a token. Of no more positions it chooses all, so that attention is DeepSeek V3's: contexts end there, and
tensors of indexers are left out."""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import UNUSED, Names
from phasewise.serving.loaders.families.deepseek import (
    DEEPSEEK3,
    GGUF_LATENT,
    HF_LATENT,
    NORM_EPS,
    deepseek_v3,
    latent_gguf,
)
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.experts import LOGISTIC


def _indexed(get: Get, config: ModelConfig) -> ModelConfig:
    most = get("index_topk", int)
    if most is None or most < 1:
        raise ModelError(f"the config has index_topk = {most!r:.60}: a number above 0 expected")
    assert config.latent is not None
    latent = replace(config.latent, index_topk=most)
    return replace(config, context_length=min(config.context_length, most), latent=latent)


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    return _indexed(get, deepseek_v3(get, config))


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    return _indexed(get, latent_gguf(get, config, LOGISTIC, NORM_EPS))


_HF_INDEXER = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")
_GGUF_INDEXER = ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
_HF_NAMES: Names = {**HF_LATENT, **{f"self_attn.indexer.{name}": UNUSED for name in _HF_INDEXER}}

DEEPSEEK32 = replace(
    DEEPSEEK3,
    name="deepseek32",
    hf=("deepseek_v32",),
    gguf=None,
    from_hf=_hf,
    from_gguf=_gguf,
    hf_names=_HF_NAMES,
    gguf_names={**GGUF_LATENT, **{f"indexer.{name}": UNUSED for name in _GGUF_INDEXER}},
    hf_defaults={
        **DEEPSEEK3.hf_defaults,
        "max_position_embeddings": 163840,
        "index_topk": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    gguf_head=True,
)
GLM_DSA: Family = replace(
    DEEPSEEK32,
    name="glm-dsa",
    hf=("glm_moe_dsa",),
    hf_defaults={
        **DEEPSEEK3.hf_defaults,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
        "q_lora_rank": 2048,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "index_topk": 2048,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
)

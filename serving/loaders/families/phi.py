"""Phi 3 and 4: one tensor for queries, keys and values, one for gate and up; LongRoPE in the long-context
models.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.models.packed_model import ModelConfig


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    return replace(config, sliding_window=get("sliding_window", int))


PHI3 = Family(
    "phi3",
    from_hf=_hf,
    partial_rope=True,
    hf_defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    gguf_names={"attn_qkv.weight": TensorCut(("q", "k", "v")), "ffn_up.weight": TensorCut(("gate", "up"))},
)

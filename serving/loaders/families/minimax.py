"""MiniMax M2: norms over all queries and all keys of a row, RoPE in a part of each head, logistic routing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.reading import experts_of
from phasewise.serving.loaders.families.routing import routed_gguf
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.models.parts.experts import LOGISTIC

STATED = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
}
"""Settings of published files for whose other values there is no arithmetic."""


def _hf(get: Get, config: ModelConfig) -> ModelConfig:
    for key, value in STATED.items():
        if get(key, None, value) != value:
            raise ModelError(f"config.json has {key} = {get(key)!r:.60}, which cannot run: {value!r} can")
    if any(kind != 1 for kind in get("attn_type_list", list) or ()):
        raise ModelError("config.json has attn_type_list with layers of another attention, which cannot run")
    if (turned := get("rotary_dim", int)) is not None and config.rope.dim == config.head_dim:
        config = replace(config, rope=replace(config.rope, dim=turned))
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", normalised=True)
    experts = replace(experts, scores=LOGISTIC, choice_bias=True)
    return replace(config, qk_norm=True, whole_qk_norm=True, experts=experts)


def _gguf(get: Get, config: ModelConfig) -> ModelConfig:
    def read(key: str, kind: Any = None, default: Any = None) -> Any:
        return True if key == "expert_weights_norm" else get(key, kind, default)

    return replace(routed_gguf(read, config), qk_norm=True, whole_qk_norm=True)


MINIMAX_M2 = Family(
    "minimax-m2",
    hf=("minimax_m2",),
    from_hf=_hf,
    from_gguf=_gguf,
    partial_rope=True,
    hf_defaults={
        "head_dim": 128,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "rope_theta": 5e6,
        "max_position_embeddings": 196608,
        "bos_token_id": 200034,
        "eos_token_id": 200020,
    },
)

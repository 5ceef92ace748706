"""Llama 4, the language model. Layers with RoPE see chunks of positions and normalise queries and keys behind
RoPE; layers without it see all positions, and their queries grow. The logistic of a chosen expert's logit
multiplies what the expert reads. GGUF files state neither chunks nor growth: llama.cpp has constants."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.family import (
    TEXT_PREFIXES,
    Family,
    Get,
    experts_of,
    fed,
    named_layers,
    other_parts,
    with_experts,
    with_kinds,
    with_width,
)
from phasewise.serving.loaders.families.llama import layers_with_rope
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.parts.attention import QueryGrowth
from phasewise.serving.models.parts.experts import LOGISTIC

CHUNKED = "chunked_attention"
N_WITHOUT_NORMS = 128
"""Experts of the release (Maverick) that llama.cpp runs without norms of queries and keys."""


def _llama4(get: Get, config: ModelConfig) -> ModelConfig:
    has_rope = layers_with_rope(get, config)
    chunk, grows = get("attention_chunk_size", int), get("attn_temperature_tuning")
    chunked = [rotates and chunk is not None for rotates in has_rope]
    if get("layer_types", list):
        chunked = named_layers(get, config, CHUNKED)
    if type(grows) not in (bool, int):
        raise ModelError(f"config.json has attn_temperature_tuning = {grows!r:.60}: true or false expected")
    kinds = [
        LayerKind(chunk if cut else None, config.rope if rotates else None, in_chunks=cut)
        for cut, rotates in zip(chunked, has_rope, strict=True)
    ]
    growth = QueryGrowth(get("attn_scale", float), get("floor_scale", int), shift=1, unrotated=True)
    own = replace(
        with_kinds(config, kinds),
        plain_qk_norm=get("use_qk_norm", bool),
        query_growth=growth if grows and not all(has_rope) else None,
    )
    return _mixture(get, own, config.ffn, get("intermediate_size_mlp", int))


def _mixture(get: Get, config: ModelConfig, width: int, dense_width: int) -> ModelConfig:
    """Add experts of `width` numbers, and feed-forward layers of `dense_width` to layers without experts."""
    n_layers, step, named = config.n_layers, get("interleave_moe_layer_step", int, 1), get("moe_layers", list)
    if step < 0:
        raise ModelError(f"the config has interleave_moe_layer_step = {step!r:.60}: 0 or more expected")
    sparse = range(step - 1, n_layers, step) if step else ()
    dense = [layer not in (sparse if named is None else named) for layer in range(n_layers)]
    plain = with_width(config, dense_width)
    if all(dense):
        return plain
    experts = experts_of(
        get, "num_local_experts", "num_experts_per_tok", width, normalised=False, shared_ffn=width
    )
    return with_experts(plain, replace(experts, scores=LOGISTIC, weighs_inputs=True), dense)


def _llama4_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    width, n_experts = get("moe_intermediate_size", int, config.ffn), get("expert_count", int, 0)
    is_whole = get("attention.sliding_window", int) == 0  # so are files whose layers all see all
    stated: dict[str, Any] = {
        "intermediate_size_mlp": config.ffn,
        "use_qk_norm": n_experts != N_WITHOUT_NORMS,
        **({} if n_experts else {"moe_layers": []}),
        **({"attention_chunk_size": None, "no_rope_layers": [1] * config.n_layers} if is_whole else {}),
    }

    def with_stated(key: str, kind: Any = None, default: Any = None) -> Any:
        return stated[key] if key in stated else get(key, kind, default)

    return _llama4(with_stated, with_width(config, width))


_CONSTANTS = {
    "attention_chunk_size": 8192,
    "attn_temperature_tuning": True,
    "attn_scale": 0.1,
    "floor_scale": 8192,
}
LLAMA4 = Family(
    "llama4",
    hf=("llama4", "llama4_text"),
    from_hf=_llama4,
    from_gguf=_llama4_gguf,
    hf_names={
        "feed_forward.router.weight": "router",
        **fed("feed_forward.shared_expert"),
        **fed("feed_forward.experts.{e}", "experts.{e}."),
        "feed_forward.experts.gate_up_proj": TensorCut(("gate", "up"), of_experts=True, transposed=True),
        "feed_forward.experts.down_proj": TensorCut(("down",), of_experts=True, transposed=True),
    },
    gguf_defaults=_CONSTANTS,
    hf_defaults={
        **_CONSTANTS,
        "use_qk_norm": True,
        "intermediate_size_mlp": 16384,
        "head_dim": 128,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "rope_theta": 5e5,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    hf_text_prefixes=TEXT_PREFIXES,
    hf_ignored=other_parts("vision_model", "multi_modal_projector"),
    hf_interleaved_heads=True,
    gguf_interleaved_heads=True,
)

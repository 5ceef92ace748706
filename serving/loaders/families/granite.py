"""Granite 3: a Llama whose embeddings, scores, halves of layers and logits have multipliers; and its
mixtures, with or without an expert that all tokens share. Granite 4 H: the same with Mamba 2 in most layers.
"""

from __future__ import annotations

from dataclasses import replace

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import TensorCut
from phasewise.serving.loaders.families.family import Family, Get
from phasewise.serving.loaders.families.hybrids.mamba import mamba_gguf, mamba_hf
from phasewise.serving.loaders.families.reading import (
    experts_of,
    headless_layers,
    must_be_off,
    positive,
    state_layer_types,
)
from phasewise.serving.models.packed_model import LayerKind, ModelConfig
from phasewise.serving.models.parts.states.state_layers import StateLayers


def _granite(get: Get, config: ModelConfig) -> ModelConfig:
    divisor = positive(get, "logits_scaling", 1.0)
    if not 1e-6 <= divisor <= 1e6:
        raise ModelError(
            f"the config has logits_scaling = {divisor!r:.80}: a number from 1e-6 to 1e6 expected"
        )
    return replace(
        config,
        embed_scale=positive(get, "embedding_multiplier", 1.0),
        residual_scale=positive(get, "residual_multiplier", 1.0),
        attention_scale=positive(get, "attention_multiplier", 1.0),
        logit_scale=1 / divisor,
    )


def _moe(get: Get, config: ModelConfig) -> ModelConfig:
    shared = get("shared_intermediate_size", int, 0)
    experts = experts_of(get, "num_local_experts", "num_experts_per_tok", normalised=True, shared_ffn=shared)
    return replace(_granite(get, config), experts=experts)


def _hybrid(get: Get, config: ModelConfig) -> ModelConfig:
    must_be_off(get, "attention_bias")
    state = mamba_hf(get, (), get("mamba_expand", int, 2) * config.hidden)
    state = replace(state, layers=_state_layers(get, config))
    kind = get("position_embedding_type", str)
    if kind not in (None, "rope", "nope"):
        raise ModelError(f"config.json has position_embedding_type = {kind!r:.60}: rope or none can run")
    dense = get("num_local_experts", int, 0) == 0
    shared = get("shared_intermediate_size", int, 1024)
    config = replace(_granite(get, config), ffn=shared) if dense else _moe(get, config)
    return _with_states(config, state, rope=kind == "rope")


def _state_layers(get: Get, config: ModelConfig) -> tuple[int, ...]:
    """The layers by either of two keys, each in the words of one release of transformers or the other."""
    names = get("layer_types", list, get("layers_block_type", list))
    old = {"mamba": "linear_attention", "attention": "full_attention"}
    renamed = [old.get(name, name) if isinstance(name, str) else name for name in names or ()]
    return state_layer_types(lambda *_: renamed or None, config, "linear_attention")


def _with_states(config: ModelConfig, state: StateLayers, *, rope: bool) -> ModelConfig:
    kinds = () if rope else (LayerKind(None, None),) * config.n_layers
    return replace(config, state=state if state.layers else None, layer_kinds=kinds)


def _hybrid_gguf(get: Get, config: ModelConfig) -> ModelConfig:
    state = mamba_gguf(get, headless_layers(get, config.n_layers))
    config = _moe(get, config) if get("expert_count", int, 0) else _granite(get, config)
    return _with_states(config, state, rope=get("rope.scaling.finetuned", bool, True))


GRANITE = Family(
    "granite",
    from_hf=_granite,
    gguf_interleaved_heads=True,
)
GRANITE_MOE = Family(
    "granitemoe",
    hf=("granitemoe", "granitemoeshared"),
    from_hf=_moe,
    hf_defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
    hf_names={
        "block_sparse_moe.router.layer.weight": "router",
        "block_sparse_moe.input_linear.weight": TensorCut(("gate", "up"), of_experts=True),
        "block_sparse_moe.output_linear.weight": TensorCut(("down",), of_experts=True),
        "shared_mlp.input_linear.weight": TensorCut(("gate", "up")),
        "shared_mlp.output_linear.weight": "down",
    },
    gguf_interleaved_heads=True,
)

GRANITE_HYBRID = Family(
    "granitehybrid",
    hf=("granitemoehybrid",),
    from_hf=_hybrid,
    from_gguf=_hybrid_gguf,
    hf_defaults={
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 1024,
    },
    hf_names=GRANITE_MOE.hf_names,
    gguf_interleaved_heads=True,
)

"""The weights that products of a layer read, fused or not, and what its attention is told."""

from __future__ import annotations

from typing import Any

import numpy as np

from phasewise.cython_kernels.packing import PackedWeight
from phasewise.serving.errors import ModelError
from phasewise.serving.models.linears import Parts
from phasewise.serving.models.packed_model import ModelConfig, PackedModel


def weight_of(model: PackedModel, name: str) -> PackedWeight:
    try:
        return model.weights[name]
    except KeyError:
        raise ModelError(f"{model.name} has no weight {name!r}") from None


def qkv_parts(model: PackedModel, layer: int) -> Parts:
    """Those that a layer's attention reads: one that reads what another keeps has queries alone."""
    config, name, heads = model.config, f"layers.{layer}", model.config.heads_of(layer)
    fused = config.qkv_of(layer)
    if f"{name}.{fused}" in model.weights:
        return [(model.weights[f"{name}.{fused}"], 0)]
    q_rows, kv_rows = config.n_heads * heads.head_dim, heads.n_kv_heads * heads.head_dim
    columns = {"q": 0, "k": q_rows, "v": q_rows + kv_rows}
    return [(weight_of(model, f"{name}.{part}"), columns[part]) for part in fused]


def fused_parts(model: PackedModel, name: str, prefix: str) -> Parts:
    """Queries, keys and values of something beside the stream."""
    config, fused = model.config, f"{name}.{prefix}qkv"
    if fused in model.weights:
        return [(model.weights[fused], 0)]
    columns = {"q": 0, "k": config.q_rows, "v": config.q_rows + config.kv_rows}
    return [(weight_of(model, f"{name}.{prefix}{part}"), column) for part, column in columns.items()]


def into_ffn_parts(model: PackedModel, name: str, width: int) -> Parts:
    """The weights of a feed-forward layer of this width that read the stream."""
    if not model.config.gated:
        return [(weight_of(model, f"{name}.up"), 0)]
    if f"{name}.gate_up" in model.weights:
        return [(model.weights[f"{name}.gate_up"], 0)]
    return [(weight_of(model, f"{name}.gate"), 0), (weight_of(model, f"{name}.up"), width)]


def own_attention(config: ModelConfig, layer: int) -> dict[str, Any]:
    """Facts for attention: of values, of keys that another layer keeps, and of queries that grow."""
    heads, growth = config.heads_of(layer), config.query_growth
    told: dict[str, Any] = {
        "only_reads": config.kept_by(layer) != layer,
        "keys_are_values": heads.keys_are_values,
        "v_norm": np.ones(heads.head_dim, np.float32) if config.value_norms else None,
    }
    if growth is None:
        return told
    return {**told, "growth": growth.factors(config.context_length), "growth_span": growth.span}

"""A decoder of the Llama family in plain numpy float64, to measure the program against; random models."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from phasewise.cython_kernels import packing
from phasewise.serving.models.packed_model import LayerKind, ModelConfig, PackedModel, alike
from phasewise.serving.models.rope import RopeSpec

Array = np.ndarray


def tiny_config(**changes: Any) -> ModelConfig:
    """A small Llama; `rope` follows head_dim unless given."""
    fields: dict[str, Any] = {
        "architecture": "llama",
        "n_layers": 2,
        "hidden": 96,
        "ffn": 160,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 16,
        "vocab_size": 83,
        "context_length": 2048,
        "norm_eps": 1e-5,
        "tied_embeddings": False,
        "qk_norm": False,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_ids": (),
        "add_bos": False,
    }
    fields |= changes
    rope = fields.pop("rope", RopeSpec(10000.0, fields["head_dim"]))
    kind = LayerKind(fields.pop("sliding_window"), rope)
    return ModelConfig(forms=alike(fields.pop("n_layers"), kind, fields.pop("ffn")), **fields)


def row_sizes(config: ModelConfig) -> tuple[int, int]:
    """Numbers of a row's queries, and of its keys."""
    return config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim


def tiny_model(
    config: ModelConfig, kind: str = "f32", seed: int = 0, bias: bool = False, fused: bool = True
) -> PackedModel:
    """Random weights of sizes that keep activations near one."""
    rng = np.random.default_rng(seed)
    weights: dict[str, packing.PackedWeight] = {}
    vectors: dict[str, Array] = {}

    def matrix(n: int, k: int) -> packing.PackedWeight:
        values = rng.standard_normal((n, k), dtype=np.float32) / np.float32(np.sqrt(k))
        if kind in ("q8", "q4"):
            return packing.pack_quant(packing.quantise(values, 8 if kind == "q8" else 4, kind == "q8"))
        return packing.pack_dense(values, kind)  # type: ignore[arg-type]

    def vector(n: int, around: float) -> Array:
        return (around + 0.3 * rng.standard_normal(n)).astype(np.float32)

    def joined(name: str, parts: dict[str, int], k: int) -> None:
        if fused:
            weights[f"{name}.{'qkv' if 'q' in parts else 'gate_up'}"] = matrix(sum(parts.values()), k)
        else:
            weights.update({f"{name}.{part}": matrix(n, k) for part, n in parts.items()})

    c, (q, kv) = config, row_sizes(config)
    weights["embed"] = matrix(c.vocab_size, c.hidden)
    for name in (f"layers.{layer}" for layer in range(c.n_layers)):
        joined(name, {"q": q, "k": kv, "v": kv}, c.hidden)
        joined(name, {"gate": c.ffn, "up": c.ffn}, c.hidden)
        weights[f"{name}.o"], weights[f"{name}.down"] = matrix(c.hidden, q), matrix(c.hidden, c.ffn)
        vectors[f"{name}.attn_norm"], vectors[f"{name}.ffn_norm"] = vector(c.hidden, 1), vector(c.hidden, 1)
        if bias:
            vectors[f"{name}.qkv_bias"] = vector(q + 2 * kv, 0)
        if c.qk_norm:
            vectors[f"{name}.q_norm"], vectors[f"{name}.k_norm"] = (
                vector(c.head_dim, 1),
                vector(c.head_dim, 1),
            )
    vectors["final_norm"] = vector(c.hidden, 1)
    if not c.tied_embeddings:
        weights["lm_head"] = matrix(c.vocab_size, c.hidden)
    size = sum(weight.nbytes for weight in weights.values())
    return PackedModel(c, kind, f"tiny-{kind}", "memory", "0" * 64, weights, vectors, "{}", None, size)


def reference_logits(model: PackedModel, token_ids: list[int]) -> Array:
    """Logits after every token of one sequence, float64 [tokens, vocab], weights taken as packed."""
    c = model.config
    x = _dense(model, "embed")[token_ids]
    angles = np.outer(np.arange(len(token_ids)), c.rope.inv_freq())
    for layer in range(c.n_layers):
        name = f"layers.{layer}"
        x = x + _attention(model, name, _norm(x, model.vectors[f"{name}.attn_norm"], c.norm_eps), angles)
        h = _norm(x, model.vectors[f"{name}.ffn_norm"], c.norm_eps)
        gate, up = np.split(h @ _joined(model, name, "gate_up", ("gate", "up")).T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ _dense(model, f"{name}.down").T
    head = "embed" if c.tied_embeddings else "lm_head"
    logits: Array = _norm(x, model.vectors["final_norm"], c.norm_eps) @ _dense(model, head).T
    return logits


def _dense(model: PackedModel, name: str) -> Array:
    return packing.unpack(model.weights[name]).astype(np.float64)


def _joined(model: PackedModel, name: str, fused: str, parts: tuple[str, ...]) -> Array:
    if f"{name}.{fused}" in model.weights:
        return _dense(model, f"{name}.{fused}")
    return np.concatenate([_dense(model, f"{name}.{part}") for part in parts])


def _norm(x: Array, weight: Array, eps: float) -> Array:
    scaled: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight
    return scaled


def _rotate(x: Array, angles: Array) -> Array:
    """x [tokens, heads, dim], angles [tokens, dim / 2]."""
    a, b = np.split(x, 2, axis=2)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def _attention(model: PackedModel, name: str, h: Array, angles: Array) -> Array:
    c, tokens = model.config, len(h)
    rows = h @ _joined(model, name, "qkv", ("q", "k", "v")).T + model.vectors.get(f"{name}.qkv_bias", 0.0)
    q, k, v = (
        part.reshape(tokens, -1, c.head_dim)
        for part in np.split(rows, list(itertools.accumulate(row_sizes(c))), axis=1)
    )
    if c.qk_norm:
        q, k = (
            _norm(part, model.vectors[f"{name}.{kind}_norm"], c.norm_eps)
            for part, kind in ((q, "q"), (k, "k"))
        )
    q, k = _rotate(q, angles), _rotate(k, angles)
    k, v = (np.repeat(part, c.n_heads // c.n_kv_heads, axis=1) for part in (k, v))
    scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(c.head_dim)
    behind = np.arange(tokens)[:, None] - np.arange(tokens)[None]
    seen = (behind >= 0) & (behind < (c.kinds[0].window or tokens))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=2, keepdims=True))
    mixed = np.einsum("hts,shd->thd", weights / weights.sum(axis=2, keepdims=True), v)
    out: Array = mixed.reshape(tokens, -1) @ _dense(model, f"{name}.o").T
    return out

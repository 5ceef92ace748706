"""Vectors of the tiny jina v3, in float64, by its authors' definition: W + (alpha / rank) B A of products,
and W + (alpha / rank) A B of embeddings, for the task that is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tests.support.models.encoder_models import (
    CASES,
    HEADS,
    HIDDEN,
    LAYERS,
    TASKS,
    encoder_weights,
    tokenizer_of,
)

NAME = "jina-v3"


def plain_vectors(texts: Sequence[str], task: str | None = None) -> np.ndarray:
    """float32 [texts, hidden]. None: without any adapter and instruction."""
    tokenizer = tokenizer_of(NAME)
    tokenizer.enable_truncation(CASES[NAME].max_tokens)
    before = "" if task is None else TASKS[task]
    rows = [vector_of_ids(tokenizer.encode(before + text).ids, task) for text in texts]
    return np.array(rows, np.float32)


def vector_of_ids(ids: Sequence[int], task: str | None = None) -> np.ndarray:
    rows = _rows(ids, task).mean(axis=0)
    vector: np.ndarray = rows / np.linalg.norm(rows)
    return vector


def _rows(ids: Sequence[int], task: str | None) -> np.ndarray:
    """The rows of the last layer, float64 [tokens, hidden]."""
    weights = {
        key.removeprefix("roberta."): value.astype(np.float64) for key, value in encoder_weights(NAME).items()
    }
    n, dim, eps = len(ids), HIDDEN // HEADS, CASES[NAME].fields["layer_norm_eps"]

    def matrix(key: str) -> np.ndarray:
        stem = f"{key}.parametrizations.weight"
        whole = weights[f"{stem}.original"]
        if task is None:
            return whole
        number = list(TASKS).index(task)
        a, b = (weights[f"{stem}.0.lora_{which}"][number] for which in "AB")
        added = a @ b if "embeddings" in key else b @ a
        return whole + added * (CASES[NAME].fields["lora_alpha"] / CASES[NAME].fields["lora_rank"])

    def linear(x: np.ndarray, key: str) -> np.ndarray:
        return x @ matrix(key).T + weights[f"{key}.bias"]

    def norm(x: np.ndarray, key: str) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + eps)
        return scaled * weights[f"{key}.weight"] + weights[f"{key}.bias"]

    h = matrix("embeddings.word_embeddings")[list(ids)] + matrix("embeddings.token_type_embeddings")[0]
    h = norm(h, "emb_ln")
    for layer in range(LAYERS):
        stem = f"encoder.layers.{layer}"
        q, k, v = (
            part.reshape(n, HEADS, dim).swapaxes(0, 1)
            for part in np.split(linear(h, f"{stem}.mixer.Wqkv"), 3, axis=-1)
        )
        scores = _turned(q) @ _turned(k).swapaxes(1, 2) / math.sqrt(dim)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = (shares @ v).swapaxes(0, 1).reshape(n, HIDDEN)
        h = norm(h + linear(mixed, f"{stem}.mixer.out_proj"), f"{stem}.norm1")
        inner = linear(h, f"{stem}.mlp.fc1")
        active = inner / 2 * (1 + np.vectorize(math.erf)(inner / math.sqrt(2)))
        h = norm(h + linear(active, f"{stem}.mlp.fc2"), f"{stem}.norm2")
    return h


def _turned(x: np.ndarray) -> np.ndarray:
    """RoPE: a number and the one half a head later turn together."""
    dim = x.shape[-1]
    frequencies = CASES[NAME].fields["rotary_emb_base"] ** -(np.arange(0, dim, 2) / dim)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    low, high = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)

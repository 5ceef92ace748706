"""Make tests/data/reference/embeddings.npz with sentence-transformers, in float32 on one thread.

    python tests/data/make_embeddings.py [--minilm DIRECTORY]

Runs by hand, in an environment that has sentence-transformers; the tests only read what it leaves: vectors
and scores of the tiny models of tests/support/models/encoder_models.py, and vectors of all-MiniLM-L6-v2.

Models whose code is not in transformers but beside their weights are computed by `plain_vectors`, in float64
from their authors' definition. It is held against transformers where that has the family.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from tests.support.models.encoder_models import (  # noqa: E402
    CASES,
    HIDDEN,
    LAYERS,
    PAIRS,
    TEXTS,
    Arrays,
    encoder_weights,
    tokenizer_of,
    write_encoder,
)
from tests.support.models.jina_v3_reference import NAME as JINA_V3  # noqa: E402

PLAIN = ("jina-bert", "gte-new")
"""Cases that sentence-transformers would run by code of strangers."""
GEMMA = "gemma3"
CHECKED = "gte"
"""The case that both compute."""


def vectors_of(directory: Path, texts: Sequence[str], prompt_name: str | None = None) -> np.ndarray:
    """float32 [texts, hidden]."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(directory), device="cpu")
    return np.stack([model.encode(text, prompt_name=prompt_name) for text in texts])  # one by one: no padding


def gemma_vectors(prompt: str = "") -> np.ndarray:
    """float32 [texts, width] of GEMMA: rows by transformers in float64, then its modules."""
    import torch
    from transformers import AutoModel

    case, weights = CASES[GEMMA], encoder_weights(GEMMA)
    tokenizer, vectors = tokenizer_of(GEMMA), []
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModel.from_pretrained(
            write_encoder(Path(folder), GEMMA), dtype=torch.float64, attn_implementation="eager"
        )
    for text in case.texts:
        ids = tokenizer.encode(prompt + text).ids[: case.max_tokens]
        with torch.inference_mode():
            row = model(torch.tensor([ids])).last_hidden_state[0].numpy().mean(axis=0)
        for key, matrix in weights.items():
            row = matrix.astype(np.float64) @ row if "_Dense/" in key else row
        vectors.append(row / np.linalg.norm(row))
    return np.array(vectors, np.float32)


def plain_vectors(name: str) -> np.ndarray:
    """float32 [texts, hidden] of a post-norm encoder with a gate, by its published definition."""
    case, weights, tokenizer = CASES[name], encoder_weights(name), tokenizer_of(name)
    tokenizer.no_padding()
    tokenizer.enable_truncation(case.max_tokens)
    vectors = []
    for text in case.texts:
        rows = _rows(
            name,
            {key: value.astype(np.float64) for key, value in weights.items()},
            tokenizer.encode(text).ids,
        )
        vector = rows[0] if case.pooling == "cls" else rows.mean(axis=0)
        vectors.append(vector / np.linalg.norm(vector))
    return np.array(vectors, np.float32)


def _rows(name: str, weights: Arrays, ids: list[int]) -> np.ndarray:
    """The rows of the last layer, float64 [tokens, hidden]."""
    fields = CASES[name].fields
    is_jina, heads, n = name.startswith("jina"), fields.get("num_attention_heads", 4), len(ids)
    dim = HIDDEN // heads

    def linear(x: np.ndarray, key: str) -> np.ndarray:
        return x @ weights[f"{key}.weight"].T + weights.get(f"{key}.bias", 0.0)

    def norm(x: np.ndarray, key: str) -> np.ndarray:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + fields["layer_norm_eps"])
        return scaled * weights[f"{key}.weight"] + weights[f"{key}.bias"]

    apart = np.abs(np.arange(n)[:, None] - np.arange(n)[None, :])
    bias = -_slopes(heads)[:, None, None] * apart if is_jina else 0.0
    h = (
        weights["embeddings.word_embeddings.weight"][ids]
        + weights["embeddings.token_type_embeddings.weight"][0]
    )
    h = norm(h, "embeddings.LayerNorm")
    for layer in range(LAYERS):
        stem = f"encoder.layer.{layer}"
        if is_jina:
            parts = [linear(h, f"{stem}.attention.self.{part}") for part in ("query", "key", "value")]
            names = (
                "attention.output.dense",
                "attention.output.LayerNorm",
                "mlp.gated_layers",
                "mlp.wo",
                "mlp.layernorm",
            )
        else:
            parts = np.split(linear(h, f"{stem}.attention.qkv_proj"), 3, axis=-1)
            names = ("attention.o_proj", "attn_ln", "mlp.up_gate_proj", "mlp.down_proj", "mlp_ln")
        out, out_norm, into, down, last_norm = (f"{stem}.{name}" for name in names)
        q, k, v = (part.reshape(n, heads, dim).swapaxes(0, 1) for part in parts)
        if not is_jina:
            q, k = _turned(q, fields), _turned(k, fields)
        scores = q @ k.swapaxes(1, 2) / math.sqrt(dim) + bias
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        h = norm(h + linear((shares @ v).swapaxes(0, 1).reshape(n, HIDDEN), out), out_norm)
        first, second = np.split(linear(h, into), 2, axis=-1)
        gate, up = (first, second) if is_jina else (second, first)
        gelu = gate / 2 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
        h = norm(h + linear(gelu * up, down), last_norm)
    return h


def _slopes(heads: int) -> np.ndarray:
    """Of ALiBi, by its authors' rule."""

    def of_power(n: int) -> list[float]:
        return [2 ** (-8 / n * (head + 1)) for head in range(n)]

    lower = 2 ** math.floor(math.log2(heads))
    return np.array(of_power(lower) + of_power(2 * lower)[0::2][: heads - lower])


def _turned(x: np.ndarray, fields: Mapping[str, Any]) -> np.ndarray:
    """RoPE, with NTK scaling as gte's authors define it."""
    dim = x.shape[-1]
    theta = fields.get("rope_theta") or fields["rope_parameters"]["rope_theta"]
    factor = fields.get("rope_scaling", {}).get("factor", 1.0)
    frequencies = (theta * factor) ** -(np.arange(0, dim, 2) / dim) / factor ** (2 / dim)
    angles = np.arange(x.shape[1])[:, None] * frequencies
    low, high = np.split(x, 2, axis=-1)
    cosine, sine = np.cos(angles), np.sin(angles)
    return np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)


def scores_of(directory: Path) -> np.ndarray:
    """Logits of pairs, float32 [pairs]."""
    import torch
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(directory), device="cpu")
    return np.array(
        [model.predict([pair], activation_fn=torch.nn.Identity())[0] for pair in PAIRS], dtype=np.float32
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minilm", type=Path, help="directory of all-MiniLM-L6-v2")
    options = parser.parse_args()
    vectors: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            if name == JINA_V3:  # whose vectors its tests compute by their definition
                continue
            directory = write_encoder(Path(folder) / name, name)
            if case.pooling is None:
                vectors[name] = scores_of(directory)
            elif name == GEMMA:
                vectors[name] = gemma_vectors()
            elif name in PLAIN:
                vectors[name] = plain_vectors(name)
            else:
                vectors[name] = vectors_of(directory, case.texts)
            for prompt, text in case.prompts.items():
                vectors[f"{name} {prompt}"] = (
                    gemma_vectors(text) if name == GEMMA else vectors_of(directory, case.texts, prompt)
                )
    assert np.abs(plain_vectors(CHECKED) - vectors[CHECKED]).max() < 1e-6
    if options.minilm is not None:
        vectors["all-minilm-l6-v2"] = vectors_of(options.minilm, TEXTS)
    made_with = [f"{name} {version(name)}" for name in ("sentence-transformers", "transformers", "torch")]
    np.savez_compressed(
        ROOT / "tests/data/reference/embeddings.npz",
        allow_pickle=False,
        made_with=np.array(made_with),
        **vectors,
    )
    for name, values in vectors.items():
        print(name, values.shape, values.ravel()[:3])


if __name__ == "__main__":
    main()

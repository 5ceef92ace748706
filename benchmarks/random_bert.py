"""Write an encoder of random weights in a given shape, for speed alone: bge-large's by default.

    python benchmarks/random_bert.py FOLDER [--layers 24] [--hidden 1024] [--heads 16] [--context 512]
    python benchmarks/random_bert.py FOLDER --kind jina-v3

jina-v3: XLM-R with RoPE and the adapters of five tasks, 250,002 tokens and a context of 8,194 (570 million
numbers). Every layer has the same values, drawn once; engines keep a copy for each layer. Its tokenizer knows
few words: give token ids.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from safetensors.numpy import save_file
from typer import Argument

from benchmarks.harness import Yielded, commands
from tests.support.models.encoder_models import TASKS, tokenizer_of

Kind = Literal["bert", "jina-v3"]
Arrays = dict[str, np.ndarray]
Draw = Callable[..., np.ndarray]
VOCABULARY: Mapping[Kind, int] = {"bert": 30522, "jina-v3": 250002}
V3_CONTEXT, V3_RANK = 8194, 4


def random_bert(
    folder: Annotated[Path, Argument()],
    layers: int = 24,
    hidden: int = 1024,
    heads: int = 16,
    context: int | None = None,
    kind: Kind = "bert",
) -> Yielded:
    rng = np.random.default_rng(0)
    number = np.float32 if kind == "bert" else np.float16  # a file of half the size

    def drawn(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(number)

    context = context or (512 if kind == "bert" else V3_CONTEXT)
    weights = _bert(layers, hidden, context, drawn) if kind == "bert" else _jina_v3(layers, hidden, drawn)
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "hidden_act": "gelu",
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": context,
        "vocab_size": VOCABULARY[kind],
        **_config_of(kind),
    }
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{module}"}
        for index, (module, path) in enumerate(
            [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        )
    ]
    pooled = "pooling_mode_cls_token" if kind == "bert" else "pooling_mode_mean_tokens"
    for name, fields in (
        ("config.json", config),
        ("modules.json", modules),
        ("1_Pooling/config.json", {"word_embedding_dimension": hidden, pooled: True}),
        ("sentence_bert_config.json", {"max_seq_length": context, "do_lower_case": False}),
    ):
        (folder / name).write_text(json.dumps(fields), encoding="utf-8")
    tokenizer = tokenizer_of("bert-cls" if kind == "bert" else "jina-v3")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")

    yield f"{folder}: {layers} layers of {hidden}"


def _config_of(kind: Kind) -> dict[str, Any]:
    if kind == "bert":
        names = {"model_type": "bert", "architectures": ["BertModel"]}
        return {**names, "layer_norm_eps": 1e-12, "type_vocab_size": 2}
    return {
        "model_type": "xlm-roberta",
        "architectures": ["XLMRobertaModel"],
        "position_embedding_type": "rotary",
        "rotary_emb_base": 20000.0,
        "layer_norm_eps": 1e-5,
        "type_vocab_size": 1,
        "lora_adaptations": [*TASKS],
        "lora_rank": V3_RANK,
        "lora_alpha": 1.0,
        "load_trained_adapters": True,
        "task_instructions": dict.fromkeys(TASKS, ""),
    }


def _norm(name: str, like: np.ndarray) -> Arrays:
    hidden = like.shape[-1]
    return {f"{name}.weight": np.ones(hidden, like.dtype), f"{name}.bias": np.zeros(hidden, like.dtype)}


def _bert(layers: int, hidden: int, context: int, drawn: Draw) -> Arrays:
    of_layer = {f"attention.self.{part}": drawn(hidden, hidden) for part in ("query", "key", "value")}
    of_layer |= {
        "attention.output.dense": drawn(hidden, hidden),
        "intermediate.dense": drawn(4 * hidden, hidden),
    }
    of_layer["output.dense"] = drawn(hidden, 4 * hidden)
    words = drawn(VOCABULARY["bert"], hidden)
    weights = {
        "embeddings.word_embeddings.weight": words,
        "embeddings.token_type_embeddings.weight": drawn(2, hidden),
        "embeddings.position_embeddings.weight": drawn(context, hidden),
        **_norm("embeddings.LayerNorm", words),
    }
    for layer in range(layers):
        stem = f"encoder.layer.{layer}"
        for part, values in of_layer.items():
            weights[f"{stem}.{part}.weight"] = values
            weights[f"{stem}.{part}.bias"] = np.zeros(len(values), values.dtype)
        weights |= _norm(f"{stem}.attention.output.LayerNorm", words)
        weights |= _norm(f"{stem}.output.LayerNorm", words)
    return weights


def _jina_v3(layers: int, hidden: int, drawn: Draw) -> Arrays:
    sizes = {
        "mixer.Wqkv": (3 * hidden, hidden),
        "mixer.out_proj": (hidden, hidden),
        "mlp.fc1": (4 * hidden, hidden),
        "mlp.fc2": (hidden, 4 * hidden),
    }
    of_layer = {name: _adapted(drawn, *size) for name, size in sizes.items()}
    words = _adapted(drawn, VOCABULARY["jina-v3"], hidden, is_embedding=True)
    segments = _adapted(drawn, 1, hidden, is_embedding=True)
    weights = {
        **{f"embeddings.word_embeddings.{part}": values for part, values in words.items()},
        **{f"embeddings.token_type_embeddings.{part}": values for part, values in segments.items()},
        **_norm("emb_ln", words["parametrizations.weight.original"]),
    }
    for layer in range(layers):
        stem = f"encoder.layers.{layer}"
        for name, parts in of_layer.items():
            weights |= {f"{stem}.{name}.{part}": values for part, values in parts.items()}
            weights[f"{stem}.{name}.bias"] = np.zeros(sizes[name][0], np.float16)
        for norm in ("norm1", "norm2"):
            weights |= _norm(f"{stem}.{norm}", words["parametrizations.weight.original"])
    return {f"roberta.{name}": values for name, values in weights.items()}


def _adapted(drawn: Draw, n: int, k: int, *, is_embedding: bool = False) -> Arrays:
    """A matrix [n, k], and A and B of every task: of a product [rank, k] and [n, rank], of an embedding [n,
    rank] and [rank, k].
    """
    stem, count = "parametrizations.weight", len(TASKS)
    a, b = ((n, V3_RANK), (V3_RANK, k)) if is_embedding else ((V3_RANK, k), (n, V3_RANK))
    return {
        f"{stem}.original": drawn(n, k),
        f"{stem}.0.lora_A": drawn(count, *a),
        f"{stem}.0.lora_B": drawn(count, *b),
    }


app = commands(__doc__, random_bert)

if __name__ == "__main__":
    app()

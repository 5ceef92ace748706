"""Write a BERT of random weights in a given shape, for speed alone: bge-large's by default.

    python benchmarks/random_bert.py FOLDER [--layers 24] [--hidden 1024] [--heads 16]

Every layer has the same float32 values, drawn once; engines keep a copy for each layer. Its tokenizer knows
few words: give token ids.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
from safetensors.numpy import save_file
from typer import Argument

from benchmarks.harness import Yielded, commands
from tests.support.models.encoder_models import tokenizer_of

CONTEXT, VOCABULARY = 512, 30522


def random_bert(
    folder: Annotated[Path, Argument()], layers: int = 24, hidden: int = 1024, heads: int = 16
) -> Yielded:
    ffn = 4 * hidden
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * 0.02).astype(np.float32)

    def norm(name: str) -> dict[str, np.ndarray]:
        return {f"{name}.weight": np.ones(hidden, np.float32), f"{name}.bias": np.zeros(hidden, np.float32)}

    layer_weights = {f"attention.self.{part}": drawn(hidden, hidden) for part in ("query", "key", "value")}
    layer_weights |= {
        "attention.output.dense": drawn(hidden, hidden),
        "intermediate.dense": drawn(ffn, hidden),
    }
    layer_weights["output.dense"] = drawn(hidden, ffn)
    weights = {
        "embeddings.word_embeddings.weight": drawn(VOCABULARY, hidden),
        "embeddings.token_type_embeddings.weight": drawn(2, hidden),
        "embeddings.position_embeddings.weight": drawn(CONTEXT, hidden),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(layers):
        stem = f"encoder.layer.{layer}"
        for part, values in layer_weights.items():
            weights[f"{stem}.{part}.weight"] = values
            weights[f"{stem}.{part}.bias"] = np.zeros(len(values), np.float32)
        weights |= norm(f"{stem}.attention.output.LayerNorm") | norm(f"{stem}.output.LayerNorm")
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "hidden_act": "gelu",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": CONTEXT,
        "layer_norm_eps": 1e-12,
        "type_vocab_size": 2,
        "vocab_size": VOCABULARY,
    }
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (kind, path) in enumerate(
            [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
        )
    ]
    pooling = {"word_embedding_dimension": hidden, "pooling_mode_cls_token": True}
    limit = {"max_seq_length": CONTEXT, "do_lower_case": False}
    for name, fields in (
        ("config.json", config),
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", limit),
    ):
        (folder / name).write_text(json.dumps(fields), encoding="utf-8")
    (folder / "tokenizer.json").write_text(tokenizer_of("bert-cls").to_str(), encoding="utf-8")

    yield f"{folder}: {layers} layers of {hidden}"


app = commands(__doc__, random_bert)

if __name__ == "__main__":
    app()

"""The tiny embedding models of `encoder_models` as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.models.encoder_models import (
    CASES,
    CONTEXT,
    HIDDEN,
    LONG_CONTEXT,
    MAX_TOKENS,
    NO,
    ROBERTA_SPECIAL,
    SPECIAL,
    YES,
    encoder_weights,
    has_pieces,
    pieces,
    words,
)

GGUF_OF = {
    "bert": "bert",
    "bert-cls": "bert",
    "xlm-roberta": "bert",
    "nomic-bert": "nomic-bert",
    "cross-bert": "bert",
    "bge-m3": "bert",
    "modernbert": "modern-bert",
    "jina-bert": "jina-bert-v2",
    "qwen3": "qwen3",
    "gemma3": "gemma-embedding",
    "qwen3-reranker": "qwen3",
}
RERANK_TEXT = "the is it? what {query} dog {document} is not one?"
"""The tiny reranker's template of a pair, as GGUF files have it."""


def write_encoder_gguf(path: Path, name: str, changes: Mapping[str, Any] | None = None) -> Path:
    """The same model as llama.cpp's converter would write it. changes: of metadata that it has, or more."""
    import gguf

    case, weights = CASES[name], encoder_weights(name)
    f = case.fields
    arch = GGUF_OF[name]
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_context_length(CONTEXT if case.max_tokens == MAX_TOKENS else LONG_CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(f["intermediate_size"])
    writer.add_block_count(f["num_hidden_layers"])
    writer.add_head_count(f["num_attention_heads"])
    pooling = {"mean": 1, "cls": 2, "lasttoken": 3, None: 4}[case.pooling]
    writer.add_uint32(f"{arch}.pooling_type", pooling)
    if "rms_norm_eps" in f:
        writer.add_layer_norm_rms_eps(f["rms_norm_eps"])
        writer.add_head_count_kv(f["num_key_value_heads"])
        writer.add_key_length(f["head_dim"])
        writer.add_value_length(f["head_dim"])
    else:
        writer.add_layer_norm_eps(float(f.get("layer_norm_eps", f.get("norm_eps"))))
        writer.add_causal_attention(False)
    if name == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    if name == "modernbert":
        writer.add_rope_freq_base(f["global_rope_theta"])
        writer.add_float32(f"{arch}.rope.freq_base_swa", f["local_rope_theta"])
        writer.add_sliding_window(f["local_attention"])
        writer.add_uint32(f"{arch}.attention.sliding_window_pattern", f["global_attn_every_n_layers"])
        writer.add_string(f"{arch}.hidden_activation", f["hidden_activation"])
    if name == "gemma3":
        writer.add_rope_freq_base(f["rope_theta"])
        writer.add_sliding_window(f["sliding_window"])
        pattern = [kind == "sliding_attention" for kind in f["layer_types"]]
        writer.add_array(f"{arch}.attention.sliding_window_pattern", pattern)
    if name == "qwen3-reranker":
        writer.add_string("tokenizer.chat_template.rerank", RERANK_TEXT)
        embedded = weights["embed_tokens.weight"]
        writer.add_tensor("cls.output.weight", embedded[[words().index(YES), words().index(NO)]])
    _write_gguf_vocabulary(writer, name)
    key = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    names = gguf.get_tensor_name_map(key, f["num_hidden_layers"])
    for theirs, values in weights.items():
        converted = _gguf_tensor(name, theirs, values, names)
        if converted is not None:
            writer.add_tensor(*converted)
    for key, value in (changes or {}).items():
        writer.kv_data[0].pop(key, None)
        add = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_gguf_vocabulary(writer: Any, name: str) -> None:
    if has_pieces(name):
        writer.add_tokenizer_model("t5")
        writer.add_token_list([token for token, _ in pieces()])
        writer.add_token_scores([score for _, score in pieces()])
        writer.add_token_types([3 if index < len(ROBERTA_SPECIAL) else 1 for index in range(len(pieces()))])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(3)
        return
    writer.add_tokenizer_model("bert")
    marked = [
        token if token in SPECIAL else token[2:] if token.startswith("##") else f"\u2581{token}"
        for token in words()
    ]
    writer.add_token_list(marked)
    writer.add_token_types([3 if token in SPECIAL else 1 for token in words()])
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_unk_token_id(1)


def _gguf_tensor(name: str, theirs: str, values: np.ndarray, names: Any) -> tuple[str, np.ndarray] | None:
    """names: gguf's map of names."""
    key = theirs.removeprefix("bert.")
    if key.startswith("pooler.") and CASES[name].pooling is not None:
        return None
    if key == "embeddings.position_embeddings.weight" and has_pieces(name):
        values = values[2:]
    if "_Dense/" in key:
        return f"dense_{key[0]}.weight", values
    if name == "gemma3" and key.endswith("norm.weight"):
        values = values + np.float32(1)
    stem, _, part = key.rpartition(".")
    of_ends = {"pooler.dense": f"cls.{part}", "classifier": f"cls.output.{part}"}
    listed = (names.get_name(prefix + key, (".weight", ".bias")) for prefix in ("", "model."))
    return of_ends.get(stem) or next(filter(None, listed)), np.atleast_1d(values.squeeze())

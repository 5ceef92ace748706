"""A GGUF file as a `ModelSource`: metadata to config, llama.cpp's tensor names to ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from phasewise.cython_kernels.blocks import BlockRows
from phasewise.cython_kernels.packing import Array, QuantRows
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.gguf_blocks import BLOCK_TYPES, decode_rows
from phasewise.serving.loaders.gguf_file import GgufHeader, TensorInfo, open_gguf
from phasewise.serving.loaders.source import ModelSource, RowReader, Rows, SourceFile, SourceTensor
from phasewise.serving.model import FrequencyFactors, LinearScaling, ModelConfig, RopeSpec, Scaling

T = TypeVar("T")

ARCHITECTURES = ("llama", "qwen2", "qwen3")  # Mistral's files call themselves llama
GLOBAL_NAMES = {"token_embd.weight": "embed", "output.weight": "lm_head", "output_norm.weight": "final_norm"}
LAYER_NAMES = {
    "attn_q.weight": "q", "attn_k.weight": "k", "attn_v.weight": "v", "attn_output.weight": "o",
    "ffn_gate.weight": "gate", "ffn_up.weight": "up", "ffn_down.weight": "down",
    "attn_norm.weight": "attn_norm", "ffn_norm.weight": "ffn_norm",
    "attn_q.bias": "q_bias", "attn_k.bias": "k_bias", "attn_v.bias": "v_bias",
    "attn_q_norm.weight": "q_norm", "attn_k_norm.weight": "k_norm",
}  # fmt: skip
ROPE_FACTORS = "rope_freqs.weight"
PERMUTED = re.compile(r"layers\.\d+\.([qk])(_bias)?")

# Tokens that end a turn whatever the metadata says: many files name only one of theirs.
END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|eom_id|>", "<|endoftext|>")


def open_gguf_model(path: Path, name: str) -> ModelSource:
    """Read the header of the file at `path`. The result holds it open: close it."""
    file, header = open_gguf(path)
    try:
        return _source(file, header, name)
    except BaseException:
        file.close()
        raise


def _source(file: SourceFile, header: GgufHeader, name: str) -> ModelSource:
    metadata = header.metadata
    if field(metadata, "split.count", int, 1) > 1:
        raise ModelError(
            f"{file.path} is one part of a split GGUF: merge the parts with llama-gguf-split --merge"
        )
    infos = {_our_name(theirs, file.path): info for theirs, info in header.tensors.items()}
    factors = infos.pop("rope_factors", None)
    config = _config(metadata, infos, None if factors is None else _factors(file, factors), file.path)
    return ModelSource(
        name=name,
        path=file.path,
        config=config,
        tensors={ours: _tensor(file, info, _heads(ours, config)) for ours, info in infos.items()},
        tokenizer_json=lambda: _tokenizer_json(metadata, file.path),
        tokenizer_kind=str(metadata.get("tokenizer.ggml.model", "none")),
        chat_template=field(metadata, "tokenizer.chat_template", str, None),
        close=file.close,
    )


def field(metadata: Mapping[str, Any], key: str, kind: type[T], default: T | None) -> Any:
    """metadata[key] if it has the type that such a key must have, `default` if it is absent."""
    value = metadata.get(key)
    if value is None:
        return default
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ModelError(f"the GGUF metadata {key!r} is {value!r:.60}: {kind.__name__} expected")
    return value


def _our_name(theirs: str, path: Path) -> str:
    if theirs == ROPE_FACTORS:
        return "rope_factors"
    if theirs in GLOBAL_NAMES:
        return GLOBAL_NAMES[theirs]
    match = re.fullmatch(r"blk\.(0|[1-9]\d{0,3})\.(.+)", theirs, re.ASCII)
    if match is None or match[2] not in LAYER_NAMES:
        raise ModelError(f"{path} has a tensor {theirs!r} that Llama and Qwen models do not use")
    return f"layers.{match[1]}.{LAYER_NAMES[match[2]]}"


def _config(
    metadata: Mapping[str, Any],
    infos: Mapping[str, TensorInfo],
    factors: tuple[float, ...] | None,
    path: Path,
) -> ModelConfig:
    architecture = field(metadata, "general.architecture", str, "nothing")
    if architecture not in ARCHITECTURES:
        raise ModelError(f"{path} holds a {architecture!r} model; {', '.join(ARCHITECTURES)} can run")
    if "embed" not in infos:
        raise ModelError(f"{path} lacks the tensor token_embd.weight")

    def get(key: str, kind: type[T], default: T | None = None) -> Any:
        return field(metadata, f"{architecture}.{key}", kind, default)

    if get("expert_count", int, 0):
        raise ModelError(f"{path} is a mixture of experts, which cannot run yet")
    heads, hidden = get("attention.head_count", int), get("embedding_length", int)
    head_dim = get("attention.key_length", int) or (hidden // heads if hidden and heads else None)
    if get("attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"{path} has keys and values of different length, which cannot run")
    return ModelConfig(
        architecture=architecture,
        n_layers=get("block_count", int),
        hidden=hidden,
        ffn=get("feed_forward_length", int),
        n_heads=heads,
        n_kv_heads=get("attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocab_size=infos["embed"].shape[0],
        context_length=get("context_length", int),
        norm_eps=get("attention.layer_norm_rms_epsilon", float, 1e-5),
        rope=RopeSpec(
            theta=get("rope.freq_base", float, 10000.0),
            dim=get("rope.dimension_count", int, head_dim),
            scaling=_scaling(get, factors),
        ),
        tied_embeddings="lm_head" not in infos,
        qk_norm=architecture == "qwen3",
        sliding_window=(get("attention.sliding_window", int) or None) if architecture == "llama" else None,
        bos_token_id=field(metadata, "tokenizer.ggml.bos_token_id", int, None),
        eos_token_ids=_eos_tokens(metadata),
        add_bos=_adds_bos(metadata),
    )


def _scaling(get: Callable[..., Any], factors: tuple[float, ...] | None) -> Scaling | None:
    kind = get("rope.scaling.type", str)
    if kind not in (None, "none", "linear"):
        raise ModelError(f"RoPE scaling {kind!r} is not supported; linear and Llama 3's are")
    older = get("rope.scale_linear", float)  # what files of 2023 say
    factor = get("rope.scaling.factor", float, older) if kind == "linear" else older
    if factor not in (None, 1.0):
        return LinearScaling(factor)
    return None if factors is None else FrequencyFactors(factors)


def _factors(file: SourceFile, info: TensorInfo) -> tuple[float, ...]:
    if len(info.shape) != 1 or info.type_name != "F32" or info.shape[0] > 1 << 10:
        raise ModelError(f"{file.path} has {ROPE_FACTORS} as {info.type_name} {info.shape}: unusable")
    return tuple(np.frombuffer(file.read(info.offset, info.n_bytes), "<f4").tolist())


def _eos_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    keys = ("eos_token_id", "eot_token_id", "eom_token_id")
    named = [field(metadata, f"tokenizer.ggml.{key}", int, None) for key in keys]
    tokens = field(metadata, "tokenizer.ggml.tokens", list, [])
    by_text = [tokens.index(text) for text in END_OF_TURN if text in tokens]
    return tuple(dict.fromkeys(token for token in (*named, *by_text) if token is not None))


def _adds_bos(metadata: Mapping[str, Any]) -> bool:
    """llama.cpp's defaults: SentencePiece vocabularies and Llama 3's begin with BOS unless told otherwise."""
    by_kind = metadata.get("tokenizer.ggml.model") == "llama" or metadata.get("tokenizer.ggml.pre") in (
        "llama3",
        "llama-v3",
        "llama-bpe",
    )
    return bool(field(metadata, "tokenizer.ggml.add_bos_token", bool, by_kind))


def _heads(name: str, config: ModelConfig) -> int:
    """How many heads' rows llama.cpp's converter interleaved; 0 where it left the order alone."""
    match = PERMUTED.fullmatch(name)
    if config.architecture != "llama" or match is None:
        return 0
    return config.n_heads if match[1] == "q" else config.n_kv_heads


def _tensor(file: SourceFile, info: TensorInfo, permuted_heads: int) -> SourceTensor:
    kind = BLOCK_TYPES.get(info.type_name)
    if kind is None:
        raise ModelError(
            f"{file.path} has {info.name} in {info.type_name}; readable are {', '.join(BLOCK_TYPES)}"
        )
    n_rows = info.shape[0] if len(info.shape) > 1 else 1
    row_bytes = info.n_bytes // n_rows

    if len(info.shape) == 1 and kind.form.is_quantised:
        raise ModelError(f"{file.path} has the vector {info.name} in {info.type_name}, which no writer does")

    def rows(start: int, stop: int) -> Rows:
        raw = file.read(info.offset + start * row_bytes, (stop - start) * row_bytes)
        return decode_rows(info.type_name, raw, stop - start)

    reader = rows if not permuted_heads else _half_split(rows, info.shape, permuted_heads)
    return SourceTensor(info.type_name, info.shape, info.n_bytes, kind.form, reader)


def _half_split(rows: RowReader, shape: tuple[int, ...], n_heads: int) -> RowReader:
    """Undo the converter's interleaving: our row (head, half, i) is the file's row (head, i, half)."""
    head_dim = shape[0] // n_heads

    def matrix_rows(start: int, stop: int) -> Rows:
        first = start // head_dim * head_dim
        heads = rows(first, -(-stop // head_dim) * head_dim)
        wanted = np.arange(start, stop)
        half, i = divmod(wanted % head_dim, head_dim // 2)
        return _take(heads, wanted // head_dim * head_dim + 2 * i + half - first)

    def vector_row(start: int, stop: int) -> Rows:
        bias = rows(start, stop)
        assert isinstance(bias, np.ndarray)
        return bias.reshape(n_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(1, -1)

    return matrix_rows if len(shape) > 1 else vector_row


def _take(rows: Rows, order: Array) -> Rows:
    if isinstance(rows, BlockRows):
        return rows.taken(order)
    if not isinstance(rows, QuantRows):
        return rows[order]
    mins = None if rows.mins is None else rows.mins[order]
    return replace(rows, q=rows.q[order], scales=rows.scales[order], mins=mins)


def _tokenizer_json(metadata: Mapping[str, Any], path: Path) -> str:
    from phasewise.serving.tokenizer import tokenizer_from_gguf

    return tokenizer_from_gguf(metadata)

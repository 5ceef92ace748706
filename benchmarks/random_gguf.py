"""A GGUF of random blocks in the shape of a real model: for speeds and loading, not for text.

    python benchmarks/random_gguf.py llama-8b SOURCE.gguf OUT.gguf

The tokenizer is that of SOURCE. Types are those of a Q4_K_M file: Q4_K, and Q6_K for half of the values, half
of the down projections and the output head; rows that are no multiple of 256 are in Q5_0. Blocks are made as
bytes, so that 4.9 GB take a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
from typer import Argument, BadParameter

from benchmarks.harness import Yielded, commands

BLOCK_BYTES = {
    gguf.GGMLQuantizationType.Q4_K: 144,
    gguf.GGMLQuantizationType.Q6_K: 210,
    gguf.GGMLQuantizationType.Q5_0: 22,
}
BLOCK_INPUTS = {kind: 32 if kind == gguf.GGMLQuantizationType.Q5_0 else 256 for kind in BLOCK_BYTES}
F16_SCALES = {
    gguf.GGMLQuantizationType.Q4_K: (0, 1),
    gguf.GGMLQuantizationType.Q6_K: (104,),
    gguf.GGMLQuantizationType.Q5_0: (0,),
}
"""Indices of the 16-bit words of a block that are float16 scales."""


@dataclass(frozen=True)
class Shape:
    architecture: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int | None
    """None: SOURCE's."""
    experts: int = 0
    chosen: int = 0
    latent: bool = False
    """Latent attention and routing as DeepSeek V2 Lite has them; `ffn` is an expert's width."""


KV_RANK, TURNED, KEYS, VALUES, SHARED, DENSE_FFN = 512, 64, 128, 128, 2, 10944
"""DeepSeek V2 Lite: numbers of a latent vector and of its pairs, of a head's query and value, shared experts,
and the width of the first layer."""

SHAPES = {
    "llama-8b": Shape("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-1b": Shape("llama", 2048, 16, 32, 8, 8192, None),
    "olmoe-7b": Shape("olmoe", 2048, 16, 16, 16, 1024, None, 64, 8),
    "deepseek-v2-lite": Shape("deepseek2", 2048, 27, 16, 1, 1408, 102400, 64, 6, latent=True),
    "deepseek-v2-lite-9-layers": Shape("deepseek2", 2048, 9, 16, 1, 1408, 102400, 64, 6, latent=True),
}


def random_blocks(
    rng: np.random.Generator, rows: int, inputs: int, kind: gguf.GGMLQuantizationType
) -> np.ndarray:
    """uint8 [rows, bytes of a row]: any codes and sub-scales, small float16 scales."""
    blocks = rng.bytes(rows * (inputs // BLOCK_INPUTS[kind]) * BLOCK_BYTES[kind])
    words = np.frombuffer(blocks, np.uint16).reshape(-1, BLOCK_BYTES[kind] // 2).copy()
    for at in F16_SCALES[kind]:
        words[:, at] = np.float16(2e-5).view(np.uint16)
    return words.view(np.uint8).reshape(rows, -1)


def latent_layer(s: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Tensors of a layer of DeepSeek V2 Lite, its norms of the stream apart."""
    b, stack = f"blk.{layer}.", (s.experts,)
    yield b + "attn_q.weight", (s.heads * (KEYS + TURNED), s.hidden), "small"
    yield b + "attn_kv_a_mqa.weight", (KV_RANK + TURNED, s.hidden), "small"
    yield b + "attn_kv_a_norm.weight", (KV_RANK,), "f32"
    yield b + "attn_k_b.weight", (s.heads, KV_RANK, KEYS), "narrow"
    yield b + "attn_v_b.weight", (s.heads, VALUES, KV_RANK), "small"
    yield b + "attn_output.weight", (s.hidden, s.heads * VALUES), "small"
    if layer == 0:
        yield b + "ffn_gate.weight", (DENSE_FFN, s.hidden), "small"
        yield b + "ffn_up.weight", (DENSE_FFN, s.hidden), "small"
        yield b + "ffn_down.weight", (s.hidden, DENSE_FFN), "narrow"
        return
    yield b + "ffn_gate_inp.weight", (s.experts, s.hidden), "f32"
    yield b + "ffn_gate_exps.weight", (*stack, s.ffn, s.hidden), "small"
    yield b + "ffn_up_exps.weight", (*stack, s.ffn, s.hidden), "small"
    yield b + "ffn_down_exps.weight", (*stack, s.hidden, s.ffn), "narrow"
    yield b + "ffn_gate_shexp.weight", (SHARED * s.ffn, s.hidden), "small"
    yield b + "ffn_up_shexp.weight", (SHARED * s.ffn, s.hidden), "small"
    yield b + "ffn_down_shexp.weight", (s.hidden, SHARED * s.ffn), "small"


def write_latent_settings(s: Shape, writer: gguf.GGUFWriter) -> None:
    writer.add_key_length(KV_RANK + TURNED)
    writer.add_value_length(KV_RANK)
    writer.add_key_length_mla(KEYS + TURNED)
    writer.add_value_length_mla(VALUES)
    writer.add_rope_dimension_count(TURNED)
    writer.add_kv_lora_rank(KV_RANK)
    if s.layers != 27:  # llama.cpp asks for it elsewhere
        writer.add_q_lora_rank(0)
    writer.add_leading_dense_block_count(1)
    writer.add_expert_feed_forward_length(s.ffn)
    writer.add_expert_shared_count(SHARED)
    writer.add_expert_weights_scale(1.0)


def tensors(s: Shape, vocab: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, shapes (outputs first), and `small` (Q4_K), `large` (Q6_K), `narrow` (Q5_0) or `f32`."""
    head = s.hidden // s.heads
    yield "token_embd.weight", (vocab, s.hidden), "small"
    yield "output.weight", (vocab, s.hidden), "large"
    yield "output_norm.weight", (s.hidden,), "f32"
    for i in range(s.layers):
        b, half = f"blk.{i}.", "large" if i % 2 else "small"
        yield b + "attn_norm.weight", (s.hidden,), "f32"
        yield b + "ffn_norm.weight", (s.hidden,), "f32"
        if s.latent:
            yield from latent_layer(s, i)
            continue
        yield b + "attn_q.weight", (s.hidden, s.hidden), "small"
        yield b + "attn_k.weight", (s.kv_heads * head, s.hidden), "small"
        yield b + "attn_v.weight", (s.kv_heads * head, s.hidden), half
        yield b + "attn_output.weight", (s.hidden, s.hidden), "small"
        if s.experts:
            yield b + "attn_q_norm.weight", (s.hidden,), "f32"
            yield b + "attn_k_norm.weight", (s.kv_heads * head,), "f32"
            yield b + "ffn_gate_inp.weight", (s.experts, s.hidden), "f32"
        end = "_exps.weight" if s.experts else ".weight"
        stack = (s.experts,) if s.experts else ()
        yield b + "ffn_gate" + end, (*stack, s.ffn, s.hidden), "small"
        yield b + "ffn_up" + end, (*stack, s.ffn, s.hidden), "small"
        yield b + "ffn_down" + end, (*stack, s.hidden, s.ffn), half


def copy_tokenizer(reader: gguf.GGUFReader, writer: gguf.GGUFWriter, vocab: int) -> None:
    """The source's, with unused tokens up to `vocab`."""
    for field in reader.fields.values():
        if not field.name.startswith("tokenizer."):
            continue
        value: Any = field.contents()
        if field.types[0] != gguf.GGUFValueType.ARRAY:
            writer.add_key_value(field.name, value, field.types[0])
            continue
        if field.name == "tokenizer.ggml.tokens":
            value = value + [f"<unused_{i}>" for i in range(vocab - len(value))]
        elif field.name == "tokenizer.ggml.token_type":
            value = value + [5] * (vocab - len(value))
        elif field.name == "tokenizer.ggml.scores":
            value = value + [0.0] * (vocab - len(value))
        writer.add_array(field.name, value)


def random_gguf(
    shape: Annotated[str, Argument(help=", ".join(SHAPES))],
    source: Annotated[Path, Argument(help="a GGUF file")],
    out: Annotated[Path, Argument()],
) -> Yielded:
    if shape not in SHAPES:
        raise BadParameter(f"{shape} is none of {', '.join(SHAPES)}")
    s, reader, rng = SHAPES[shape], gguf.GGUFReader(source), np.random.default_rng(1)
    vocab = s.vocab or len(reader.fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(out, s.architecture)
    copy_tokenizer(reader, writer, vocab)
    writer.add_name(f"random {shape}")
    writer.add_context_length(8192)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(DENSE_FFN if s.latent else s.ffn)
    writer.add_head_count(s.heads)
    writer.add_head_count_kv(s.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(500000.0)
    if s.latent:
        write_latent_settings(s, writer)
    else:
        writer.add_rope_dimension_count(s.hidden // s.heads)
    writer.add_vocab_size(vocab)
    if s.experts:
        writer.add_expert_count(s.experts)
        writer.add_expert_used_count(s.chosen)
    kinds = {
        "small": gguf.GGMLQuantizationType.Q4_K,
        "large": gguf.GGMLQuantizationType.Q6_K,
        "narrow": gguf.GGMLQuantizationType.Q5_0,
    }
    plan = list(tensors(s, vocab))
    for name, dims, kind in plan:
        if kind == "f32":
            writer.add_tensor_info(name, dims, np.dtype(np.float32), int(np.prod(dims)) * 4)
        else:
            inputs, block_bytes = BLOCK_INPUTS[kinds[kind]], BLOCK_BYTES[kinds[kind]]
            n_bytes = int(np.prod(dims)) // inputs * block_bytes
            packed = (*dims[:-1], dims[-1] // inputs * block_bytes)
            writer.add_tensor_info(name, packed, np.dtype(np.uint8), n_bytes, raw_dtype=kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, dims, kind in plan:
        if kind != "f32":
            rows = int(np.prod(dims[:-1]))
            writer.write_tensor_data(random_blocks(rng, rows, dims[-1], kinds[kind]))
        elif len(dims) == 1:
            writer.write_tensor_data(np.ones(dims, np.float32))
        else:
            writer.write_tensor_data(rng.standard_normal(dims, dtype=np.float32) * np.float32(0.02))
    writer.close()
    yield f"{out}: {s.layers} layers of {s.hidden}"


app = commands(__doc__, random_gguf)

if __name__ == "__main__":
    app()

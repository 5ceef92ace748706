"""A GGUF of random blocks in the shape of a real model: for speeds and loading, not for text.

    python benchmarks/random_gguf.py llama-8b SOURCE.gguf OUT.gguf
    python benchmarks/random_gguf.py llama-1b SOURCE.gguf OUT.gguf --type Q8_0

The tokenizer is that of SOURCE. Types are those of a Q4_K_M file: Q4_K, and Q6_K for half of the values, half
of the down projections and the output head; rows that are no multiple of 256 are in Q5_0. With `--type` all
matrices are of that one. Blocks are made as bytes, so that 4.9 GB take a minute.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gguf
import numpy as np
from typer import Argument, BadParameter, Option

from benchmarks.harness import Yielded, commands

Type = gguf.GGMLQuantizationType
F16_SCALES = {Type.Q4_K: (0, 1), Type.Q6_K: (104,), Type.Q5_0: (0,), Type.Q8_0: (0,), Type.Q4_0: (0,)}
"""Indices of the 16-bit words of a block that are float16 scales."""
MIXED = "Q4_K_M"
TYPES = {
    MIXED: gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
}
"""Numbers that a file's header states; OpenVINO reads no file without."""


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
    mamba: bool = False
    """Mamba 2 in all layers but each tenth, as Granite 4 H has it."""


KV_RANK, TURNED, KEYS, VALUES, SHARED, DENSE_FFN = 512, 64, 128, 128, 2, 10944
"""DeepSeek V2 Lite: numbers of a latent vector and of its pairs, of a head's query and value, shared experts,
and the width of the first layer."""

VALUE_DIM, STATE_KEYS, TAPS = 64, 128, 4
"""Granite 4 H: numbers of a head's value and key in layers with a state, and taps of their convolution."""

SHAPES = {
    "llama-8b": Shape("llama", 4096, 32, 32, 8, 14336, 128256),
    "llama-1b": Shape("llama", 2048, 16, 32, 8, 8192, None),
    "olmoe-7b": Shape("olmoe", 2048, 16, 16, 16, 1024, None, 64, 8),
    "granite-4-h-1b": Shape("granitehybrid", 1536, 40, 12, 4, 4096, 100352, mamba=True),
    "deepseek-v2-lite": Shape("deepseek2", 2048, 27, 16, 1, 1408, 102400, 64, 6, latent=True),
    "deepseek-v2-lite-9-layers": Shape("deepseek2", 2048, 9, 16, 1, 1408, 102400, 64, 6, latent=True),
}


def row_bytes(inputs: int, kind: Type) -> int:
    block_inputs, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    return inputs // block_inputs * block_bytes


def random_blocks(rng: np.random.Generator, rows: int, inputs: int, kind: Type) -> np.ndarray:
    """uint8 [rows, bytes of a row]: any codes and sub-scales, small float16 scales; bf16 about 0.02."""
    if kind == Type.BF16:
        values = rng.standard_normal((rows, inputs), dtype=np.float32) * np.float32(0.02)
        return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
    blocks = rng.bytes(rows * row_bytes(inputs, kind))
    words = np.frombuffer(blocks, np.uint16).reshape(-1, gguf.GGML_QUANT_SIZES[kind][1] // 2).copy()
    for column in F16_SCALES[kind]:
        words[:, column] = np.float16(2e-5).view(np.uint16)
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


def keeps_state(s: Shape, layer: int) -> bool:
    return s.mamba and layer % 10 != 5


def state_layer(s: Shape, layer: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Tensors of a layer with a state, its norms of the stream and its feed-forward layer apart."""
    b, values = f"blk.{layer}.", 2 * s.hidden
    channels, heads = values + 2 * STATE_KEYS, values // VALUE_DIM
    yield b + "ssm_in.weight", (values + channels + heads, s.hidden), "small"
    yield b + "ssm_conv1d.weight", (channels, TAPS), "f32"
    yield b + "ssm_conv1d.bias", (channels,), "f32"
    yield b + "ssm_dt.bias", (heads,), "f32"
    yield b + "ssm_a", (heads, 1), "minus"
    yield b + "ssm_d", (heads, 1), "f32"
    yield b + "ssm_norm.weight", (1, values), "f32"
    yield b + "ssm_out.weight", (s.hidden, values), "small"


def write_mamba_settings(s: Shape, writer: gguf.GGUFWriter) -> None:
    writer.add_head_count_kv([s.kv_heads * (not keeps_state(s, layer)) for layer in range(s.layers)])
    writer.add_ssm_conv_kernel(TAPS)
    writer.add_ssm_state_size(STATE_KEYS)
    writer.add_ssm_group_count(1)
    writer.add_ssm_time_step_rank(2 * s.hidden // VALUE_DIM)
    writer.add_ssm_inner_size(2 * s.hidden)
    writer.add_rope_scaling_finetuned(False)
    writer.add_embedding_scale(12.0)
    writer.add_residual_scale(0.22)
    writer.add_attention_scale(0.0078125)
    writer.add_logit_scale(8.0)


def tensors(s: Shape, vocab: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, shapes (outputs first), and `small` (Q4_K), `large` (Q6_K), `narrow` (Q5_0), `f32` or, of f32,
    `minus` one."""
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
        if keeps_state(s, i):
            yield from state_layer(s, i)
        else:
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
    one_type: Annotated[str, Option("--type", help=", ".join(TYPES))] = MIXED,
) -> Yielded:
    for given, allowed in ((shape, SHAPES), (one_type, TYPES)):
        if given not in allowed:
            raise BadParameter(f"{given} is none of {', '.join(allowed)}")
    s, reader, rng = SHAPES[shape], gguf.GGUFReader(source), np.random.default_rng(1)
    vocab = s.vocab or len(reader.fields["tokenizer.ggml.tokens"].data)
    writer = gguf.GGUFWriter(out, s.architecture)
    copy_tokenizer(reader, writer, vocab)
    writer.add_name(f"random {shape}")
    writer.add_file_type(TYPES[one_type])
    writer.add_context_length(8192)
    writer.add_embedding_length(s.hidden)
    writer.add_block_count(s.layers)
    writer.add_feed_forward_length(DENSE_FFN if s.latent else s.ffn)
    writer.add_head_count(s.heads)
    if s.mamba:
        write_mamba_settings(s, writer)
    else:
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
    kinds = {"small": Type.Q4_K, "large": Type.Q6_K, "narrow": Type.Q5_0}
    if one_type != MIXED:
        kinds = dict.fromkeys(kinds, Type[one_type])
    plan = list(tensors(s, vocab))
    for name, dims, kind in plan:
        if kind in ("f32", "minus"):
            writer.add_tensor_info(name, dims, np.dtype(np.float32), int(np.prod(dims)) * 4)
        else:
            packed = (*dims[:-1], row_bytes(dims[-1], kinds[kind]))
            writer.add_tensor_info(
                name, packed, np.dtype(np.uint8), int(np.prod(packed)), raw_dtype=kinds[kind]
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, dims, kind in plan:
        if kind == "minus":
            writer.write_tensor_data(-np.ones(dims, np.float32))
        elif kind != "f32":
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

"""Tiny random models for tests, as GGUF files and as Hugging Face directories.

The same `TinyShape` and seed give the same model in both formats (before quantisation), so a test may hold
one loader against the other, or the engine against itself."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

GGML_TYPES = {
    "F32": (0, 1, 4), "F16": (1, 1, 2), "Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22),
    "Q5_1": (7, 32, 24), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176),
    "Q6_K": (14, 256, 210), "BF16": (30, 1, 2), "Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110),
    "IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "MXFP4": (39, 32, 17), "IQ2_XXS": (16, 256, 66),
    "IQ2_XS": (17, 256, 74), "IQ3_XXS": (18, 256, 98), "IQ1_S": (19, 256, 50), "IQ3_S": (21, 256, 110),
    "IQ2_S": (22, 256, 82), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66),
    "NVFP4": (40, 64, 36), "Q1_0": (41, 128, 18), "Q2_0": (42, 64, 18),
}  # fmt: skip  # name: id, values per block, bytes per block
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,),
             "IQ4_XS": (0,), "MXFP4": (), "IQ2_XXS": (0,), "IQ2_XS": (0,), "IQ2_S": (0,), "IQ3_XXS": (0,),
             "IQ3_S": (0,), "IQ1_S": (0,), "TQ1_0": (52,), "TQ2_0": (64,),
             "NVFP4": (), "Q1_0": (0,), "Q2_0": (0,)}  # fmt: skip
"""Offsets of the float16 scales in blocks of the types that gguf cannot write."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny model. The vocabulary is 3 special tokens, 256 bytes and then unused ones."""

    n_layers: int = 2
    hidden: int = 64
    ffn: int = 96
    n_heads: int = 4
    n_kv_heads: int = 2
    head_dim: int = 16
    vocab_size: int = 272
    context_length: int = 256
    tied: bool = True


def tiny_weights(architecture: str, shape: TinyShape = TinyShape(), seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor in float32 by its Hugging Face name, in Hugging Face row order."""
    rng = np.random.default_rng(seed)

    def matrix(n: int, k: int) -> np.ndarray:
        return rng.standard_normal((n, k), dtype=np.float32) / np.float32(np.sqrt(k))

    def norm(n: int) -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    weights = {"model.embed_tokens.weight": matrix(shape.vocab_size, shape.hidden)}
    for i in range(shape.n_layers):
        layer = {
            "self_attn.q_proj.weight": matrix(q, shape.hidden),
            "self_attn.k_proj.weight": matrix(kv, shape.hidden),
            "self_attn.v_proj.weight": matrix(kv, shape.hidden),
            "self_attn.o_proj.weight": matrix(shape.hidden, q),
            "mlp.gate_proj.weight": matrix(shape.ffn, shape.hidden),
            "mlp.up_proj.weight": matrix(shape.ffn, shape.hidden),
            "mlp.down_proj.weight": matrix(shape.hidden, shape.ffn),
            "input_layernorm.weight": norm(shape.hidden),
            "post_attention_layernorm.weight": norm(shape.hidden),
        }
        if architecture == "qwen2":
            layer |= {
                f"self_attn.{name}_proj.bias": norm(n) - 1 for name, n in (("q", q), ("k", kv), ("v", kv))
            }
        if architecture == "qwen3":
            layer |= {f"self_attn.{name}_norm.weight": norm(shape.head_dim) for name in "qk"}
        weights |= {f"model.layers.{i}.{name}": value for name, value in layer.items()}
    weights["model.norm.weight"] = norm(shape.hidden)
    if not shape.tied:
        weights["lm_head.weight"] = matrix(shape.vocab_size, shape.hidden)
    return weights


def byte_characters() -> list[str]:
    """GPT-2's printable stand-ins for the 256 bytes, in byte order."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def vocabulary(shape: TinyShape) -> list[str]:
    tokens = [*SPECIAL_TOKENS, *byte_characters()]
    return tokens + [f"<unused{i}>" for i in range(shape.vocab_size - len(tokens))]


@dataclass
class GgufWriter:
    """Collects metadata and tensors and lays out a GGUF v3 file. Checks nothing: tests want bad ones too."""

    metadata: dict[str, tuple[int, bytes]] = field(default_factory=dict)
    tensors: list[tuple[str, tuple[int, ...], int, bytes]] = field(default_factory=list)
    alignment: int = 32

    def add(self, key: str, value: Any) -> None:
        self.metadata[key] = encode_value(value)

    def add_tensor(self, name: str, values: np.ndarray, type_name: str, seed: int = 0) -> None:
        self.tensors.append(
            (name, values.shape, GGML_TYPES[type_name][0], encode_blocks(values, type_name, seed))
        )

    def to_bytes(self) -> bytes:
        out = b"GGUF" + struct.pack("<IQQ", 3, len(self.tensors), len(self.metadata))
        for key, (kind, raw) in self.metadata.items():
            out += _string(key) + struct.pack("<I", kind) + raw
        data = b""
        for name, shape, kind, raw in self.tensors:
            dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
            out += _string(name) + dims + struct.pack("<IQ", kind, len(data))
            data += raw + bytes(-len(raw) % self.alignment)
        return out + bytes(-len(out) % self.alignment) + data


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def encode_value(value: Any) -> tuple[int, bytes]:
    """Type number and bytes of a metadata value: uint32, float32, bool, string, or an array of one."""
    match value:
        case bool():
            return 7, struct.pack("<?", value)
        case int():
            return 4, struct.pack("<I", value)
        case float():
            return 6, struct.pack("<f", value)
        case str():
            return 8, _string(value)
    encoded = [encode_value(item) for item in value]
    kind = encoded[0][0] if encoded else 8
    return 9, struct.pack("<IQ", kind, len(encoded)) + b"".join(raw for _, raw in encoded)


def encode_blocks(values: np.ndarray, type_name: str, seed: int = 0) -> bytes:
    """The tensor in a GGUF type; types that gguf cannot write get random blocks of sane scales."""
    if type_name in SCALES_AT:
        return _random_blocks(values.size // GGML_TYPES[type_name][1], type_name, seed).tobytes()
    from gguf import GGMLQuantizationType, quants

    return np.ascontiguousarray(quants.quantize(values, GGMLQuantizationType[type_name])).tobytes()


def _random_blocks(n_blocks: int, type_name: str, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (n_blocks, GGML_TYPES[type_name][2]), dtype=np.uint8)
    if type_name == "MXFP4":
        blocks[:, 0] = rng.integers(116, 121, n_blocks)
    if type_name == "NVFP4":
        blocks[:, :4] = rng.integers(1, 24, (n_blocks, 4))
    for offset in SCALES_AT[type_name]:
        scale = (rng.uniform(1e-5, 2e-4, n_blocks)).astype(np.float16)
        blocks[:, offset : offset + 2] = scale.view(np.uint8).reshape(-1, 2)
    return blocks


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip


def gguf_name(hf_name: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"


def interleave_heads(values: np.ndarray, n_heads: int) -> np.ndarray:
    """The q or k rows of a Llama model in the order that llama.cpp's converter gives them."""
    split = values.reshape(n_heads, 2, values.shape[0] // n_heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def tiny_gguf(
    architecture: str = "llama",
    types: str | Mapping[str, str] = "F32",
    shape: TinyShape = TinyShape(),
    seed: int = 0,
    metadata: Mapping[str, Any] | None = None,
) -> GgufWriter:
    """A writer holding a whole model. `types` is one type for all matrices, or by part of a GGUF tensor name
    ("attn_v": "Q6_K", "": the rest). `metadata` adds keys, replaces them, or with None removes them."""
    prefix = architecture
    fields: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": "tiny",
        f"{prefix}.block_count": shape.n_layers,
        f"{prefix}.context_length": shape.context_length,
        f"{prefix}.embedding_length": shape.hidden,
        f"{prefix}.feed_forward_length": shape.ffn,
        f"{prefix}.attention.head_count": shape.n_heads,
        f"{prefix}.attention.head_count_kv": shape.n_kv_heads,
        f"{prefix}.attention.key_length": shape.head_dim,
        f"{prefix}.attention.value_length": shape.head_dim,
        f"{prefix}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{prefix}.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": vocabulary(shape),
        "tokenizer.ggml.token_type": [3] * 3 + [1] * 256 + [5] * (shape.vocab_size - 259),
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    fields |= metadata or {}
    writer = GgufWriter()
    for key, value in fields.items():
        if value is not None:
            writer.add(key, value)
    by_name = {"": types} if isinstance(types, str) else {"": "F32", **types}
    for index, (name, values) in enumerate(tiny_weights(architecture, shape, seed).items()):
        heads = {"q": shape.n_heads, "k": shape.n_kv_heads}.get(name.rpartition("_proj")[0][-1:], 0)
        if architecture == "llama" and heads:
            values = interleave_heads(values, heads)
        theirs = gguf_name(name)
        chosen = next(kind for part, kind in sorted(by_name.items(), reverse=True) if part in theirs)
        writer.add_tensor(theirs, values, "F32" if values.ndim == 1 else chosen, seed + index)
    return writer


def write_tiny_gguf(
    path: Path, architecture: str = "llama", types: str | Mapping[str, str] = "F32", **more: Any
) -> Path:
    """Write `tiny_gguf(architecture, types, ...)` to `path` and return it."""
    path.write_bytes(tiny_gguf(architecture, types, **more).to_bytes())
    return path


def write_calibration(path: Path) -> Path:
    """400 characters of a text to calibrate and to evaluate with."""
    path.write_text("".join(chr(32 + i * 7 % 90) for i in range(400)))
    return path


def file_of(tensors: Mapping[str, tuple[str, np.ndarray]]) -> bytes:
    """A safetensors file: by name the file's word for a type, and the bytes as numpy has them."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, values) in tensors.items():
        raw = np.ascontiguousarray(values).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def safetensors_bytes(weights: Mapping[str, np.ndarray], dtype: str = "float32") -> bytes:
    """A safetensors file of this type; tensors of whole numbers stay what they are."""

    def of(values: np.ndarray) -> tuple[str, np.ndarray]:
        if values.dtype == np.int64:
            return "I64", values
        if dtype == "bfloat16":
            from phasewise.cython_kernels.packing import to_bf16

            return "BF16", to_bf16(values)
        return {"float32": "F32", "float16": "F16"}[dtype], values.astype(dtype)

    return file_of({name: of(values) for name, values in weights.items()})


def hf_config(architecture: str, shape: TinyShape = TinyShape()) -> dict[str, Any]:
    return {
        "architectures": [f"{architecture.capitalize()}ForCausalLM"],
        "model_type": architecture,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_length,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tokenizer_json(shape: TinyShape = TinyShape()) -> str:
    """A byte-level BPE without merges: every byte is one token."""
    tokens = vocabulary(shape)
    added = [
        {"id": i, "content": text, "special": i < 3, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for i, text in enumerate(tokens)
        if i < 3 or i >= 259
    ]  # fmt: skip
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(tokens)}, "merges": [],
        },
    }  # fmt: skip
    return json.dumps(fields)


def write_tiny_hf(
    directory: Path,
    architecture: str = "llama",
    dtype: str = "float32",
    shards: int = 1,
    shape: TinyShape = TinyShape(),
    seed: int = 0,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a whole model directory and return it; `config` adds to or replaces fields of config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(architecture, shape, seed)
    files = {
        "config.json": json.dumps({**hf_config(architecture, shape), **(config or {})}),
        "generation_config.json": json.dumps({"eos_token_id": [2, 0]}),
        "tokenizer.json": tokenizer_json(shape),
        "tokenizer_config.json": json.dumps({"chat_template": CHAT_TEMPLATE, "add_bos_token": False}),
    }
    for name, text in files.items():
        (directory / name).write_text(text)
    if shards == 1:
        (directory / "model.safetensors").write_bytes(safetensors_bytes(weights, dtype))
        return directory
    names = list(weights)
    weight_map = {
        name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)
    }
    for shard in sorted(set(weight_map.values())):
        part = {name: weights[name] for name in names if weight_map[name] == shard}
        (directory / shard).write_bytes(safetensors_bytes(part, dtype))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def write_sparse_hf(directory: Path, shape: TinyShape, zeros: float) -> Path:
    """A directory of bfloat16 weights of which that share is zero in every projection of the layers."""
    write_tiny_hf(directory, "llama", shape=shape)
    rng = np.random.default_rng(0)
    weights = tiny_weights("llama", shape)
    for name, w in weights.items():
        if "proj" in name:
            w[rng.random(w.shape) < zeros] = 0
    (directory / "model.safetensors").write_bytes(safetensors_bytes(weights, "bfloat16"))
    return directory

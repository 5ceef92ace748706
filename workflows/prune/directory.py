"""The files of a pruned model's Hugging Face directory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import packing
from phasewise.serving.loaders.families.family import ACTIVATION_NAMES
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.workflows.errors import WorkflowError

if TYPE_CHECKING:
    from phasewise.serving.loaders.source import ModelSource
    from phasewise.serving.models.packed_model import ModelConfig

Array = npt.NDArray[Any]

HEADER_BYTES_A_TENSOR = 256
COPIED = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "chat_template.jinja")
CLASSES = {
    "arcee": "ArceeForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
WRITABLE = tuple(CLASSES)


@dataclass(frozen=True)
class Tensor:
    """A tensor to write. dtype: the safetensors name of the type that `array` holds."""

    name: str
    dtype: str
    array: Array


def check_family(source: ModelSource) -> None:
    """Raise WorkflowError for a model whose tensors could not be read back from a plain directory."""
    architecture = source.config.architecture
    if architecture not in WRITABLE or source.config.experts is not None:
        raise WorkflowError(
            f"{source.name} is a {architecture} model: prune writes {', '.join(WRITABLE)} without experts"
        )


def write_texts(source: ModelSource, directory: Path, sparsity: Mapping[str, Any] | None) -> None:
    """Write config and tokenizer. sparsity: config.json's entry for compressed tensors; None: dense."""
    if source.path.is_dir():
        theirs = ModelDirectory(source.path)
        config = theirs.json("config.json") or {}
        for name in filter(theirs.has, COPIED):
            (directory / name).write_text(theirs.text(name), encoding="utf-8")
    else:
        config = config_fields(source.config)
        tokenizer: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_bos_token": source.config.add_bos,
        }
        if source.chat_template is not None:
            tokenizer["chat_template"] = source.chat_template
        _write_json(directory / "tokenizer_config.json", tokenizer)
    config.pop("quantization_config", None)
    config |= {"torch_dtype": "bfloat16"}
    if sparsity is not None:
        config["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "format": "dense",
            "sparsity_config": dict(sparsity),
        }
    _write_json(directory / "config.json", config)
    (directory / "tokenizer.json").write_text(source.tokenizer_json(), encoding="utf-8")


def config_fields(config: ModelConfig) -> dict[str, Any]:
    """config.json of a model of one of the WRITABLE families."""
    if config.rope.scaling is not None:
        raise WorkflowError(
            "a GGUF file with scaled RoPE cannot be written as a directory: give the directory"
        )
    eos = list(config.eos_token_ids)
    return {
        "architectures": [CLASSES[config.architecture]],
        "model_type": config.architecture,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "hidden_act": ACTIVATION_NAMES[config.activation][0],
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
    }


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tensors(path: Path, tensors: Iterable[Tensor], most: int) -> None:
    """Write a safetensors file of at most `most` tensors, one in memory at a time.

    Room is left for the header, which precedes the tensors and states their sizes, until they are written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    room, offset = HEADER_BYTES_A_TENSOR * (most + 1), 0
    with path.open("wb") as file:
        file.seek(8 + room)
        for tensor in tensors:
            data = np.ascontiguousarray(tensor.array).tobytes()
            places = {"shape": list(tensor.array.shape), "data_offsets": [offset, offset + len(data)]}
            header[tensor.name] = {"dtype": tensor.dtype, **places}
            offset += file.write(data)
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > room:
            raise WorkflowError(f"{len(header) - 1} tensors have names of more than {room} bytes")
        file.seek(0)
        file.write(struct.pack("<Q", room) + text.ljust(room))
        file.flush()
        os.fsync(file.fileno())


def bitmask_tensors(name: str, bits: Array) -> list[Tensor]:
    """Encode bf16 bits (uint16 [n, k]) in compressed-tensors' `sparse-bitmask` layout."""
    kept = bits != 0
    stem = name.removesuffix(".weight")
    counts = kept.sum(axis=1, dtype=np.int64)
    return [
        Tensor(f"{stem}.shape", "I64", np.array(bits.shape, np.int64)),
        Tensor(f"{stem}.compressed", "BF16", bits[kept]),
        Tensor(f"{stem}.bitmask", "U8", np.packbits(kept, axis=1, bitorder="little")),
        Tensor(f"{stem}.row_offsets", "I64", np.cumsum(counts) - counts),
    ]


def bf16_bits(w: Array) -> Array:
    """Round float32 to bf16 bits (uint16), -0 as +0."""
    bits = packing.to_bf16(w)
    bits[bits == np.uint16(0x8000)] = 0
    return bits

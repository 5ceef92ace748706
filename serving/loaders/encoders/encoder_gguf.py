"""A GGUF file of an encoder: metadata to config, llama.cpp's tensor names to ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import CutFor, our_tensors
from phasewise.serving.loaders.encoders.encoder_layout import adapted
from phasewise.serving.loaders.families.bert import (
    GGUF_GLOBAL_NAMES,
    GGUF_NAMES,
    HF_ACTIVATIONS,
    EncoderFamily,
    encoder_config,
)
from phasewise.serving.loaders.formats.gguf_file import TensorInfo
from phasewise.serving.loaders.layout import shapes_of_all
from phasewise.serving.loaders.source import SourceTensor
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import ModelConfig

ReadField = Callable[[str, Any, Any], Any]
"""(key, type, default): a value of the metadata, checked."""

POOLINGS = {1: "mean", 2: "first", 3: "last", 4: "first"}  # the last one is "rank", a cross-encoder's
RANK = 4
_KEYS = {  # of config.json, which `encoder_config` asks for
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}


def config_of(
    family: EncoderFamily, read: ReadField, infos: Mapping[str, TensorInfo], what: str
) -> ModelConfig:
    """From the metadata; the vocabulary and the position embeddings tell their own sizes."""
    if "token_embd.weight" not in infos:
        raise ModelError(f"{what} lacks the tensor token_embd.weight")
    if read(f"{family.gguf}.attention.causal", bool, False):
        raise ModelError(f"{what} holds a decoder of this family; encoders can run")

    def get(key: str, kind: Any, default: Any = None) -> Any:
        if key == "vocab_size":
            return infos["token_embd.weight"].shape[0]
        if key == "type_vocab_size":
            return 2 if "token_types.weight" in infos else 0
        return read(f"{family.gguf}.{_KEYS[key]}", kind, default)

    assert family.gguf is not None
    scores = pooling_type(family.gguf, read) == RANK
    if scores and not family.gguf_scores:
        raise ModelError(f"{what} holds a {family.name} classifier, whose head cannot run")
    named = read(f"{family.gguf}.hidden_activation", str, None)
    if named is not None and HF_ACTIVATIONS.get(named) not in family.activations:
        raise ModelError(f"{what} asks for the activation {named!r:.60}, which cannot run")
    plain = encoder_config(
        family,
        get,
        context_length=read(f"{family.gguf}.context_length", int, None),
        activation=family.activations[0] if named is None else HF_ACTIVATIONS[named],
        scores=scores,
    )

    def get_more(key: str, kind: Any, default: Any = None) -> Any:
        return read(f"{family.gguf}.{key}", kind, default)

    return family.from_gguf(get_more, plain)


def pooling_type(architecture: str, read: ReadField) -> int | None:
    """The number that the metadata give; None where they give none, or no pooling."""
    pooling: int | None = read(f"{architecture}.pooling_type", int, None)
    return pooling or None


def embedding_of(
    architecture: str, read: ReadField, context_length: int, *, encoder: bool
) -> Embedding | None:
    """The pooling of rows to a vector of length 1; None for a decoder whose file says nothing of it."""
    pooling = pooling_type(architecture, read)
    if pooling is None:
        return Embedding("mean", True, context_length) if encoder else None
    if pooling not in POOLINGS:
        raise ModelError(
            f"the GGUF metadata ask for pooling type {pooling}; {', '.join(map(str, POOLINGS))} can run"
        )
    return Embedding(POOLINGS[pooling], pooling != RANK, context_length)


def encoder_tensors(
    family: EncoderFamily, tensors: Mapping[str, SourceTensor], config: ModelConfig, what: str
) -> dict[str, SourceTensor]:
    """Every tensor by our name, as views."""
    in_layers, outside = (
        {**GGUF_NAMES, **family.gguf_names},
        {**GGUF_GLOBAL_NAMES, **family.gguf_global_names},
    )
    if "blk.0.ffn_gate.weight" in tensors:
        in_layers |= {"ffn_up.weight": GGUF_NAMES["ffn_up.weight"]}
    shapes = shapes_of_all(config, has_bias=True)

    def ours() -> Iterator[tuple[str, SourceTensor]]:
        for theirs, tensor in tensors.items():
            match = re.fullmatch(r"blk\.(0|[1-9]\d{0,3})\.(.+)", theirs, re.ASCII)
            stem, key = (f"layers.{match[1]}.", match[2]) if match else ("", theirs)
            where = f"{what} has a tensor {theirs!r:.80} that"
            try:
                names = in_layers if match else outside
                yield from our_tensors(key, names, tensor, CutFor(stem, shapes, where))
            except KeyError:
                raise ModelError(f"{where} {config.architecture} models do not use") from None

    return adapted(ours(), config, 0, what)

"""Files of an encoder: a Hugging Face directory, and GGUF metadata and tensors by llama.cpp's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.encoders.embedding_spec import embedding_of, is_classifier
from phasewise.serving.loaders.families.encoders import (
    HF_ACTIVATIONS,
    IGNORED,
    EncoderFamily,
    encoder_config,
    instructions_of,
)
from phasewise.serving.loaders.families.family import check_only
from phasewise.serving.loaders.formats.gguf_file import TensorInfo
from phasewise.serving.loaders.formats.hf_config import field
from phasewise.serving.loaders.formats.model_directory import ModelDirectory, Shards, tensor_of
from phasewise.serving.loaders.layout import task_shapes, vector_lengths
from phasewise.serving.loaders.source import Rows, SourceTensor
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import ModelConfig

ReadField = Callable[[str, Any, Any], Any]
"""read(key, type, default): the checked value of the metadata."""

POOLINGS = {1: "mean", 2: "first", 3: "last", 4: "first"}  # the last one is "rank", a cross-encoder's
RANK = 4
_KEYS = {  # of config.json, which `encoder_config` asks for
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}


def gguf_config(
    family: EncoderFamily, read: ReadField, infos: Mapping[str, TensorInfo], what: str
) -> ModelConfig:
    """Make the config from GGUF metadata; the size of the vocabulary is that of the embeddings' tensor."""
    (architecture,) = family.names(family.gguf)
    if "token_embd.weight" not in infos:
        raise ModelError(f"{what} lacks the tensor token_embd.weight")
    if read(f"{architecture}.attention.causal", bool, False):
        raise ModelError(f"{what} holds a decoder of this family; encoders can run")

    def get(key: str, kind: Any, default: Any = None) -> Any:
        if key == "vocab_size":
            return infos["token_embd.weight"].shape[0]
        if key == "type_vocab_size":
            return 2 if "token_types.weight" in infos else 0
        return read(f"{architecture}.{_KEYS[key]}", kind, default)

    scores = pooling_type(architecture, read) == RANK
    if scores and not family.gguf_scores:
        raise ModelError(f"{what} holds a {family.name} classifier, whose head cannot run")
    named = read(f"{architecture}.hidden_activation", str, None)
    if named is not None and HF_ACTIVATIONS.get(named) not in family.activations:
        raise ModelError(f"{what} asks for the activation {named!r:.60}, which cannot run")
    plain = encoder_config(
        family,
        get,
        context_length=read(f"{architecture}.context_length", int, None),
        activation=family.activations[0] if named is None else HF_ACTIVATIONS[named],
        scores=scores,
    )

    def get_more(key: str, kind: Any, default: Any = None) -> Any:
        return read(f"{architecture}.{key}", kind, default)

    return family.from_gguf(get_more, plain) if family.from_gguf else plain


def pooling_type(architecture: str, read: ReadField) -> int | None:
    """The number of the metadata's pooling type; None where it gives none, or no pooling."""
    pooling: int | None = read(f"{architecture}.pooling_type", int, None)
    return pooling or None


def gguf_embedding(
    architecture: str, read: ReadField, context_length: int, *, encoder: bool
) -> Embedding | None:
    """The pooling of rows to a vector of length 1; None for a decoder whose file states none."""
    pooling = pooling_type(architecture, read)
    if pooling is None:
        return Embedding("mean", True, context_length) if encoder else None
    if pooling not in POOLINGS:
        raise ModelError(
            f"the GGUF metadata ask for pooling type {pooling}; {', '.join(map(str, POOLINGS))} can run"
        )
    return Embedding(POOLINGS[pooling], pooling != RANK, context_length)


def with_vectors(
    tensors: Mapping[str, SourceTensor], config: ModelConfig, first_position: int, what: str
) -> dict[str, SourceTensor]:
    """The tensors with matrices that are vectors of ours flat. Raises ModelError for other shapes than those
    of the config's tasks. `first_position`: the row of a text's first position."""
    lengths, tasks = vector_lengths(config, has_bias=True), config.encoder and config.encoder.tasks
    stacks, flat = task_shapes(config, tasks) if tasks else {}, dict(tensors)
    for ours, tensor in tensors.items():
        if ours not in lengths or ours not in (*MATRICES, *stacks):
            continue
        where = f"{what}: the tensor for {ours}"
        if tensor.shape != stacks.get(ours, tensor.shape):
            raise ModelError(f"{where} is {tensor.shape}: plain numbers {stacks[ours]} expected of its tasks")
        first, repeats = first_position if ours == "positions" else 0, ours == "segments"
        flat[ours] = _flat(tensor, lengths[ours], first, where, repeats=repeats)
    return flat


MATRICES = ("positions", "segments", "score_dense", "score_out")
"""Our vectors that files may hold as matrices."""


def _flat(tensor: SourceTensor, length: int, first: int, what: str, *, repeats: bool) -> SourceTensor:
    """`length` numbers of rows from `first` on as one vector. `repeats`: True if one row may stand for
    all."""
    read, width, n_there = tensor.rows, tensor.shape[-1], math.prod(tensor.shape[:-1])
    n_rows, is_one = length // width, repeats and n_there == 1
    if length % width or tensor.form.is_quantised or (n_there < first + n_rows and not is_one):
        raise ModelError(
            f"{what} is {tensor.type_name} {tensor.shape}: {counted(n_rows, 'row')} of plain numbers from"
            f" row {first} on expected"
        )

    def rows(_start: int, _stop: int) -> Rows:
        whole = np.asarray(read(first, first + min(n_rows, n_there)), np.float32).reshape(1, -1)
        return np.tile(whole, length // whole.size)

    n_bytes = tensor.n_bytes * min(n_rows, n_there) // n_there
    return replace(tensor, shape=(length,), n_bytes=n_bytes, rows=rows)


SCORE_POOLINGS = {"cls": "first", "mean": "mean"}


def hf_encoder_config(family: EncoderFamily, given: Mapping[str, Any]) -> ModelConfig:
    renamed = {ours: given[theirs] for ours, theirs in family.hf_fields.items() if theirs in given}
    fields: dict[str, Any] = {**family.hf_defaults, **given, **renamed}
    check_only(given.get, family.hf_only)

    def get(key: str, kind: Any, default: Any = None) -> Any:
        return field(fields, key, kind, default)

    kind = get("position_embedding_type", str, "absolute")
    if kind not in family.position_kinds:
        raise ModelError(
            f"config.json asks for {kind!r:.60} positions; {', '.join(family.position_kinds)} can run"
        )
    if get("is_decoder", bool, False) or get("is_causal", bool, False):
        raise ModelError("config.json describes a decoder of this family; encoders can run")
    name = get("hidden_act", str, "gelu")
    if HF_ACTIVATIONS.get(name) not in family.activations:
        runnable = [theirs for theirs, ours in HF_ACTIVATIONS.items() if ours in family.activations]
        raise ModelError(f"config.json asks for the activation {name!r:.60}; {', '.join(runnable)} can run")
    plain = encoder_config(
        family,
        get,
        context_length=get("max_position_embeddings", int, 512) - family.first_position,
        activation=HF_ACTIVATIONS[name],
        scores=is_classifier(fields),
    )
    return family.from_hf(get, plain)


def hf_tensors(
    opened: Shards, family: EncoderFamily, config: ModelConfig, directory: Path
) -> dict[str, SourceTensor]:
    """Views of every tensor of a directory, by our names."""
    naming = family.hf_naming(config, str(directory))
    scores = config.encoder is not None and config.encoder.scores

    def files() -> Iterator[tuple[str, SourceTensor]]:
        for file, entries in opened:
            for theirs, entry in entries.items():
                name = family.bare(theirs)
                unused = name.startswith(("pooler.", "classifier.", "head.")) and not scores
                if not unused and (naming.named(theirs) is not None or not IGNORED.fullmatch(name)):
                    yield theirs, tensor_of(file, theirs, entry)

    return with_vectors(naming.tensors(files()), config, family.first_position, str(directory))


def encoder_embedding(directory: ModelDirectory, config: ModelConfig) -> Embedding:
    """The pooling of the directory's model; a cross-encoder's is "first", or as config.json says."""
    embedding = embedding_of(directory, config.context_length, encoder=True)
    assert embedding is not None
    assert config.encoder is not None
    if config.encoder.scores:
        fields = directory.json("config.json") or {} if config.encoder.norm_head else {}
        named = field(fields, "classifier_pooling", str, "cls")
        if named not in SCORE_POOLINGS:
            raise ModelError(
                f"config.json has classifier_pooling = {named!r:.60}; {', '.join(SCORE_POOLINGS)} can run"
            )
        return Embedding(SCORE_POOLINGS[named], False, embedding.max_tokens, embedding.lower_case)
    if config.encoder.tasks is not None:
        own = instructions_of(directory.json("config.json") or {}, config.encoder.tasks)
        return replace(embedding, prompts=tuple({**dict(embedding.prompts), **dict(own)}.items()))
    return embedding

"""A Hugging Face directory of an encoder as a `ModelSource`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from phasewise._safetensors import TensorEntry
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import CutFor, our_tensors
from phasewise.serving.loaders.encoders.embedding_spec import embedding_of
from phasewise.serving.loaders.encoders.encoder_layout import adapted
from phasewise.serving.loaders.families.bert import (
    HF_ACTIVATIONS,
    IGNORED,
    PREFIXES,
    EncoderFamily,
    encoder_config,
)
from phasewise.serving.loaders.families.encoders import instructions_of
from phasewise.serving.loaders.formats.hf_config import field
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.loaders.formats.safetensors_file import Shards, tensor_of
from phasewise.serving.loaders.layout import shapes_of_all
from phasewise.serving.loaders.source import SourceFile, SourceTensor
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import ModelConfig

CLASSIFIER = "ForSequenceClassification"
SCORE_POOLINGS = {"cls": "first", "mean": "mean"}


def config_of(family: EncoderFamily, given: Mapping[str, Any]) -> ModelConfig:
    """From config.json."""
    renamed = {ours: given[theirs] for ours, theirs in family.hf_fields.items() if theirs in given}
    fields: dict[str, Any] = {**family.defaults, **given, **renamed}
    for key in family.hf_must_be_off:
        if given.get(key):
            raise ModelError(f"config.json has {key} = {given[key]!r:.60}, which cannot run")

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
        scores=_scores(get),
    )
    return family.from_hf(get, plain)


def _scores(get: Callable[..., Any]) -> bool:
    """True if the model gives a pair of texts one score."""
    named = get("architectures", list) or []
    if not any(isinstance(name, str) and name.endswith(CLASSIFIER) for name in named):
        return False
    labels = get("id2label", dict)
    count = get("num_labels", int, 2) if labels is None else len(labels)
    if count != 1:
        raise ModelError(f"config.json describes a classifier of {count} classes: one output can run")
    return True


def encoder_tensors(
    opened: Shards, family: EncoderFamily, config: ModelConfig, directory: Path
) -> dict[str, SourceTensor]:
    """Every tensor by our name, as views."""
    scores = config.encoder is not None and config.encoder.scores
    shapes = shapes_of_all(config, has_bias=True)

    def ours() -> Iterator[tuple[str, SourceTensor]]:
        for file, entries in opened:
            for theirs, entry in entries.items():
                yield from _named(file, theirs, entry)

    def _named(file: SourceFile, theirs: str, entry: TensorEntry) -> Iterator[tuple[str, SourceTensor]]:
        name = theirs
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        what = f"{directory} has a tensor {theirs!r:.80} that"
        match = re.fullmatch(family.hf_layer, name, re.ASCII)
        target = family.hf_names.get(match[2]) if match else family.hf_global_names.get(name)
        unused = name.startswith(("pooler.", "classifier.", "head.")) and not scores
        if target is None or unused:
            if unused or IGNORED.fullmatch(name):
                return
            raise ModelError(f"{what} {family.name} models do not use")
        tensor = tensor_of(file, theirs, entry)
        stem, key = (f"layers.{match[1]}.", match[2]) if match else ("", name)
        names = family.hf_names if match else family.hf_global_names
        yield from our_tensors(key, names, tensor, CutFor(stem, shapes, what))

    return adapted(ours(), config, family.first_position, str(directory))


def encoder_embedding(directory: ModelDirectory, config: ModelConfig) -> Embedding:
    """The pooling of the directory's model; a cross-encoder scores by the row of the first token, or
    as its config says.
    """
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

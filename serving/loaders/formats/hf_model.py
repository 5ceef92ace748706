"""A Hugging Face directory as a `ModelSource`: config.json, safetensors (maybe sharded), tokenizer.json."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import one_more
from phasewise.serving.loaders.encoders.embedding_spec import (
    dense_of,
    embedding_of,
    most_tokens,
    reranker_of,
    scoring_embedding,
    with_score,
)
from phasewise.serving.loaders.encoders.encoder_files import encoder_embedding, hf_encoder_config, hf_tensors
from phasewise.serving.loaders.families import Family, family_of_hf
from phasewise.serving.loaders.families.encoders import encoder_of_hf
from phasewise.serving.loaders.formats.hf_config import config_of, field, quantisation_fields, text_fields
from phasewise.serving.loaders.formats.model_directory import (
    READABLE,
    ModelDirectory,
    Shards,
    open_all,
    tensor_of,
)
from phasewise.serving.loaders.layout import BIASES
from phasewise.serving.loaders.quantised.scheme import Quantisation, quantisation_of
from phasewise.serving.loaders.quantised.tensors import made_tensors
from phasewise.serving.loaders.source import MAX_TOKENIZER_BYTES, ModelSource, SourceTensor
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.sampling.sampling_defaults import stated_by_hf

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_SHARDS = 512
COMPARED_ROWS = 64  # of two matrices that are the same, or not at all


def open_hf_model(path: Path, name: str) -> ModelSource:
    """Open a model's directory, and read every shard's header. Close the result: it holds shards open."""
    directory = ModelDirectory(path)
    directory.source_files()  # one that leads out is refused now, whoever would open it later
    fields = directory.json("config.json")
    if fields is None:
        raise ModelError(f"{path} has no config.json: not a Hugging Face model directory")
    if not directory.has("tokenizer.json"):
        raise ModelError(f"{path} has no tokenizer.json: save one with transformers' AutoTokenizer")
    tokenizer_config = directory.json("tokenizer_config.json") or {}
    generation = directory.json("generation_config.json") or {}
    encoder = encoder_of_hf(fields)
    if encoder is not None:
        config = hf_encoder_config(encoder, fields)
    else:
        config = config_of(fields, generation, bool(tokenizer_config.get("add_bos_token")))
    with ExitStack() as stack:
        opened = opened_shards(directory, stack)
        if encoder is not None:
            tensors = hf_tensors(opened, encoder, config, path)
            embedding: Embedding | None = encoder_embedding(directory, config)
        else:
            family = family_of_hf(fields["model_type"])
            reranker = reranker_of(directory, fields, _chat_template(directory, tokenizer_config), name)
            if reranker is not None:
                embedding = scoring_embedding(reranker, most_tokens(directory, config.context_length))
            else:
                embedding = embedding_of(directory, config.context_length, encoder=config.sees_ahead)
            if embedding is not None and not any("lm_head.weight" in entries for _, entries in opened):
                config = replace(config, tied_embeddings=True)
            if config.tied_embeddings and _has_own_head(opened, family):
                config = replace(config, tied_embeddings=False)
            tensors = tensors_of(opened, family, config, directory, fields)
            if reranker is not None:
                config, tensors = with_score(reranker, config, tensors, path)
        dense = dense_of(directory, stack)
        if dense:
            config = replace(config, dense=tuple(matrix.shape[0] for matrix in dense.values()))
        return ModelSource(
            name=name,
            path=path,
            config=config,
            tensors=tensors | dense,
            tokenizer_json=lambda: directory.text("tokenizer.json", MAX_TOKENIZER_BYTES),
            tokenizer_kind="tokenizer.json",
            chat_template=_chat_template(directory, tokenizer_config),
            close=stack.pop_all().close,
            sampling=stated_by_hf(generation),
            embedding=embedding,
        )


def opened_shards(directory: ModelDirectory, stack: ExitStack) -> Shards:
    """Open the weight files of a directory, with their tables; `stack` closes them."""
    return open_all(directory, _shards_of(directory), stack)


def _shards_of(directory: ModelDirectory) -> list[str]:
    """Names of the weight files: the single one, those of the index, or the only one there is."""
    if directory.has(SINGLE):
        return [SINGLE]
    if (index := directory.json(INDEX)) is not None:
        return _indexed(directory.path, index)
    names = directory.names(".safetensors")
    if len(names) == 1:
        return names
    raise ModelError(
        f"{directory.path} has {counted(len(names), 'safetensors file')} and no {INDEX}:"
        " one file, or an index, expected"
    )


def _indexed(directory: Path, index: Mapping[str, Any]) -> list[str]:
    """The index's files, each of which must be a plain name inside the directory."""
    names = field(index, "weight_map", dict) or {}
    for name in names.values():
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name, re.ASCII):
            raise ModelError(
                f"{directory / INDEX} names the file {name!r:.80}: a plain .safetensors name expected"
            )
    files = sorted(set(names.values()))
    if not 1 <= len(files) <= MAX_SHARDS:
        raise ModelError(
            f"{directory / INDEX} names {counted(len(files), 'file')}: from 1 to {MAX_SHARDS} expected"
        )
    return files


def _has_own_head(opened: Shards, family: Family) -> bool:
    """True if the files hold another head than the embeddings, whatever the config says; it is used then."""
    embeds = [
        "model.embed_tokens.weight",
        *(of for of, ours in family.global_names.items() if ours == "embed"),
    ]
    heads = {
        family.bare(theirs): tensor_of(file, theirs, entry)
        for file, entries in opened
        for theirs, entry in entries.items()
        if family.bare(theirs) in ("lm_head.weight", *embeds) and entry.dtype in READABLE
    }
    head, embed = heads.get("lm_head.weight"), next((heads[name] for name in embeds if name in heads), None)
    if head is None or embed is None or head.shape != embed.shape:
        return False
    step = max(head.shape[0] // COMPARED_ROWS, 1)
    places = range(0, head.shape[0], step)
    return any(not np.array_equal(_plain_row(head, row), _plain_row(embed, row)) for row in places)


def _plain_row(tensor: SourceTensor, row: int) -> np.ndarray:
    numbers = tensor.rows(row, row + 1)
    assert isinstance(numbers, np.ndarray)
    return numbers


def tensors_of(
    opened: Shards, family: Family, config: ModelConfig, directory: ModelDirectory, fields: Mapping[str, Any]
) -> dict[str, SourceTensor]:
    """Views of every tensor of the language model, by our names. `fields`: those of config.json."""
    stated, what = text_fields(fields, family), str(directory.path)
    biases = not family.hf_biases or field(stated, family.hf_biases, bool, False)
    biased = biases and any(theirs.endswith("q_proj.bias") for _, entries in opened for theirs in entries)
    n_more = field(stated, "num_nextn_predict_layers", int, 0)
    naming = family.hf_naming(config, what, has_bias=biased, n_more=n_more)
    quantisation = quantisation_of(quantisation_fields(stated.get), directory.json("quantize_config.json"))

    def files() -> Iterator[tuple[str, SourceTensor]]:
        for theirs, tensor in _file_tensors(opened, family, quantisation):
            ours = naming.named(theirs)
            is_known = ours in naming.shapes if isinstance(ours, str) else ours is not None
            if not is_known and quantisation is not None and _is_zero_bias(theirs, tensor):
                continue
            if not biases and isinstance(ours, str) and ours.endswith(BIASES):
                raise ModelError(
                    f"{what} has a tensor {theirs!r:.80} that its config.json has no use for:"
                    f" {family.hf_biases} is not true"
                )
            yield theirs, tensor

    tensors = naming.tensors(files())
    if not family.hf_unit_norms:
        return tensors
    return {ours: one_more(own) if ours.endswith("norm") else own for ours, own in tensors.items()}


def _file_tensors(
    opened: Shards, family: Family, quantisation: Quantisation | None
) -> Iterator[tuple[str, SourceTensor]]:
    """Yield the language model's tensors, quantised ones composed of parts."""
    composed, used = made_tensors(opened, quantisation)
    plain = (
        (theirs, tensor_of(file, theirs, entry))
        for file, entries in opened
        for theirs, entry in entries.items()
        if theirs not in used and not theirs.startswith(family.hf_ignored)
    )
    for theirs, tensor in (*composed, *plain):
        if not theirs.startswith(family.hf_ignored):
            yield theirs, tensor


def _is_zero_bias(name: str, tensor: SourceTensor) -> bool:
    """True for a bias of zeros, which some packages write for every layer that they quantise."""
    if not name.endswith(".bias") or len(tensor.shape) != 1:
        return False
    numbers = tensor.rows(0, 1)
    return isinstance(numbers, np.ndarray) and not numbers.any()


def _chat_template(directory: ModelDirectory, tokenizer_config: Mapping[str, Any]) -> str | None:
    """chat_template.jinja, or the entry of tokenizer_config.json (of several named ones, "default")."""
    if directory.has("chat_template.jinja"):
        return directory.text("chat_template.jinja")
    template = tokenizer_config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelError(f"{directory.path / 'tokenizer_config.json'} has a chat template that is not text")
    return template

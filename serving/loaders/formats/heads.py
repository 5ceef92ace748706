"""Readers of draft heads: beside their model in a Hugging Face directory, or as the block behind its last
layer in a GGUF file."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from phasewise.serving.loaders.cuts import UNUSED
from phasewise.serving.loaders.families import Family, family_of_gguf, family_of_hf
from phasewise.serving.loaders.families.family import HEAD_NAMES, HEAD_STEM
from phasewise.serving.loaders.formats import gguf_model
from phasewise.serving.loaders.formats.gguf_file import GgufHeader, open_gguf
from phasewise.serving.loaders.formats.hf_config import config_of, field
from phasewise.serving.loaders.formats.hf_model import opened_shards, tensors_of
from phasewise.serving.loaders.formats.model_directory import ModelDirectory, renamed
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.serving.models.draft_head import head_config
from phasewise.serving.models.packed_model import ModelConfig

Head = tuple[ModelConfig, dict[str, SourceTensor]]

LAST_NORM = "output_norm.weight"
_BEHIND = {
    "blk.{n}.nextn.eh_proj.": HEAD_STEM,
    "blk.{n}.nextn.enorm.": "head.embed_norm.",
    "blk.{n}.nextn.hnorm.": "head.rows_norm.",
    "blk.{n}.nextn.shared_head_norm.": "output_norm.",
    "blk.{n}.nextn.shared_head_head.": "",
    "blk.{n}.nextn.embed_tokens.": "",
    "blk.{n}.": "blk.0.",
}
"""Beginnings of names of a GGUF file's head block, as in `Family.hf_head`."""


def open_head(path: Path, name: str) -> ModelSource | None:
    """Open the first draft head in a model's files; None without a supported one. Close the result."""
    with ExitStack() as stack:
        head = _beside(path, stack) if path.is_dir() else _behind(path, stack)
        if head is None:
            return None
        return ModelSource(f"{name} (its head)", path, *head, close=stack.pop_all().close)


def _behind(path: Path, stack: ExitStack) -> Head | None:
    file, header = open_gguf(path)
    stack.callback(file.close)
    family = family_of_gguf(
        gguf_model.field(header.metadata, "general.architecture", str, "nothing"), str(path)
    )
    whole = gguf_model.config_of_gguf(file, header, family)
    alone, config = renamed(header.tensors, _BEHIND, whole.n_layers), head_config(whole)
    if not family.gguf_head or f"{HEAD_STEM}weight" not in alone:
        return None
    if LAST_NORM in header.tensors:  # the model's, where the head has none
        alone.setdefault(LAST_NORM, header.tensors[LAST_NORM])
    return config, gguf_model.tensors_in(file, GgufHeader(header.metadata, alone), _alone(family), config)


def _alone(family: Family) -> Family:
    """The family of a model that is the head alone, whose tokens see all positions."""
    hf_names, gguf_names = (
        {name: UNUSED if "indexer." in name else ours for name, ours in names.items()}
        for names in (family.hf_names, family.gguf_names)
    )
    alone = replace(family, hf_names=hf_names, gguf_names=gguf_names)
    return replace(alone, hf_ignored=(), more_layers=False, global_names=HEAD_NAMES)


def _beside(path: Path, stack: ExitStack) -> Head | None:
    directory = ModelDirectory(path)
    fields = directory.json("config.json") or {}
    family = family_of_hf(field(fields, "model_type", str, "nothing"))
    if not family.hf_head:
        return None
    whole = config_of(fields, directory.json("generation_config.json") or {}, False)
    shards, n_layers = opened_shards(directory, stack), whole.n_layers
    opened = [(file, renamed(entries, family.hf_head, n_layers)) for file, entries in shards]
    if not any(name.startswith(HEAD_STEM) for _, entries in opened for name in entries):
        return None
    config = head_config(whole)
    return config, tensors_of(opened, _alone(family), config, directory, fields)

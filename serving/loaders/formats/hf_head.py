"""A head that drafts, as a Hugging Face directory has it beside the model that it belongs to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phasewise.serving.loaders.families import Family, family_of_hf
from phasewise.serving.loaders.families.family import HEAD_NAMES, HEAD_STEM
from phasewise.serving.loaders.formats.hf_config import config_of, field, quantisation_fields, text_fields
from phasewise.serving.loaders.formats.hf_model import open_shards, tensors_of
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.loaders.formats.safetensors_file import Shards, close_all, renamed
from phasewise.serving.loaders.quantised.scheme import quantisation_of
from phasewise.serving.loaders.source import ModelSource
from phasewise.serving.models.heads.draft_head import head_config


def open_hf_head(path: Path, name: str) -> ModelSource | None:
    """The first head of a model whose family has such; None where the files hold none. Close it."""
    directory = ModelDirectory(path)
    fields = directory.json("config.json") or {}
    family = family_of_hf(field(fields, "model_type", str, "nothing"))
    if not family.hf_head:
        return None
    whole = config_of(fields, directory.json("generation_config.json") or {}, False)
    opened = open_shards(directory)
    try:
        alone = _head_alone(opened, family, whole.n_layers)
        if not any(name.startswith(HEAD_STEM) for _, entries in alone for name in entries):
            close_all(opened)
            return None
        stated, config = text_fields(fields, family), head_config(whole)
        own_family = replace(family, hf_ignored=(), more_layers=False, global_names=HEAD_NAMES)
        biases = not family.hf_biases or field(stated, family.hf_biases, bool, False)
        quantisation = quantisation_of(
            quantisation_fields(stated.get), directory.json("quantize_config.json")
        )
        tensors = tensors_of(alone, own_family, config, path, quantisation, biases=biases)
        return ModelSource(
            name=f"{name} (its head)",
            path=path,
            config=config,
            tensors=tensors,
            close=lambda: close_all(opened),
        )
    except BaseException:
        close_all(opened)
        raise


def _head_alone(opened: Shards, family: Family, n_layers: int) -> Shards:
    """Tables of what the head has, by the names of a model that has it alone."""
    beginnings = {theirs.replace("{n}", str(n_layers)): ours for theirs, ours in family.hf_head.items()}
    return [(file, renamed(entries, beginnings)) for file, entries in opened]

"""Readers of draft heads: beside their model in a Hugging Face directory, or as the block behind its last
layer in a GGUF file."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from phasewise.serving.loaders.families import Family, family_of_gguf, family_of_hf
from phasewise.serving.loaders.families.family import HEAD_NAMES, HEAD_STEM
from phasewise.serving.loaders.formats import gguf_model
from phasewise.serving.loaders.formats.gguf_file import GgufHeader, TensorInfo, open_gguf
from phasewise.serving.loaders.formats.hf_config import config_of, field
from phasewise.serving.loaders.formats.hf_model import opened_shards, tensors_of
from phasewise.serving.loaders.formats.model_directory import ModelDirectory, renamed
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.serving.models.draft_head import head_config
from phasewise.serving.models.packed_model import ModelConfig

Head = tuple[ModelConfig, dict[str, SourceTensor]]

LAST_NORM = "output_norm.weight"
_NEXTN = {
    "nextn.eh_proj.weight": f"{HEAD_STEM}weight",
    "nextn.enorm.weight": "head.embed_norm.weight",
    "nextn.hnorm.weight": "head.rows_norm.weight",
    "nextn.shared_head_norm.weight": LAST_NORM,
    "nextn.shared_head_head.weight": "",
    "nextn.embed_tokens.weight": "",
}
"""Names within a GGUF file's head block to those of a model that is the head alone; "": left out."""


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
    alone, config = _block(header, whole.n_layers), head_config(whole)
    if not family.gguf_head or f"{HEAD_STEM}weight" not in alone.tensors:
        return None
    return config, gguf_model.tensors_in(file, alone, _alone(family), config)


def _block(header: GgufHeader, n_layers: int) -> GgufHeader:
    """The head's tensors by the names of a model that is the head alone, with the model's last norm where the
    head has none."""
    tensors: dict[str, TensorInfo] = {}
    stem = f"blk.{n_layers}."
    for theirs, info in header.tensors.items():
        within = theirs.removeprefix(stem)
        if theirs.startswith(stem) and (ours := _NEXTN.get(within, f"blk.0.{within}")):
            tensors[ours] = info
    if LAST_NORM in header.tensors:
        tensors.setdefault(LAST_NORM, header.tensors[LAST_NORM])
    return GgufHeader(header.metadata, tensors)


def _alone(family: Family) -> Family:
    """The family of a model that is the head alone."""
    return replace(family, hf_ignored=(), more_layers=False, global_names=HEAD_NAMES)


def _beside(path: Path, stack: ExitStack) -> Head | None:
    directory = ModelDirectory(path)
    fields = directory.json("config.json") or {}
    family = family_of_hf(field(fields, "model_type", str, "nothing"))
    if not family.hf_head:
        return None
    whole = config_of(fields, directory.json("generation_config.json") or {}, False)
    beginnings = {theirs.replace("{n}", str(whole.n_layers)): ours for theirs, ours in family.hf_head.items()}
    opened = [(file, renamed(entries, beginnings)) for file, entries in opened_shards(directory, stack)]
    if not any(name.startswith(HEAD_STEM) for _, entries in opened for name in entries):
        return None
    config = head_config(whole)
    return config, tensors_of(opened, _alone(family), config, directory, fields)

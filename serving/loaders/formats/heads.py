"""Heads that draft, as files have them: beside their model in a Hugging Face directory, behind its last layer
in a GGUF file, or in a directory of their own (EAGLE-3: one layer of a Llama over inputs of twice its width).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phasewise._safetensors import TensorEntry
from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import ColumnCut, Names
from phasewise.serving.loaders.families import Family, family_of_gguf, family_of_hf
from phasewise.serving.loaders.families.family import HEAD_NAMES, HEAD_STEM
from phasewise.serving.loaders.families.llama import LLAMA
from phasewise.serving.loaders.formats import gguf_model
from phasewise.serving.loaders.formats.gguf_file import GgufHeader, TensorInfo, open_gguf
from phasewise.serving.loaders.formats.hf_config import config_of, field
from phasewise.serving.loaders.formats.hf_model import opened_shards, tensors_of
from phasewise.serving.loaders.formats.model_directory import ModelDirectory, renamed
from phasewise.serving.loaders.source import F32, ModelSource, SourceFile, SourceTensor
from phasewise.serving.models.draft_head import OFFSETS, head_config
from phasewise.serving.models.layers import EAGLE3, EAGLE3_NORMED, tapped_layers
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
"""Names within the block of a GGUF file, and what they are of a model that has the head alone; "": a copy of
the model's."""
_EAGLE = {
    "midlayer.hidden_norm.": "rows_norm.",
    "layers.0.hidden_norm.": "rows_norm.",
    "midlayer.": "model.layers.0.",
    "layers.0.": "model.layers.0.",
    "norm.": "model.norm.",
    "fc.": "fc.",
    "lm_head.": "lm_head.",
    "d2t": "d2t",
}
_EAGLE_LAYER: Names = {f"self_attn.{part}_proj.weight": ColumnCut((f"embed_{part}", part)) for part in "qkv"}
_EAGLE_OUTSIDE: Names = {
    "fc.weight": "head_rows",
    "rows_norm.weight": "head_rows_norm",
    "lm_head.weight": "lm_head",
}
"""Other tensors (`t2d`, copies of embeddings) say nothing more."""


def open_head(path: Path, name: str, model: ModelConfig | None) -> ModelSource | None:
    """The first head of a model whose family has such, in its own files; None where they hold none. Close it.

    model: that of a head of EAGLE-3, in whose directory `path` is. ModelError for that of another.
    """
    with ExitStack() as stack:
        if model is not None:
            head: Head | None = _eagle(path, model, stack)
        else:
            name = f"{name} (its head)"
            head = _beside(path, stack) if path.is_dir() else _behind(path, stack)
        return None if head is None else ModelSource(name, path, *head, close=stack.pop_all().close)


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
    """The table of what the head has, by the names of a model that has it alone; the model's own last norm
    where the head has none."""
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
    """The family of a model that has the head alone."""
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


def _eagle(path: Path, model: ModelConfig, stack: ExitStack) -> Head:
    directory = ModelDirectory(path)
    fields = directory.json("config.json")
    if fields is None:
        raise ModelError(f"{path} has no config.json: a directory with a head of EAGLE-3 expected")
    config = _eagle_config(fields, model, path)
    own = [(file, _by_our_names(entries)) for file, entries in opened_shards(directory, stack)]
    offsets = [(file, entries.pop("d2t")) for file, entries in own if "d2t" in entries]
    family = replace(LLAMA, hf_names=_EAGLE_LAYER, global_names=_EAGLE_OUTSIDE)
    tensors = tensors_of(own, family, config, directory, {})
    return config, {**tensors, OFFSETS: _offsets(offsets, config, path)}


def _eagle_config(fields: Mapping[str, Any], model: ModelConfig, path: Path) -> ModelConfig:
    own = config_of({**fields, "model_type": "llama"}, {}, False)
    if (own.n_layers, own.hidden, own.vocab_size) != (1, model.hidden, model.vocab_size):
        raise ModelError(
            f"{path} has {counted(own.n_layers, 'layer')} of {own.hidden} numbers, and"
            f" {own.vocab_size} tokens: a head for this model has one layer of {model.hidden}, and"
            f" {model.vocab_size} tokens"
        )
    eagle = field(fields, "eagle_config", dict, {})
    tapped = eagle.get("eagle_aux_hidden_state_layer_ids") or fields.get("eagle_aux_hidden_state_layer_ids")
    if tapped is not None and tapped != list(tapped_layers(model.n_layers)):
        raise ModelError(
            f"{path} reads its model before layers {tapped!r:.60}:"
            f" {list(tapped_layers(model.n_layers))} can run"
        )
    normed = field(fields, "norm_before_residual", bool, False)
    return replace(
        own,
        tied_embeddings=False,
        embed_scale=model.embed_scale,
        context_length=model.context_length,
        drafts=EAGLE3_NORMED if normed else EAGLE3,
        n_drafted=field(fields, "draft_vocab_size", int, own.vocab_size),
    )


def _by_our_names(entries: Mapping[str, TensorEntry]) -> dict[str, TensorEntry]:
    return renamed({name.removeprefix("model."): entry for name, entry in entries.items()}, _EAGLE)


def _offsets(tables: list[tuple[SourceFile, TensorEntry]], config: ModelConfig, path: Path) -> SourceTensor:
    """The offset from a logit's number to its token; empty where the head knows all tokens."""
    length = config.n_logits

    def none(_start: int, _stop: int) -> np.ndarray:
        return np.zeros((1, length), np.float32)

    if not tables:
        if length != config.vocab_size:
            raise ModelError(
                f"{path} drafts {length} of {config.vocab_size} tokens, and lacks d2t, which says which"
            )
        return SourceTensor("I64", (length,), 0, F32, none)
    file, entry = tables[0]
    if entry.dtype != "I64" or entry.shape != (length,):
        raise ModelError(f"{path} has d2t as {entry.dtype} {entry.shape}: I64 ({length},) expected")

    def rows(_start: int, _stop: int) -> np.ndarray:
        numbers = np.frombuffer(file.read(entry.offset, entry.n_bytes), "<i8")
        return numbers.astype(np.float32).reshape(1, -1)

    return SourceTensor("I64", (length,), entry.n_bytes, F32, rows)

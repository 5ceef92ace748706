"""A head of EAGLE-3: a directory of its own, with one layer of a Llama over inputs of twice its width."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from phasewise._safetensors import TensorEntry
from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.cuts import ColumnCut, Names
from phasewise.serving.loaders.families.llama import LLAMA
from phasewise.serving.loaders.formats.hf_config import config_of, field
from phasewise.serving.loaders.formats.hf_model import open_shards, tensors_of
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.loaders.formats.safetensors_file import close_all, renamed
from phasewise.serving.loaders.forms import F32
from phasewise.serving.loaders.source import ModelSource, SourceFile, SourceTensor
from phasewise.serving.models.heads.draft_head import OFFSETS
from phasewise.serving.models.heads.kinds import EAGLE3, EAGLE3_NORMED, tapped_layers
from phasewise.serving.models.packed_model import ModelConfig

_BEGINNINGS = {
    "midlayer.hidden_norm.": "rows_norm.",
    "layers.0.hidden_norm.": "rows_norm.",
    "midlayer.": "model.layers.0.",
    "layers.0.": "model.layers.0.",
    "norm.": "model.norm.",
    "fc.": "fc.",
    "lm_head.": "lm_head.",
    "d2t": "d2t",
}
_LAYER: Names = {f"self_attn.{part}_proj.weight": ColumnCut((f"embed_{part}", part)) for part in "qkv"}
_OUTSIDE: Names = {
    "fc.weight": "head_rows",
    "rows_norm.weight": "head_rows_norm",
    "lm_head.weight": "lm_head",
}
"""Other tensors (`t2d`, copies of embeddings) say nothing more."""


def open_eagle_head(path: Path, name: str, model: ModelConfig) -> ModelSource:
    """The head in this directory, for a model of this config. ModelError for that of another. Close it."""
    directory = ModelDirectory(path)
    fields = directory.json("config.json")
    if fields is None:
        raise ModelError(f"{path} has no config.json: a directory with a head of EAGLE-3 expected")
    config = _config(fields, model, path)
    opened = open_shards(directory)
    try:
        own = [(file, _by_our_names(entries)) for file, entries in opened]
        offsets = [(file, entries.pop("d2t")) for file, entries in own if "d2t" in entries]
        family = replace(LLAMA, hf_names=_LAYER, global_names=_OUTSIDE)
        tensors = tensors_of(own, family, config, path, None, biases=False)
        tensors[OFFSETS] = _offsets(offsets, config, path)
        return ModelSource(
            name=name,
            path=path,
            config=config,
            tensors=tensors,
            close=lambda: close_all(opened),
        )
    except BaseException:
        close_all(opened)
        raise


def _config(fields: Mapping[str, Any], model: ModelConfig, path: Path) -> ModelConfig:
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
    return renamed({name.removeprefix("model."): entry for name, entry in entries.items()}, _BEGINNINGS)


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

"""A head that drafts, as a GGUF file has it: the block behind the model's last one, with `nextn` tensors."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phasewise.serving.loaders.families import family_of_gguf
from phasewise.serving.loaders.families.family import HEAD_NAMES, HEAD_STEM
from phasewise.serving.loaders.formats.gguf_file import GgufHeader, TensorInfo
from phasewise.serving.loaders.formats.gguf_model import config_of_gguf, field, tensors_in
from phasewise.serving.loaders.formats.gguf_parts import open_gguf
from phasewise.serving.loaders.source import ModelSource
from phasewise.serving.models.heads.draft_head import head_config

LAST_NORM = "output_norm.weight"
_NAMES = {
    "nextn.eh_proj.weight": f"{HEAD_STEM}weight",
    "nextn.enorm.weight": "head.embed_norm.weight",
    "nextn.hnorm.weight": "head.rows_norm.weight",
    "nextn.shared_head_norm.weight": LAST_NORM,
    "nextn.shared_head_head.weight": "",
    "nextn.embed_tokens.weight": "",
}
"""Names within the block, and what they are of a model that has the head alone; "": a copy of the model's."""


def open_gguf_head(path: Path, name: str) -> ModelSource | None:
    """The first head of a model whose family has such; None where the file holds none. Close it."""
    file, header = open_gguf(path)
    try:
        family = family_of_gguf(field(header.metadata, "general.architecture", str, "nothing"), str(path))
        whole = config_of_gguf(file, header, family)
        renamed = _head_alone(header, whole.n_layers)
        if not family.gguf_head or f"{HEAD_STEM}weight" not in renamed.tensors:
            file.close()
            return None
        alone, config = replace(family, more_layers=False, global_names=HEAD_NAMES), head_config(whole)
        return ModelSource(
            name=f"{name} (its head)",
            path=path,
            config=config,
            tensors=tensors_in(file, renamed, alone, config),
            close=file.close,
        )
    except BaseException:
        file.close()
        raise


def _head_alone(header: GgufHeader, n_layers: int) -> GgufHeader:
    """The table of what the head has, by the names of a model that has it alone; the model's own last norm
    where the head has none."""
    tensors: dict[str, TensorInfo] = {}
    stem = f"blk.{n_layers}."
    for theirs, info in header.tensors.items():
        within = theirs.removeprefix(stem)
        if theirs.startswith(stem) and (ours := _NAMES.get(within, f"blk.0.{within}")):
            tensors[ours] = info
    if LAST_NORM in header.tensors:
        tensors.setdefault(LAST_NORM, header.tensors[LAST_NORM])
    return GgufHeader(header.metadata, tensors)

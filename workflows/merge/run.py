"""Merge an adapter into a model: W + scale B A, each number rounded once.

The model is a Hugging Face directory, whose tensors keep their names and order: whatever reads the one reads
the other. A GGUF file is refused: its weights are rounded already, and what was trained beside them does not
survive a second rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.cython_kernels.packing import to_bf16
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.prune.directory import Tensor, new_directory, write_tensors, write_texts
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.serving.loaders.families import Family
    from phasewise.serving.loaders.formats.safetensors_file import Shards
    from phasewise.serving.loaders.source import ModelSource
    from phasewise.serving.models.low_rank import LowRank

Array = npt.NDArray[Any]
MergedType = Literal["f32", "bf16"]

_DTYPES: dict[MergedType, tuple[str, str]] = {"f32": ("F32", "float32"), "bf16": ("BF16", "bfloat16")}
"""The file's name of a type, and that of config.json."""


@dataclass(frozen=True)
class Merged:
    """A directory that was written. n_changed: tensors that the adapter changed, of n_tensors."""

    out: Path
    n_changed: int
    n_tensors: int


def merge(model: str, adapter: str, out: Path, dtype: MergedType, report: Report = silent) -> Merged:
    """Write `model` with the adapter at a path in it, as a directory of its own.

    Raises ModelError for what cannot be read, WorkflowError for a GGUF model and for a directory that exists.
    """
    from phasewise.serving.loaders import open_source
    from phasewise.serving.loaders.adapters.load_adapter import load_parts
    from phasewise.serving.loaders.families import FAMILIES
    from phasewise.serving.loaders.fetching.resolve import cache_root, locate
    from phasewise.serving.loaders.formats.hf_model import open_shards
    from phasewise.serving.loaders.formats.model_directory import ModelDirectory
    from phasewise.serving.loaders.formats.safetensors_file import close_all

    located = locate(model, cache_root(None), report)
    if not located.path.is_dir():
        raise WorkflowError(
            f"{located.path} is a GGUF file, whose weights are rounded already: give the Hugging Face"
            " directory that it was made from"
        )
    with open_source(located) as source, ExitStack() as stack:
        parts = load_parts(Path(adapter), source.config)
        family = next(family for family in FAMILIES if family.name == source.config.architecture)
        opened = open_shards(ModelDirectory(located.path))
        stack.callback(close_all, opened)
        merging = _Merging(source, family, parts, dtype)
        n_tensors = sum(len(entries) for _, entries in opened)
        with new_directory(out) as directory:
            write_tensors(directory / "model.safetensors", merging.tensors(opened, report), n_tensors)
            if missed := set(parts) - merging.changed:
                raise WorkflowError(
                    f"{located.path} has no tensor for {min(missed)}, which the adapter changes"
                )
            write_texts(source, directory, None, _DTYPES[dtype][1])
    return Merged(out, len(merging.changed), n_tensors)


class _Merging:
    """A model's tensors with an adapter in them. changed: weights, by our names, changed so far."""

    def __init__(
        self, source: ModelSource, family: Family, parts: dict[str, LowRank], dtype: MergedType
    ) -> None:
        self._source, self._family, self._parts = source, family, parts
        self._dtype: MergedType = dtype
        self.changed: set[str] = set()

    def tensors(self, opened: Shards, report: Report) -> Iterator[Tensor]:
        """In the order of the files."""
        from phasewise.serving.loaders.formats.safetensors_file import tensor_of

        report(f"merging {counted(sum(len(entries) for _, entries in opened), 'tensor')}")
        for file, entries in opened:
            for theirs, entry in entries.items():
                tensor = tensor_of(file, theirs, entry)
                n_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
                rows = np.asarray(tensor.rows(0, n_rows), np.float32)
                merged = self._merged(theirs, rows).reshape(tensor.shape)
                written = to_bf16(merged) if self._dtype == "bf16" else merged
                yield Tensor(theirs, _DTYPES[self._dtype][0], written)

    def _merged(self, theirs: str, rows: Array) -> Array:
        first, sums = 0, None
        for ours, n_rows in self._held(theirs, len(rows)):
            part = self._parts.get(ours)
            if part is not None:
                sums = rows.astype(np.float64) if sums is None else sums
                sums[first : first + n_rows] += part.scale * (part.b.astype(np.float64) @ part.a)
                self.changed.add(ours)
            first += n_rows
        return rows if sums is None else sums.astype(np.float32)

    def _held(self, theirs: str, n_rows: int) -> list[tuple[str, int]]:
        """Our weights of which a tensor has the rows, one after the other, and how many of each."""
        from phasewise.serving.loaders.families import TensorCut
        from phasewise.serving.loaders.formats.hf_model import LAYER_NAMES, layer_place, without_prefix
        from phasewise.serving.loaders.layout import weight_shapes

        stem, name, _ = layer_place(without_prefix(theirs, self._family))
        cut = {**LAYER_NAMES, **self._family.hf_names}.get(name) if stem else None
        if cut is None:
            return []
        if isinstance(cut, str):
            return [(stem + cut, n_rows)]
        if not isinstance(cut, TensorCut) or cut.of_experts or cut.alternating or cut.transposed:
            return []
        shapes = weight_shapes(self._source.config)
        return [(stem + part, shapes[stem + part][0]) for part in cut.parts if stem + part in shapes]

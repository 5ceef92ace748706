"""The tensors of a model as float32 rows, by their names and in the order of rows of GGUF files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import packing
from phasewise.cython_kernels.blocks import BlockRows
from phasewise.serving.loaders import open_source
from phasewise.serving.loaders.families import Family
from phasewise.serving.loaders.fetching.resolve import Located
from phasewise.serving.loaders.formats import gguf_model
from phasewise.serving.loaders.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from phasewise.serving.loaders.formats.gguf_file import TensorInfo
from phasewise.serving.loaders.formats.gguf_parts import GgufFiles, open_gguf
from phasewise.serving.loaders.forms import Rows, check_finite
from phasewise.serving.loaders.head_rows import interleaved
from phasewise.serving.loaders.source import ModelSource, SourceTensor
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.quantise.hf_metadata import (
    config_keys,
    factor_tensors,
    family_in_gguf,
    tensor_names,
)
from phasewise.workflows.quantise.hf_vocabulary import vocabulary_keys

Array = npt.NDArray[Any]
DROPPED = ("general.architecture", "general.file_type", "general.quantization_version", "split.", "GGUF.")
"""Beginnings of keys that the writer writes anew."""


@dataclass(frozen=True)
class PlainTensor:
    """A tensor; `rows(start, stop)` gives float32 [rows, k]. A vector is one row."""

    name: str
    shape: tuple[int, ...]
    source_type: str
    rows: Callable[[int, int], Array]

    @property
    def n_rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64)) if len(self.shape) > 1 else 1


@dataclass(frozen=True)
class PlainModel:
    """The material of a quantised file. keys: plain values by key, without the architecture."""

    name: str
    architecture: str
    keys: Mapping[str, Any]
    key_types: Mapping[str, tuple[int, int | None]]
    """The types of values as a GGUF file had them; a key without them has the usual one."""
    tensors: tuple[PlainTensor, ...]
    config: ModelConfig | None
    """That of a Hugging Face directory, to be compared with what the file says."""


@contextlib.contextmanager
def plain_model(located: Located) -> Iterator[PlainModel]:
    """A Hugging Face directory or a GGUF file, open while the block runs. ModelError, WorkflowError."""
    if located.path.is_dir():
        with open_source(located) as source:
            yield _of_directory(source)
        return
    with open_source(located) as source:  # checks the config and every shape
        if source.config.encoder is not None:
            raise WorkflowError(f"{located.name} makes vectors: quantise writes language models")
    file, header = open_gguf(located.path)
    try:
        tensors = tuple(_of_file(file, info) for info in header.tensors.values())
        keys = {key: value for key, value in header.metadata.items() if not key.startswith(DROPPED)}
        architecture = header.metadata["general.architecture"]
        yield PlainModel(located.name, architecture, keys, _key_types(located.path), tensors, None)
    finally:
        file.close()


def _key_types(path: Path) -> dict[str, tuple[int, int | None]]:
    """By the gguf package, whose reader the file may have: ours has checked it."""
    import gguf

    fields = gguf.GGUFReader(path).fields
    return {
        key: (field.types[0], field.types[-1] if len(field.types) > 1 else None)
        for key, field in fields.items()
        if field.types
    }


def _of_file(file: GgufFiles, info: TensorInfo) -> PlainTensor:
    n_rows = int(np.prod(info.shape[:-1], dtype=np.int64)) if len(info.shape) > 1 else 1
    row_bytes = info.n_bytes // n_rows
    if info.type_name not in BLOCK_TYPES:
        raise WorkflowError(f"{file.path} has {info.name} in {info.type_name}, which cannot be read")

    def rows(start: int, stop: int) -> Array:
        raw = file.read(info.offset + start * row_bytes, (stop - start) * row_bytes)
        return as_float32(decode_rows(info.type_name, raw, stop - start), info.name)

    return PlainTensor(info.name, info.shape, info.type_name, rows)


def as_float32(rows: Rows, what: str) -> Array:
    """Rows of any type. ModelError, which names `what`, for NaN and infinity."""
    check_finite(rows, what)
    if isinstance(rows, np.ndarray):
        return rows
    values: Array = packing.dequantise(packing.widened(rows) if isinstance(rows, BlockRows) else rows)
    return values


def _of_directory(source: ModelSource) -> PlainModel:
    config = source.config
    family = family_in_gguf(config, source.name)
    architecture = family.gguf[0]
    keys = {f"{architecture}.{key}": value for key, value in config_keys(config, family).items()}
    keys |= vocabulary_keys(source) | {"general.name": source.name}
    tensors = [_renamed(ours, tensor, source, family) for ours, tensor in _in_order(source)]
    for name, factors in factor_tensors(config.rope).items():
        tensors.append(PlainTensor(name, factors.shape, "F32", _constant(factors)))
    return PlainModel(source.name, architecture, keys, {}, tuple(tensors), config)


def _constant(values: Array) -> Callable[[int, int], Array]:
    return lambda _start, _stop: values.reshape(1, -1)


def _in_order(source: ModelSource) -> list[tuple[str, SourceTensor]]:
    """The embedding, the layers in their order, then the rest."""

    def place(item: tuple[str, SourceTensor]) -> tuple[int, int, str]:
        name = item[0]
        if name.startswith("layers."):
            return 1, int(name.split(".")[1]), name
        return (0 if name == "embed" else 2), 0, name

    return sorted(source.tensors.items(), key=place)


def _renamed(ours: str, tensor: SourceTensor, source: ModelSource, family: Family) -> PlainTensor:
    names = tensor_names(family, gguf_model.LAYER_NAMES)
    if ours.startswith("layers."):
        _, layer, name = ours.split(".", 2)
        theirs = f"blk.{layer}.{names[name]}" if name in names else None
    else:
        theirs = {name: their for their, name in gguf_model.GLOBAL_NAMES.items()}.get(ours)
    if theirs is None:
        raise WorkflowError(
            f"{source.name} has a tensor {ours}, which {family.name} models have in another form in"
            " GGUF files: convert it with llama.cpp, and quantise the GGUF file"
        )
    wanted = interleaved(ours, tensor, source.config) if family.gguf_interleaved_heads else tensor

    def rows(start: int, stop: int) -> Array:
        return as_float32(wanted.rows(start, stop), ours)

    return PlainTensor(theirs, tensor.shape, tensor.type_name, rows)

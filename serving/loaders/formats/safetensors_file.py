"""A safetensors file, read as hostile input: tensors of a checked table (`_safetensors`) as rows."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from phasewise._safetensors import LENGTH_BYTES, TensorEntry, entries_of, header_bytes
from phasewise.cython_kernels.packing import Array, from_bf16
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.loaders.forms import BF16, F16, F32, WeightForm
from phasewise.serving.loaders.source import SourceFile, SourceTensor, parse_json_object

Shards = list[tuple[SourceFile, dict[str, TensorEntry]]]
"""Weight files, open, each with its table."""
READABLE: dict[str, WeightForm] = {"F32": F32, "F16": F16, "BF16": BF16}


def read_entries(file: SourceFile) -> dict[str, TensorEntry]:
    """The header's table. Every entry has a known size that fits, lies in the file and overlaps no other."""
    try:
        length = header_bytes(file.read(0, min(file.size, LENGTH_BYTES)), file.size)
        table = parse_json_object(file.read(LENGTH_BYTES, length), f"the header of {file.path}")
        return entries_of(table, LENGTH_BYTES + length, file.size)
    except ValueError as error:
        raise ModelError(f"{file.path} {error}") from None


def tensor_of(file: SourceFile, name: str, entry: TensorEntry) -> SourceTensor:
    """The tensor as rows of float32; a stack of matrices as the rows of all of them."""
    form, shape = READABLE.get(entry.dtype), entry.shape
    while len(shape) > 3 and shape[0] == 1:
        shape = shape[1:]
    if form is None or not 1 <= len(shape) <= 3 or 0 in shape:
        raise ModelError(
            f"{file.path} has {name} as {entry.dtype} {entry.shape}: a vector or matrix of"
            f" {', '.join(READABLE)} expected"
        )
    n_rows = math.prod(entry.shape[:-1])
    row_bytes = entry.n_bytes // n_rows

    def rows(start: int, stop: int) -> Array:
        raw = file.read(entry.offset + start * row_bytes, (stop - start) * row_bytes)
        return _numbers(raw, entry.dtype).reshape(stop - start, -1)

    return SourceTensor(entry.dtype, shape, entry.n_bytes, form, rows)


def _numbers(raw: bytes, dtype: str) -> Array:
    if dtype == "BF16":
        return from_bf16(np.frombuffer(raw, "<u2"))
    return np.frombuffer(raw, "<f4" if dtype == "F32" else "<f2").astype(np.float32)


def open_all(directory: ModelDirectory, names: list[str]) -> Shards:
    """Every file, open, with its table. The caller closes them; on an error here none stays open."""
    opened: Shards = []
    try:
        for name in names:
            file = directory.open(name)
            opened.append((file, {}))
            opened[-1] = (file, read_entries(file))
    except BaseException:
        close_all(opened)
        raise
    return opened


def close_all(opened: Shards) -> None:
    for file, _ in opened:
        file.close()


def renamed(entries: Mapping[str, TensorEntry], beginnings: Mapping[str, str]) -> dict[str, TensorEntry]:
    """Entries whose names have one of these beginnings, each replaced by another; "": they are left out."""
    chosen = {}
    for theirs, entry in entries.items():
        stem = next((stem for stem in beginnings if theirs.startswith(stem)), None)
        if stem is not None and beginnings[stem]:
            chosen[beginnings[stem] + theirs.removeprefix(stem)] = entry
    return chosen

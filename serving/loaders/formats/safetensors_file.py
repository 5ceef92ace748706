"""A safetensors file, read as hostile input: the header is checked against the file before it is believed.

Eight bytes of length, a JSON table of (dtype, shape, byte range), then the tensors. The `safetensors` package
cannot give bfloat16 to numpy, and maps its file; the tests hold this reader against it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from phasewise._words import counted
from phasewise.cython_kernels.packing import Array, from_bf16
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from phasewise.serving.loaders.formats.model_directory import ModelDirectory
from phasewise.serving.loaders.forms import BF16, F32, Rows, WeightForm
from phasewise.serving.loaders.source import (
    MAX_JSON_BYTES,
    SourceFile,
    SourceTensor,
    parse_json_object,
)

METADATA_KEY = "__metadata__"
MAX_DIMS = 8
MAX_SIZE = 1 << 48  # of one dimension: keeps products small enough to print

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip
READABLE: dict[str, WeightForm] = {"F32": F32, "F16": F32, "BF16": BF16}


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checked header; `offset` from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def read_entries(file: SourceFile) -> dict[str, TensorEntry]:
    """The header's table. Every entry has a known size that fits, lies in the file and overlaps no other."""
    if file.size < 8:
        raise ModelError(f"{file.path} has {file.size} bytes: not a safetensors file")
    (length,) = struct.unpack("<Q", file.read(0, 8))
    if length > min(file.size - 8, MAX_JSON_BYTES):
        raise ModelError(f"{file.path} claims a header of {length} bytes in a file of {file.size}")
    header = parse_json_object(file.read(8, length), f"the header of {file.path}")
    header.pop(METADATA_KEY, None)
    start = 8 + length
    entries = {
        name: _entry(fields, start, f"{file.path} tensor {name!r:.80}") for name, fields in header.items()
    }
    _check_places(file, start, entries)
    return entries


def _entry(fields: Any, start: int, what: str) -> TensorEntry:
    if not isinstance(fields, dict):
        raise ModelError(f"{what} is not described by a JSON object")
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ModelError(f"{what} has the unknown type {dtype!r:.40}")
    shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMS:
        raise ModelError(f"{what} has the shape {fields.get('shape')!r:.60}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ModelError(f"{what} has the byte range {fields.get('data_offsets')!r:.60}")
    n_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if n_bytes != offsets[1] - offsets[0]:
        raise ModelError(f"{what} needs {counted(n_bytes, 'byte')} and is given {offsets[1] - offsets[0]}")
    return TensorEntry(dtype, shape, start + offsets[0], n_bytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(size) is int and 0 <= size <= MAX_SIZE for size in value):
        return tuple(value)
    return None


def _check_places(file: SourceFile, start: int, entries: dict[str, TensorEntry]) -> None:
    end, before = start, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset < end:
            raise ModelError(f"{file.path} places tensor {name!r:.80} inside {before!r:.80}")
        end, before = entry.offset + entry.n_bytes, name
        if end > file.size:
            raise ModelError(f"{file.path} is cut short: {name!r:.80} ends at byte {end} of {file.size}")


def tensor_of(file: SourceFile, name: str, entry: TensorEntry) -> SourceTensor:
    """The tensor as rows of float32; a stack of matrices as the rows of all of them."""
    form = READABLE.get(entry.dtype)
    if form is None or not 1 <= len(entry.shape) <= 3 or 0 in entry.shape:
        raise ModelError(
            f"{file.path} has {name} as {entry.dtype} {entry.shape}: a vector or matrix of"
            f" {', '.join(READABLE)} expected"
        )
    n_rows = math.prod(entry.shape[:-1])
    row_bytes = entry.n_bytes // n_rows

    def rows(start: int, stop: int) -> Array:
        raw = file.read(entry.offset + start * row_bytes, (stop - start) * row_bytes)
        return _numbers(raw, entry.dtype).reshape(stop - start, -1)

    return SourceTensor(entry.dtype, entry.shape, entry.n_bytes, form, rows)


def mxfp4_tensor(
    file: SourceFile, name: str, blocks: TensorEntry, scale_file: SourceFile, scales: TensorEntry
) -> SourceTensor:
    """A stack of matrices [experts, outputs, inputs] in MXFP4: blocks [experts, outputs, inputs / 32, 16] of
    two numbers a byte, the even one low, and an exponent for each block."""
    shape, found = blocks.shape, scales.shape
    if (
        blocks.dtype != "U8"
        or scales.dtype != "U8"
        or len(shape) != 4
        or shape[3] != 16
        or shape[:3] != found
    ):
        raise ModelError(
            f"{file.path} has {name} as {blocks.dtype} {shape} with scales {scales.dtype} {found}: MXFP4 is"
            " U8 [experts, outputs, inputs / 32, 16] with scales [experts, outputs, inputs / 32]"
        )
    if 0 in shape:
        raise ModelError(f"{file.path} has {name} as {shape}: nothing in it")
    per_row = shape[2]

    def rows(start: int, stop: int) -> Rows:
        count = stop - start
        packed = np.frombuffer(
            file.read(blocks.offset + start * per_row * 16, count * per_row * 16), np.uint8
        )
        exponents = np.frombuffer(scale_file.read(scales.offset + start * per_row, count * per_row), np.uint8)
        pairs = packed.reshape(count, per_row, 16)
        codes = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(count, per_row, 2, 16)
        halves = codes[:, :, 0] | codes[:, :, 1] << 4
        raw = np.concatenate([exponents.reshape(count, per_row, 1), halves], axis=2)
        return decode_rows("MXFP4", raw.tobytes(), count)

    form = BLOCK_TYPES["MXFP4"].form
    return SourceTensor("MXFP4", (*shape[:2], per_row * 32), blocks.n_bytes + scales.n_bytes, form, rows)


def _numbers(raw: bytes, dtype: str) -> Array:
    if dtype == "BF16":
        return from_bf16(np.frombuffer(raw, "<u2"))
    return np.frombuffer(raw, "<f4" if dtype == "F32" else "<f2").astype(np.float32)


def open_all(directory: ModelDirectory, names: list[str]) -> list[tuple[SourceFile, dict[str, TensorEntry]]]:
    """Every file, open, with its table. The caller closes them; on an error here none stays open."""
    opened: list[tuple[SourceFile, dict[str, TensorEntry]]] = []
    try:
        for name in names:
            file = directory.open(name)
            opened.append((file, {}))
            opened[-1] = (file, read_entries(file))
    except BaseException:
        for file, _ in opened:
            file.close()
        raise
    return opened

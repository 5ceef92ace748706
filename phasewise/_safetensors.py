"""The table of a safetensors file, checked against the size of the file.

Eight bytes of length, a JSON table of (dtype, shape, byte range), then the tensors. The package of that name
cannot give bfloat16 to numpy, and maps its file; tests compare this reader with it.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from phasewise._words import counted

LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
MAX_HEADER_BYTES = 16 << 20
MAX_DIMS = 8
MAX_SIZE = 1 << 48  # of one dimension: keeps products small enough to print

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checked table; `offset` is in bytes from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


def header_bytes(first: bytes, file_bytes: int) -> int:
    """Read the length of the table's JSON from the file's first bytes. ValueError lacks the file's name."""
    if len(first) < LENGTH_BYTES:
        raise ValueError(f"has {counted(len(first), 'byte')}: not a safetensors file")
    (length,) = struct.unpack("<Q", first[:LENGTH_BYTES])
    if length > min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise ValueError(f"claims a header of {length} bytes in a file of {file_bytes}")
    return int(length)


def entries_of(table: dict[str, Any], start: int, file_bytes: int) -> dict[str, TensorEntry]:
    """Check the tensors of a table, whose bytes begin at `start`: every tensor has a known size that fits,
    lies in the file and overlaps no other. ValueError, whose text follows the file's name."""
    entries = {
        name: _entry(fields, start, f"tensor {name!r:.80}")
        for name, fields in table.items()
        if name != METADATA_KEY
    }
    end, before = start, ""
    for name, entry in sorted(entries.items(), key=lambda item: item[1].offset):
        if entry.offset < end:
            raise ValueError(f"places tensor {name!r:.80} inside {before!r:.80}")
        end, before = entry.offset + entry.n_bytes, name
        if end > file_bytes:
            raise ValueError(f"is cut short: {name!r:.80} ends at byte {end} of {file_bytes}")
    return entries


def _entry(fields: Any, start: int, what: str) -> TensorEntry:
    if not isinstance(fields, dict):
        raise ValueError(f"{what} is not described by a JSON object")
    dtype = fields.get("dtype")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ValueError(f"{what} has the unknown type {dtype!r:.40}")
    shape, offsets = _sizes(fields.get("shape")), _sizes(fields.get("data_offsets"))
    if shape is None or len(shape) > MAX_DIMS:
        raise ValueError(f"{what} has the shape {fields.get('shape')!r:.60}")
    if offsets is None or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{what} has the byte range {fields.get('data_offsets')!r:.60}")
    n_bytes = math.prod(shape) * ITEM_BYTES[dtype]
    if n_bytes != offsets[1] - offsets[0]:
        raise ValueError(f"{what} needs {counted(n_bytes, 'byte')} and is given {offsets[1] - offsets[0]}")
    return TensorEntry(dtype, shape, start + offsets[0], n_bytes)


def _sizes(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(size) is int and 0 <= size <= MAX_SIZE for size in value):
        return tuple(value)
    return None

"""Sparse matrices of compressed-tensors, `sparse-bitmask` and `sparse-24-bitmask`, read as hostile input.

A weight is several tensors of the file: `.shape` [2]; `.bitmask` uint8 [n, ceil(k / 8)], whose bit i of a
row (the lowest of a byte first) is for column i; `.compressed`, the values whose bits are set, row by row;
and `.row_offsets` int64 [n], where rows begin among them. Of 2:4 every four columns have two bits, and there
are no offsets.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from phasewise._safetensors import TensorEntry
from phasewise.cython_kernels.packing import Array, from_bf16
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.safetensors_file import READABLE
from phasewise.serving.loaders.source import SourceFile, SourceTensor

PARTS = (".compressed", ".bitmask", ".shape", ".row_offsets")
FORMATS = ("sparse-bitmask", "sparse-24-bitmask")
MAX_DIM = 1 << 31

Found = tuple[SourceFile, TensorEntry]


def part_of(name: str) -> tuple[str, str] | None:
    """The weight's name and the part's, of a tensor that is part of a sparse matrix."""
    stem, dot, last = name.rpartition(".")
    return (stem + ".weight", dot + last) if dot + last in PARTS else None


def bitmask_tensor(name: str, parts: Mapping[str, Found]) -> SourceTensor:
    """The matrix `name` from its parts. ModelError where they do not fit together."""
    what = f"the sparse tensor {name!r:.80}"
    for part in PARTS[:3]:
        if part not in parts:
            raise ModelError(f"{what} lacks its {part!r:.80}: the file is damaged")
    n, k = _shape(what, *parts[".shape"])
    (_, mask), (_, values) = parts[".bitmask"], parts[".compressed"]
    if values.dtype not in READABLE:
        raise ModelError(f"{what} holds {values.dtype}: {', '.join(READABLE)} can be read")
    if mask.dtype != "U8" or mask.shape != (n, -(-k // 8)):
        raise ModelError(f"{what} of {n} x {k} has a bitmask {mask.dtype} {mask.shape}")
    is_24 = len(values.shape) == 2
    if is_24 and (k % 4 or values.shape != (n, k // 2)):
        raise ModelError(f"{what} of {n} x {k} has {values.shape} values: 2:4 has half of its columns")
    offsets = parts.get(".row_offsets")
    if not is_24 and (offsets is None or offsets[1].dtype != "I64" or offsets[1].shape != (n,)):
        raise ModelError(f"{what} of {n} rows lacks int64 offsets for each")

    def rows(start: int, stop: int) -> Array:
        kept = _mask_rows(what, parts[".bitmask"], k, start, stop)
        if is_24:
            first, count = start * k // 2, (stop - start) * k // 2
            if (kept.reshape(stop - start, k // 4, 4).sum(axis=2) != 2).any():
                raise ModelError(f"{what} does not keep two of every four columns")
        else:
            assert offsets is not None
            first = _first_value(what, kept, offsets, values.shape[0], start, stop)
            count = int(kept.sum())
        out = np.zeros((stop - start, k), np.float32)
        out[kept] = _values(parts[".compressed"], first, count)
        return out

    n_bytes = sum(entry.n_bytes for _, entry in parts.values())
    return SourceTensor(f"{values.dtype} sparse", (n, k), n_bytes, READABLE[values.dtype], rows)


def _shape(what: str, file: SourceFile, entry: TensorEntry) -> tuple[int, int]:
    if entry.dtype != "I64" or entry.shape not in ((2,), (2, 1)):
        raise ModelError(f"{what} has a shape {entry.dtype} {entry.shape}: two int64 expected")
    n, k = (int(size) for size in np.frombuffer(file.read(entry.offset, 16), "<i8"))
    if not (1 <= n < MAX_DIM and 1 <= k < MAX_DIM):
        raise ModelError(f"{what} is {n} x {k}: from 1 to {MAX_DIM - 1} expected")
    return n, k


def _mask_rows(what: str, part: Found, k: int, start: int, stop: int) -> Array:
    file, entry = part
    width = entry.shape[1]
    raw = np.frombuffer(file.read(entry.offset + start * width, (stop - start) * width), np.uint8)
    bits = np.unpackbits(raw.reshape(stop - start, width), axis=1, bitorder="little").astype(bool)
    if bits[:, k:].any():
        raise ModelError(f"{what} has bits beyond its last column, {k}")
    return bits[:, :k]


def _first_value(what: str, kept: Array, part: Found, total: int, start: int, stop: int) -> int:
    """The place where the first row's values begin. Offsets must be those that the bits count."""
    file, entry = part
    n = entry.shape[0]
    count = min(stop + 1, n) - start
    offsets = np.frombuffer(file.read(entry.offset + 8 * start, 8 * count), "<i8").tolist()
    offsets += [total] if stop == n else []
    counted = kept.sum(axis=1).tolist()
    counts = [after - before for before, after in pairwise(offsets)]
    if counts != counted or not 0 <= offsets[0] <= total or (start == 0 and offsets[0] != 0):
        raise ModelError(f"{what} has row offsets that are not what its bits count")
    return int(offsets[0])


def _values(part: Found, first: int, count: int) -> Array:
    file, entry = part
    size = {"F32": 4}.get(entry.dtype, 2)
    if (first + count) * size > entry.n_bytes:
        raise ModelError(f"{file.path} ends before the values that its bits count")
    raw = file.read(entry.offset + first * size, count * size)
    if entry.dtype == "BF16":
        return from_bf16(np.frombuffer(raw, "<u2"))
    return np.frombuffer(raw, "<f4" if entry.dtype == "F32" else "<f2").astype(np.float32)


def check_compression(config: Mapping[str, Any], what: str) -> None:
    """ModelError unless a compressed-tensors config asks for nothing but the formats that are read here."""
    own = config.get("format")
    sparsity = config.get("sparsity_config")
    sparse_format = sparsity.get("format") if isinstance(sparsity, Mapping) else None
    if config.get("config_groups") or own not in (None, "dense", *FORMATS):
        raise ModelError(
            f"{what} asks for compressed-tensors' format {own!r:.60}: {', '.join(FORMATS)} can be read"
        )
    if sparse_format not in (None, "dense", *FORMATS):
        raise ModelError(
            f"{what} asks for the sparse format {sparse_format!r:.60}: {', '.join(FORMATS)} can be read"
        )

"""A GGUF file, or a model in several of them (`llama-gguf-split`), read as hostile input.

Every count, length, dimension and offset is checked against the file before it is believed, and the whole
header is bounded in bytes and in values, so a damaged or malicious file costs little and ends in one
`ModelError`. The `gguf` package's own reader trusts its input and makes several numpy objects per token of
the vocabulary (seconds for 50,000); the tests hold the two readers and their tables of types against each
other."""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_right
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from phasewise._words import counted
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.source import SourceFile

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
FIRST_READ_BYTES = 8 << 20
MAX_HEADER_BYTES = 128 << 20
MAX_COUNT = 1 << 16  # key/value pairs, and tensors
MAX_VALUES = 4 << 20  # array elements in the whole header
MAX_NAME_BYTES = 1 << 16
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20

_BOOL, _STRING, _ARRAY = 7, 8, 9
_SCALARS: dict[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", _BOOL: "<u1",
    10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 40), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2), 26: ("I32", 1, 4), 27: ("I64", 1, 8),
    28: ("F64", 1, 8), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18), 42: ("Q2_0", 64, 18),
}  # fmt: skip
"""A type's name, the values of a block, and its bytes, by the type's number in files."""
_LENGTH = struct.Struct("<Q")

MOST_PARTS = 512
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_COUNT, _NUMBER, _N_TENSORS = "split.count", "split.no", "split.tensors.count"


@dataclass(frozen=True)
class TensorInfo:
    """The place of a tensor; `shape` has the outermost dimension first (GGUF writes the innermost first)."""

    name: str
    shape: tuple[int, ...]
    type_name: str
    offset: int  # from the start of the file
    n_bytes: int


@dataclass(frozen=True)
class GgufHeader:
    metadata: dict[str, Any]  # plain Python values; arrays are lists
    tensors: dict[str, TensorInfo]


class _TooShort(Exception):
    """The bytes at hand end inside the header."""


def read_header(file: SourceFile) -> GgufHeader:
    """Parse and check a file's header; every tensor in it lies inside the file and overlaps no other."""
    length = min(file.size, FIRST_READ_BYTES)
    while True:
        try:
            return _Parser(file.read(0, length), file).header()
        except _TooShort:
            if length == file.size:
                raise ModelError(f"{file.path} ends inside its header: the file is cut short") from None
            if length >= MAX_HEADER_BYTES:
                raise ModelError(f"{file.path} has a header of more than {MAX_HEADER_BYTES} bytes") from None
            length = min(file.size, 4 * length, MAX_HEADER_BYTES)


class _Parser:
    """A cursor over the first bytes of a file. The rest of the file is known by size only."""

    def __init__(self, data: bytes, file: SourceFile) -> None:
        self.data = data
        self.path = file.path
        self.file_bytes = file.size
        self.offset = 0
        self.values_left = MAX_VALUES

    def header(self) -> GgufHeader:
        if self._take(4) != MAGIC:
            raise self._bad("does not begin with GGUF: not a GGUF file")
        version = self._scalar("<u4")
        if version not in VERSIONS:
            hint = " (a big-endian file)" if version in (v << 24 for v in VERSIONS) else ""
            raise self._bad(f"has GGUF version {version}{hint}; versions 2 and 3 are readable")
        n_tensors, n_pairs = self._scalar("<u8"), self._scalar("<u8")
        if max(n_tensors, n_pairs) > MAX_COUNT:
            raise self._bad(
                f"claims {counted(n_tensors, 'tensor')} and {n_pairs} metadata keys, more than {MAX_COUNT}"
            )
        metadata: dict[str, Any] = {}
        for _ in range(n_pairs):
            key = self._string(MAX_NAME_BYTES)
            if key in metadata:
                raise self._bad(f"has the metadata key {key!r:.80} twice")
            metadata[key] = self._value(self._scalar("<u4"), key)
        infos = [self._tensor_info() for _ in range(n_tensors)]
        return GgufHeader(metadata, self._placed(infos, metadata))

    def _bad(self, what: str) -> ModelError:
        return ModelError(f"{self.path} {what}")

    def _take(self, length: int) -> bytes:
        end = self.offset + length
        if end > len(self.data):
            if end > self.file_bytes:
                raise self._bad(
                    f"claims {length} bytes at {self.offset}, beyond its end at {self.file_bytes}"
                )
            raise _TooShort
        piece = self.data[self.offset : end]
        self.offset = end
        return piece

    def _scalar(self, dtype: str) -> Any:
        kind = np.dtype(dtype)
        return np.frombuffer(self._take(kind.itemsize), kind)[0].item()

    def _string(self, max_bytes: int = MAX_HEADER_BYTES) -> str:
        length = self._scalar("<u8")
        if length > max_bytes:
            raise self._bad(f"claims a string of {length} bytes at {self.offset}")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError:
            raise self._bad(f"holds text that is not UTF-8 before byte {self.offset}") from None

    def _value(self, type_id: int, key: str) -> Any:
        if type_id == _STRING:
            return self._string()
        if type_id == _ARRAY:
            return self._array(key)
        if type_id not in _SCALARS:
            raise self._bad(f"has metadata {key!r:.80} of unknown type {type_id}")
        value = self._scalar(_SCALARS[type_id])
        return bool(value) if type_id == _BOOL else value

    def _array(self, key: str) -> list[Any]:
        type_id, count = self._scalar("<u4"), self._scalar("<u8")
        self.values_left -= count
        if self.values_left < 0:
            raise self._bad(f"claims {count} values in metadata {key!r:.80}, more than {MAX_VALUES} in all")
        if type_id == _STRING:
            return self._strings(count)
        if type_id not in _SCALARS:
            raise self._bad(f"has metadata {key!r:.80}, an array of unsupported type {type_id}")
        dtype = np.dtype(_SCALARS[type_id])
        values = np.frombuffer(self._take(count * dtype.itemsize), dtype)
        return list((values.astype(bool) if type_id == _BOOL else values).tolist())

    def _strings(self, count: int) -> list[str]:
        """Read the strings of a vocabulary: a hundred times as long as all else here, so written flat."""
        data, end = self.data, len(self.data)
        start = position = self.offset
        strings = []
        for _ in range(count):
            start = position + 8
            if start > end:
                break
            position = start + _LENGTH.unpack_from(data, start - 8)[0]
            if position > end:
                break
            try:
                strings.append(data[start:position].decode())
            except UnicodeDecodeError:
                raise self._bad(f"holds text that is not UTF-8 before byte {position}") from None
        self._take(max(start, position) - self.offset)  # complains where the loop stopped early
        return strings

    def _tensor_info(self) -> TensorInfo:
        name = self._string(MAX_NAME_BYTES)
        n_dims = self._scalar("<u4")
        if not 1 <= n_dims <= MAX_DIMS:
            raise self._bad(f"gives tensor {name!r:.80} {counted(n_dims, 'dimension')}")
        shape = tuple(self._scalar("<u8") for _ in range(n_dims))[::-1]
        type_id, offset = self._scalar("<u4"), self._scalar("<u8")
        if type_id not in TENSOR_TYPES:
            raise self._bad(f"gives tensor {name!r:.80} the unknown type {type_id}")
        type_name, block, block_bytes = TENSOR_TYPES[type_id]
        n_values = 1
        for size in shape:
            n_values *= size
        if n_values == 0 or shape[-1] % block:
            raise self._bad(
                f"gives tensor {name!r:.80} the shape {shape}, not whole blocks of {block} values"
            )
        return TensorInfo(name, shape, type_name, offset, n_values // block * block_bytes)

    def _placed(self, infos: list[TensorInfo], metadata: dict[str, Any]) -> dict[str, TensorInfo]:
        """Tensors at absolute offsets, checked: aligned, inside the file, apart from each other."""
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._bad(
                f"has alignment {alignment!r:.80}: a power of two from 8 to {MAX_ALIGNMENT} expected"
            )
        start = -(-self.offset // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        end, before = start, ""
        for info in sorted(infos, key=lambda info: info.offset):
            offset = start + info.offset
            if info.name in placed:
                raise self._bad(f"has tensor {info.name!r:.80} twice")
            if info.offset % alignment or offset < end:
                raise self._bad(
                    f"places tensor {info.name!r:.80} at {offset}, misaligned or inside {before!r:.80}"
                )
            end, before = offset + info.n_bytes, info.name
            if end > self.file_bytes:
                raise self._bad(
                    f"is cut short: tensor {info.name!r:.80} ends at byte {end} of {self.file_bytes}"
                )
            placed[info.name] = TensorInfo(info.name, info.shape, info.type_name, offset, info.n_bytes)
        return placed


def part_paths(path: Path) -> list[Path]:
    """The paths that all parts of the model at `path` must have, in their order; `path` if it is no part."""
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 0
    if match is None or not 1 <= int(match["number"]) <= count <= MOST_PARTS:
        return [path]
    return [
        path.with_name(f"{match['stem']}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)
    ]


def stem_of(file_name: str) -> str:
    """The name of a model, by that of its file or of a part of it; bytes that are not UTF-8 as `\\xe9`."""
    match = _PART.fullmatch(file_name)
    stem = match["stem"] if match else file_name.removesuffix(".gguf")
    return os.fsencode(stem).decode(errors="backslashreplace")


class GgufFiles:
    """One or several open files as one range of bytes: those of a part follow those of the part before."""

    def __init__(self, files: list[SourceFile]) -> None:
        self._files = files
        self._ends = list(accumulate(file.size for file in files))
        self.path = files[0].path
        self.size = self._ends[-1]

    def start_of(self, part: int) -> int:
        """The offset of a part's first byte."""
        return self._ends[part] - self._files[part].size

    def read(self, offset: int, length: int) -> bytes:
        """Read exactly `length` bytes, all in one part."""
        part = bisect_right(self._ends, offset)
        return self._files[part].read(offset - self.start_of(part), length)

    def close(self) -> None:
        for file in self._files:
            file.close()


def open_gguf(path: Path) -> tuple[GgufFiles, GgufHeader]:
    """Open a GGUF file, or all parts of its model, with the checked header: the metadata of the first part
    and the tensors of all. The caller closes the files."""
    with ExitStack() as stack:
        named = SourceFile(path)
        stack.callback(named.close)
        header = read_header(named)
        count = _whole_number(header.metadata, _COUNT, path, 1)
        if count == 1:
            stack.pop_all()
            return GgufFiles([named]), header
        paths = part_paths(path)
        if len(paths) != count:
            raise ModelError(
                f"{path} is one of {counted(count, 'part')} of a model: its name must end in "
                f"-00001-of-{count:05}.gguf, with its own number, and the others must lie beside it"
            )
        files = [stack.enter_context(SourceFile(part_path)) for part_path in paths]
        headers = [read_header(file) for file in files]
        stack.pop_all()
    named.close()
    whole = GgufFiles(files)
    try:
        return whole, _joined(whole, paths, headers)
    except BaseException:
        whole.close()
        raise


def _joined(whole: GgufFiles, paths: list[Path], headers: list[GgufHeader]) -> GgufHeader:
    tensors: dict[str, TensorInfo] = {}
    for part, (path, header) in enumerate(zip(paths, headers, strict=True)):
        number = _whole_number(header.metadata, _NUMBER, path)
        count = _whole_number(header.metadata, _COUNT, path)
        if (number, count) != (part, len(paths)):
            raise ModelError(
                f"{path} says that it is part {number + 1} of {count}: it must be the one that its name says"
            )
        for name, info in header.tensors.items():
            if name in tensors:
                raise ModelError(f"{path} has tensor {name!r:.80}, which an earlier part has too")
            tensors[name] = replace(info, offset=whole.start_of(part) + info.offset)
    n_promised = _whole_number(headers[0].metadata, _N_TENSORS, paths[0], len(tensors))
    if n_promised != len(tensors):
        raise ModelError(
            f"{paths[0]} promises {counted(n_promised, 'tensor')}, and its parts have {len(tensors)}"
        )
    return GgufHeader(headers[0].metadata, tensors)


def _whole_number(metadata: Mapping[str, Any], key: str, path: Path, default: int | None = None) -> int:
    value = metadata.get(key, default)
    if type(value) is not int or not 0 <= value <= 1 << 20:
        raise ModelError(f"{path} has {key} = {value!r:.60}: a whole number expected")
    return max(1, value) if key == _COUNT else value

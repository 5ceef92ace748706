"""The input of the packer from every reader of model files: a checked config and tensors readable row by row.

Files are read with `pread` in bounded pieces and never mapped: a source that shrinks while it is read gives
an error, not a signal, and its pages do not count as ours.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from phasewise._files import open_regular
from phasewise._json import infinity_of, read_json, with_unique_keys
from phasewise._words import reason_of
from phasewise.cython_kernels.blocks import BlockRows
from phasewise.cython_kernels.packing import COLUMN_GROUP, Array, QuantRows
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.forms import Rows, WeightForm
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults

RowReader = Callable[[int, int], Rows]  # of rows [start, stop)

MAX_JSON_BYTES = 16 << 20
MAX_TOKENIZER_BYTES = 64 << 20


class SourceFile:
    """A regular file open for reading at offsets. Everything that can fail is a `ModelError`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._fd = open_regular(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} cannot be opened: {reason_of(error)}") from error
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, length: int) -> bytes:
        """Exactly `length` bytes."""
        try:
            data = os.pread(self._fd, length, offset)
            while len(data) < length:
                more = os.pread(self._fd, length - len(data), offset + len(data))
                if not more:
                    raise ModelError(f"{self.path} ends at byte {offset + len(data)}: the file is cut short")
                data += more
        except OSError as error:
            raise ModelError(f"{self.path} cannot be read: {reason_of(error)}") from error
        return data

    def real_path(self) -> Path:
        """The real path of the open file, whatever links its path has."""
        try:
            return Path(os.readlink(f"/proc/self/fd/{self._fd}"))
        except OSError as error:
            raise ModelError(f"{self.path} cannot be followed: {reason_of(error)}") from error

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a file, shape outermost first; `rows(start, stop)` reads and decodes some of its rows.

    A vector is a matrix of one row to `rows`. `type_name` is the file's own name for the type.
    """

    type_name: str
    shape: tuple[int, ...]
    n_bytes: int
    form: WeightForm
    rows: RowReader


def take_rows(rows: Rows, order: Array) -> Rows:
    """Some rows, in another order."""
    if isinstance(rows, BlockRows):
        return rows.taken(order)
    if not isinstance(rows, QuantRows):
        return rows[order]
    mins = None if rows.mins is None else rows.mins[order]
    return replace(rows, q=rows.q[order], scales=rows.scales[order], mins=mins)


def take_columns(rows: Rows, first: int, width: int, what: str) -> Rows:
    """Some columns, from `first` on. ModelError for quantised rows whose groups a cut would divide.

    what: the tensor, in errors.
    """
    if isinstance(rows, np.ndarray):
        return np.ascontiguousarray(rows[:, first : first + width])
    if isinstance(rows, QuantRows):
        own, group = slice(first, first + width), rows.group
        if group == COLUMN_GROUP:
            return replace(rows, q=np.ascontiguousarray(rows.q[:, own]))
        if first % group == 0 and width % group == 0:
            groups = slice(first // group, (first + width) // group)
            mins = None if rows.mins is None else np.ascontiguousarray(rows.mins[:, groups])
            scales = np.ascontiguousarray(rows.scales[:, groups])
            return replace(rows, q=np.ascontiguousarray(rows.q[:, own]), scales=scales, mins=mins)
    if isinstance(rows, BlockRows):
        cut = rows.columns(first, first + width)
        if cut is not None:
            return cut
    raise ModelError(f"{what} is quantised, and cannot be cut between two inputs")


@dataclass(frozen=True)
class ModelSource:
    """A model in another program's file format. Tensors go by our names; a fused weight is still in parts:

    "embed", "lm_head", "final_norm", and per layer "layers.{i}." + q, k, v, o, gate, up, down, attn_norm,
    ffn_norm, and where the model has them what `layout` lists beside these.
    """

    name: str
    path: Path
    config: ModelConfig
    tensors: Mapping[str, SourceTensor]
    close: Callable[[], None]
    tokenizer_json: Callable[[], str] = str
    tokenizer_kind: str = "none"
    chat_template: str | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)
    embedding: Embedding | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()


def read_all(file: SourceFile, max_bytes: int = MAX_JSON_BYTES) -> str:
    """A whole UTF-8 file that must not be larger than `max_bytes`."""
    if file.size > max_bytes:
        raise ModelError(f"{file.path} has {file.size} bytes; such a file may have {max_bytes}")
    try:
        return file.read(0, file.size).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file.path} is not UTF-8 text: {error}") from error


def parse_json_object(text: str | bytes, what: str) -> dict[str, Any]:
    """A JSON object without duplicate keys; `what` names it in the error."""
    value = _parsed(text, what)
    if not isinstance(value, dict):
        raise ModelError(f"{what} holds {type(value).__name__}: a JSON object expected")
    return value


def parse_json_list(text: str | bytes, what: str, most: int) -> list[Any]:
    """A JSON list of at most `most` entries; `what` names it in the error."""
    value = _parsed(text, what)
    if not isinstance(value, list) or len(value) > most:
        raise ModelError(f"{what} holds {type(value).__name__}: a list of at most {most} entries expected")
    return value


def _parsed(text: str | bytes, what: str) -> Any:
    try:
        return read_json(text, object_of=with_unique_keys, constant_of=infinity_of)
    except ValueError as error:
        raise ModelError(f"{what} is not valid JSON: {error}") from error

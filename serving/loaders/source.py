"""Sources of models for the packer: a checked config and tensors that are read row by row, and the packed
form of a tensor under each user-facing format.

Files are read with `pread` in bounded pieces and never mapped: a source that shrinks while it is read gives
an error, not a signal. Nothing is rounded twice: `native` keeps every tensor's numbers exactly, `int8` widens
block-quantised rows exactly and rounds only plain numbers, `int4` keeps four-bit rows as they are. Under
`int4` the embedding and the output head stay in int8, as GGUF files of that size do."""

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
from phasewise.cython_kernels import packing
from phasewise.cython_kernels.blocks import BLOCKS, BlockRows, joined
from phasewise.cython_kernels.packing import BLOCK_KINDS, COLUMN_GROUP, Array, Kind, PackedWeight, QuantRows
from phasewise.serving.errors import ModelError
from phasewise.serving.models.encoding import Embedding
from phasewise.serving.models.packed_model import ModelConfig
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults

EMBEDDINGS = ("embed", "lm_head", "layer_table")
INT8_ZERO_POINT = 128

Rows = QuantRows | BlockRows | Array  # float32 [rows, k] where the file holds plain numbers


@dataclass(frozen=True)
class WeightForm:
    """The form of a weight in memory, apart from its size. `scale_dtype`: "float16" or "float32"; None: no
    scales, or all of them inside blocks."""

    kind: Kind
    group: int = 0
    zero_point: int = 0
    scale_dtype: str | None = None
    has_mins: bool = False

    def nbytes(self, n: int, k: int) -> int:
        """Packed size of an [n, k] weight, padding included."""
        return sum(size for _, _, size in self.arrays(n, k))

    def arrays(self, n: int, k: int) -> list[tuple[tuple[int, ...], np.dtype[np.generic], int]]:
        """Shape, dtype and bytes of values, then scales, then mins, as far as the form has them."""
        shapes: list[tuple[tuple[int, ...], np.dtype[np.generic]]] = [
            (packing.values_shape(self.kind, n, k), packing.values_dtype(self.kind))
        ]
        if self.scale_dtype is not None:
            scales = packing.scales_shape(self.kind, n, k, self.group), np.dtype(self.scale_dtype)
            shapes += [scales, scales] if self.has_mins else [scales]
        return [(shape, dtype, int(np.prod(shape, dtype=object)) * dtype.itemsize) for shape, dtype in shapes]

    @property
    def is_quantised(self) -> bool:
        return self.kind not in packing.DENSE_KINDS

    @property
    def in_blocks(self) -> bool:
        """True if scales lie with the codes, in one array."""
        return self.kind in BLOCKS


F32 = WeightForm("f32")
BF16 = WeightForm("bf16")
F16 = WeightForm("f16")
INT8 = WeightForm("q8", packing.DEFAULT_GROUP, INT8_ZERO_POINT, "float16")
INT4 = WeightForm("q4", packing.DEFAULT_GROUP, 0, "float16", True)


def block_form(kind: str) -> WeightForm:
    form = BLOCKS[kind]
    factors = "float32" if form.has_factors else None
    return WeightForm(BLOCK_KINDS[kind], form.group, form.zero_point, factors, form.has_mins)


def form_of(rows: QuantRows | BlockRows) -> WeightForm:
    if isinstance(rows, BlockRows):
        return block_form(rows.kind)
    return WeightForm(rows.kind, rows.group, rows.zero_point, str(rows.scales.dtype), rows.mins is not None)


def target_form(source: WeightForm, weight_format: str, name: str) -> WeightForm:
    """The packed form of weight `name`, whose file form is `source`, under a user-facing format."""
    match weight_format:
        case "native":
            return source
        case "f32":
            return F32
        case "bf16":
            return BF16
        case "int4" if source.kind == "q4" or (source.in_blocks and BLOCKS[source.kind].code_bits <= 4):
            return source
        case "int4" if name not in EMBEDDINGS:
            return INT4
    if source.in_blocks and not BLOCKS[source.kind].is_float:
        zero_point = 0 if source.has_mins else INT8_ZERO_POINT
        return WeightForm("q8", source.group, zero_point, "float32", source.has_mins)
    if source.scale_dtype is None:
        return INT8
    if source.kind == "q8":
        return source
    return replace(source, kind="q8", zero_point=0 if source.has_mins else INT8_ZERO_POINT)


def common_form(forms: set[WeightForm]) -> WeightForm | None:
    """The form that holds the numbers of all `forms` exactly; None where more than scales differ."""
    if len(forms) == 1:
        return next(iter(forms))
    wide = {form if form.scale_dtype is None else replace(form, scale_dtype="float32") for form in forms}
    return wide.pop() if len(wide) == 1 else None


def convert_rows(rows: Rows, form: WeightForm, what: str) -> Rows:
    """Convert rows to `form`, rounded once or not at all. `what`: the tensor, in errors."""
    check_finite(rows, what)
    if not isinstance(rows, np.ndarray):
        if form_of(rows) == form:
            return rows
        if isinstance(rows, BlockRows) and not rows.format.is_float:
            rows = packing.widened(rows)
        if isinstance(rows, QuantRows) and form.kind in ("q8", rows.kind):
            return _in_wider_form(rows, form)
        rows = packing.numbers(rows)
        check_finite(rows, what)
    if form.scale_dtype is None:
        return rows
    try:
        return packing.quantise(rows, 4 if form.kind == "q4" else 8, symmetric=not form.has_mins)
    except ValueError as error:
        raise ModelError(f"{what} cannot be quantised: {error}") from error


def _in_wider_form(rows: QuantRows, form: WeightForm) -> QuantRows:
    """The same rows with a byte for each number, or with wider scales."""
    assert form.scale_dtype is not None
    dtype, shift = np.dtype(form.scale_dtype), np.uint8(form.zero_point - rows.zero_point)
    return QuantRows(
        rows.q + shift,
        rows.scales.astype(dtype),
        None if rows.mins is None else rows.mins.astype(dtype),
        form.zero_point,
        rows.group,
        8 if form.kind == "q8" else rows.bits,
    )


def pack_rows(pieces: list[Rows], form: WeightForm, what: str) -> PackedWeight:
    """Pack rows that are in `form` already, one piece below the other."""
    rows = pieces[0] if len(pieces) == 1 else _joined(pieces)
    if isinstance(rows, BlockRows):
        return packing.pack_blocks(rows)
    if isinstance(rows, QuantRows):
        return packing.pack_quant(rows)
    packed = packing.pack_dense(rows, form.kind)
    if form.kind == "bf16" and ((packed.values & 0x7F80) == 0x7F80).any():
        raise ModelError(f"{what} holds numbers too large for bf16")
    return packed


def check_finite(rows: Rows, what: str) -> None:
    """Raise ModelError for NaN and infinity, in plain numbers or in scales and minima."""
    if isinstance(rows, BlockRows):
        finite = rows.is_finite
    else:
        arrays = (rows.scales, rows.mins) if isinstance(rows, QuantRows) else (rows,)
        finite = all(np.isfinite(array).all() for array in arrays if array is not None)
    if not finite:
        raise ModelError(f"{what} holds NaN or infinity: the file is damaged or its model diverged")


def _joined(pieces: list[Rows]) -> Rows:
    in_blocks = [piece for piece in pieces if isinstance(piece, BlockRows)]
    if in_blocks:
        return joined(in_blocks)
    quantised = [piece for piece in pieces if isinstance(piece, QuantRows)]
    if not quantised:
        return np.concatenate([piece for piece in pieces if isinstance(piece, np.ndarray)])
    q = np.concatenate([piece.q for piece in quantised])
    scales = np.concatenate([piece.scales for piece in quantised])
    mins = [piece.mins for piece in quantised if piece.mins is not None]
    return replace(quantised[0], q=q, scales=scales, mins=np.concatenate(mins) if mins else None)


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
        """Read exactly `length` bytes."""
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

    A vector is a matrix of one row to `rows`. `type_name` is the file's own name for the type."""

    type_name: str
    shape: tuple[int, ...]
    n_bytes: int
    form: WeightForm
    rows: RowReader


def take_rows(rows: Rows, order: Array) -> Rows:
    """Take rows by their indices, in the order of `order`."""
    if isinstance(rows, BlockRows):
        return rows.taken(order)
    if not isinstance(rows, QuantRows):
        return rows[order]
    mins = None if rows.mins is None else rows.mins[order]
    return replace(rows, q=rows.q[order], scales=rows.scales[order], mins=mins)


def take_columns(rows: Rows, first: int, width: int, what: str) -> Rows:
    """Take `width` columns from `first` on. Raises ModelError for quantised rows whose groups a cut would
    divide. `what`: the tensor, in errors."""
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
    ffn_norm, and where the model has them what `layout` lists beside these."""

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
    """Read a whole UTF-8 file that must not be larger than `max_bytes`."""
    if file.size > max_bytes:
        raise ModelError(f"{file.path} has {file.size} bytes; such a file may have {max_bytes}")
    try:
        return file.read(0, file.size).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{file.path} is not UTF-8 text: {error}") from error


def parse_json_object(text: str | bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object without duplicate keys; `what` names it in the error."""
    value = _parsed(text, what)
    if not isinstance(value, dict):
        raise ModelError(f"{what} holds {type(value).__name__}: a JSON object expected")
    return value


def parse_json_list(text: str | bytes, what: str, most: int) -> list[Any]:
    """Parse a JSON list of at most `most` entries; `what` names it in the error."""
    value = _parsed(text, what)
    if not isinstance(value, list) or len(value) > most:
        raise ModelError(f"{what} holds {type(value).__name__}: a list of at most {most} entries expected")
    return value


def _parsed(text: str | bytes, what: str) -> Any:
    try:
        return read_json(text, object_of=with_unique_keys, constant_of=infinity_of)
    except ValueError as error:
        raise ModelError(f"{what} is not valid JSON: {error}") from error

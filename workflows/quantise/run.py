"""Write a GGUF file's weights in fewer bits, as the gguf package rounds them, and measure the error."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.cython_kernels import packing
from phasewise.serving.loaders import open_source
from phasewise.serving.loaders.fetching.resolve import Located, cache_root, locate
from phasewise.serving.loaders.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from phasewise.serving.loaders.formats.gguf_file import GgufFiles, GgufHeader, TensorInfo, open_gguf
from phasewise.serving.loaders.source import Rows, check_finite
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.new_path import new_path
from phasewise.workflows.quantise.settings import QuantFormat, QuantiseSettings
from phasewise.workflows.report import Report, silent

Array = npt.NDArray[Any]

NUMBERS_AT_ONCE = 1 << 20
PLAIN_TYPES = ("F32", "F16", "BF16")
QUANTISATION_VERSION = 2
WRITTEN_ANEW = (
    "general.architecture",
    "general.file_type",
    "general.quantization_version",
    "split.",
    "GGUF.",
)
"""Beginnings of metadata keys that are not copied."""
FILE_TYPES: Mapping[QuantFormat, int] = {
    "q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "bf16": 32, "mxfp4": 38,
}  # fmt: skip
"""Values of `general.file_type`, as llama.cpp numbers them."""
KEPT = (
    "_norm", "ffn_gate_inp", "altup", "laurel", "per_layer_model_proj", "ssm_conv1d", "shortconv.conv",
)  # fmt: skip
"""Parts of names of matrices that llama.cpp rounds in no format: norms, routers, taps."""
LARGEST_HALF = 65504.0
LARGEST = {name: LARGEST_HALF * n for name, n in (("F16", 1), ("Q4_0", 8), ("Q5_0", 16), ("Q8_0", 127))}
"""Largest magnitude by type for which every float16 scale is finite; types with minima: one level less."""
LARGEST |= {"Q4_1": LARGEST_HALF, "Q5_1": LARGEST_HALF}


@dataclass
class TypeFigures:
    """Figures of all tensors of one type. relative_error: the RMS of errors over the RMS of the numbers."""

    type_name: str
    tensors: int = 0
    weights: int = 0
    n_bytes: int = 0
    relative_error: float = 0.0


@dataclass(frozen=True)
class Quantised:
    """Figures of the written file. Bytes are those of all tensors."""

    out: Path
    architecture: str
    n_bytes: int
    weights: int
    types: tuple[TypeFigures, ...]


def quantise(settings: QuantiseSettings, report: Report = silent, progress: Report = silent) -> Quantised:
    """Write the file, which appears when it is whole and reads back. Raises WorkflowError, ModelError.

    progress: a line for each tensor.
    """
    if settings.out.exists():
        raise WorkflowError(f"{settings.out} exists already: name a file that does not")
    located = locate(settings.model, cache_root(), report)
    if located.path.is_dir():
        raise WorkflowError(
            f"{located.path} is a directory: make a GGUF file of it with llama.cpp's convert_hf_to_gguf.py,"
            " and quantise that"
        )
    with open_source(located) as source:  # checks the config and every shape
        if source.config.sees_ahead:
            raise WorkflowError(f"{located.name} makes vectors: quantise writes language models")
    file, header = open_gguf(located.path)
    with contextlib.closing(file):
        for tensor in header.tensors.values():
            if tensor.type_name not in PLAIN_TYPES and not settings.requantise:
                raise WorkflowError(
                    f"{located.name} has {tensor.name} in {tensor.type_name} already: quantise the original,"
                    " or round a second time with --requantise"
                )
        with new_path(settings.out, "model.gguf") as temporary:
            types = _write(file, header, settings, temporary, progress)
            with open_source(Located(located.name, temporary)) as written:
                written.tokenizer_json()  # ModelError where it cannot be built
    n_bytes, weights = sum(kind.n_bytes for kind in types), sum(kind.weights for kind in types)
    return Quantised(settings.out, header.metadata["general.architecture"], n_bytes, weights, types)


def type_of(name: str, shape: tuple[int, ...], quant_format: QuantFormat, *, tied: bool) -> str:
    """Choose a tensor's type. The tensor that multiplies last carries much of the quality: at least 8 bits.

    tied: there is no `output.weight`.
    """
    if len(shape) == 1 or not name.endswith(".weight") or any(part in name for part in KEPT):
        return "F32"
    if quant_format == "bf16":
        return "BF16"
    if shape[-1] % 32:
        return "F16"
    is_head = name == ("token_embd.weight" if tied else "output.weight")
    return "Q8_0" if is_head else quant_format.upper()


def _write(
    file: GgufFiles, header: GgufHeader, settings: QuantiseSettings, path: Path, progress: Report
) -> tuple[TypeFigures, ...]:
    import gguf

    writer = gguf.GGUFWriter(path, header.metadata["general.architecture"])
    fields = gguf.GGUFReader(file.path).fields  # for the types of values: ours has checked the file
    for key, value in header.metadata.items():
        if not key.startswith(WRITTEN_ANEW):
            if value == []:
                raise WorkflowError(
                    f"the model's {key} is an empty list, which the gguf package cannot write"
                )
            types = fields[key].types
            writer.add_key_value(key, value, types[0], types[-1] if len(types) > 1 else None)
    writer.add_file_type(FILE_TYPES[settings.quant_format])
    writer.add_quantization_version(QUANTISATION_VERSION)
    tied, infos = "output.weight" not in header.tensors, list(header.tensors.values())
    names = [type_of(info.name, info.shape, settings.quant_format, tied=tied) for info in infos]
    for info, type_name in zip(infos, names, strict=True):
        kind, row_bytes = gguf.GGMLQuantizationType[type_name], _row_bytes(info, type_name)
        shape = (*info.shape[:-1], row_bytes)
        writer.add_tensor_info(info.name, shape, np.dtype(np.uint8), _n_rows(info) * row_bytes, kind)
    figures = {name: TypeFigures(name) for name in sorted(set(names))}
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        squares = dict.fromkeys(figures, (0.0, 0.0))
        for number, (info, type_name) in enumerate(zip(infos, names, strict=True), 1):
            written, of_numbers, of_errors = _encoded(file, info, type_name)
            writer.write_tensor_data(written)
            of_type = figures[type_name]
            of_type.tensors, of_type.n_bytes = of_type.tensors + 1, of_type.n_bytes + written.nbytes
            of_type.weights += _n_rows(info) * info.shape[-1]
            before = squares[type_name]
            squares[type_name] = before[0] + of_numbers, before[1] + of_errors
            progress(f"quantising: {number} of {counted(len(infos), 'tensor')}")
    finally:
        writer.close()
    for name, (of_numbers, of_errors) in squares.items():
        figures[name].relative_error = float(np.sqrt(of_errors / of_numbers)) if of_numbers else 0.0
    return tuple(figures.values())


def _n_rows(info: TensorInfo) -> int:
    return int(np.prod(info.shape[:-1], dtype=np.int64))


def _row_bytes(info: TensorInfo, type_name: str) -> int:
    kind = BLOCK_TYPES[type_name]
    return info.shape[-1] // kind.values * kind.block_bytes


def _encoded(file: GgufFiles, info: TensorInfo, type_name: str) -> tuple[Array, float, float]:
    """Encode a tensor by parts: its bytes, and sums of squares of its numbers and of the errors."""
    import gguf

    n_rows, of_numbers, of_errors = _n_rows(info), 0.0, 0.0
    out = np.empty((n_rows, _row_bytes(info, type_name)), np.uint8)
    of_file, step = info.n_bytes // n_rows, max(1, NUMBERS_AT_ONCE // info.shape[-1])
    for start in range(0, n_rows, step):
        stop = min(n_rows, start + step)
        raw = file.read(info.offset + start * of_file, (stop - start) * of_file)
        rows = _as_float32(decode_rows(info.type_name, raw, stop - start), info.name)
        if np.abs(rows).max(initial=0) > LARGEST.get(type_name, np.inf):
            raise WorkflowError(f"{info.name} has numbers too large for {type_name}: take another --format")
        encoded = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[type_name])
        out[start:stop] = np.ascontiguousarray(encoded).view(np.uint8).reshape(stop - start, -1)
        read = _as_float32(decode_rows(type_name, out[start:stop].tobytes(), stop - start), info.name)
        of_numbers += float(np.vdot(rows, rows))
        of_errors += float(np.square(read - rows).sum(dtype=np.float64))
    return out, of_numbers, of_errors


def _as_float32(rows: Rows, what: str) -> Array:
    """Convert rows of any type to float32. ModelError, which names `what`, for NaN and infinity."""
    check_finite(rows, what)
    return np.ascontiguousarray(packing.numbers(rows), np.float32)

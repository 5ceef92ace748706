"""Write a model's weights in fewer bits as a GGUF file that llama.cpp reads too, and measure the error."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise._words import counted
from phasewise.serving.loaders import load_model, open_source
from phasewise.serving.loaders.fetching.resolve import Located, cache_root, locate
from phasewise.serving.loaders.formats.gguf_blocks import BLOCK_TYPES, decode_rows
from phasewise.serving.loaders.formats.gguf_model import LAYER_NAMES
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.evaluate.texts import read_text
from phasewise.workflows.prune.calibration import READERS, gather, windows
from phasewise.workflows.quantise.hf_metadata import check_read_back
from phasewise.workflows.quantise.plain_tensors import PlainModel, PlainTensor, as_float32, plain_model
from phasewise.workflows.quantise.settings import QuantiseSettings
from phasewise.workflows.quantise.types import FILE_TYPES, WEIGHED, encoded, type_of
from phasewise.workflows.report import Report, silent

Array = npt.NDArray[Any]

NUMBERS_AT_ONCE = 1 << 20
PLAIN_TYPES = ("F32", "F16", "BF16")
QUANTISATION_VERSION = 2
LEAST_IMPORTANCE = 1e-6
"""The weight of an input that a text never uses, as a share of the mean."""


@dataclass
class _Tally:
    """The bytes and errors of all matrices of one type."""

    tensors: int = 0
    weights: int = 0
    n_bytes: int = 0
    squares: float = 0.0
    squared_errors: float = 0.0


@dataclass(frozen=True)
class TypeFigures:
    """Tensors of one type. relative_error: the root mean square of errors over that of the numbers."""

    type_name: str
    tensors: int
    weights: int
    n_bytes: int
    relative_error: float


@dataclass(frozen=True)
class Quantised:
    """The written file. Bytes are those of all tensors."""

    out: Path
    architecture: str
    n_bytes: int
    weights: int
    types: tuple[TypeFigures, ...] = field(default_factory=tuple)


def quantise(settings: QuantiseSettings, report: Report = silent, progress: Report = silent) -> Quantised:
    """Write the file, which appears when it is whole and reads back as the same model.

    progress: a line for each tensor and each window of a text. Raises WorkflowError, ModelError.
    """
    if settings.out.exists():
        raise WorkflowError(f"{settings.out} exists already: name a file that does not")
    located = locate(settings.model, cache_root(), report)
    with plain_model(located) as model:
        _refuse_quantised(model, settings)
        importance = _importance(settings, model, report, progress)
        with _new_file(settings.out) as temporary:
            tallies = _write(model, settings, importance, temporary, progress)
            _check(model, temporary, located)
    types = tuple(
        TypeFigures(
            name,
            tally.tensors,
            tally.weights,
            tally.n_bytes,
            float(np.sqrt(tally.squared_errors / tally.squares)) if tally.squares else 0.0,
        )
        for name, tally in sorted(tallies.items())
    )
    n_bytes, weights = sum(kind.n_bytes for kind in types), sum(kind.weights for kind in types)
    return Quantised(settings.out, model.architecture, n_bytes, weights, types)


def _refuse_quantised(model: PlainModel, settings: QuantiseSettings) -> None:
    rounded = next((tensor for tensor in model.tensors if tensor.source_type not in PLAIN_TYPES), None)
    if rounded is not None and not settings.requantise:
        raise WorkflowError(
            f"{model.name} has {rounded.name} in {rounded.source_type} already: quantise the original, or"
            " round a second time with --requantise"
        )


def _importance(
    settings: QuantiseSettings, model: PlainModel, report: Report, progress: Report
) -> Mapping[str, Array]:
    """The mean square of each input of a matrix over a text, by names in GGUF files; empty without one."""
    if settings.calibration is None:
        return {}
    loaded = load_model(settings.model, "bf16", report=report, storage=StorageChoice("never"))
    pieces = windows(loaded, read_text(settings.calibration), settings.calibration_tokens)
    squares = gather(loaded, pieces, "squares", progress).squares
    readers = {theirs: READERS[ours] for theirs, ours in LAYER_NAMES.items() if ours in READERS}
    by_name = {}
    for tensor in model.tensors:
        prefix, _, rest = tensor.name.partition(".")
        layer, _, name = rest.partition(".")
        if prefix == "blk" and name in readers:
            values = squares[int(layer), readers[name]]
            mean = float(values.mean()) or 1.0
            by_name[tensor.name] = (values / mean + LEAST_IMPORTANCE).astype(np.float32)
    return by_name


@contextlib.contextmanager
def _new_file(out: Path) -> Iterator[Path]:
    """A file that takes the name `out` if the block ends well, and vanishes if it does not."""
    prefix = f".{out.name}.quantise-"
    try:
        for left_over in out.parent.glob(prefix + "*"):
            left_over.unlink(missing_ok=True)
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=".gguf", dir=out.parent)
        os.close(handle)
    except OSError as error:
        raise WorkflowError(f"{out} cannot be made: {error.strerror}") from error
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.rename(out)
    except OSError as error:
        raise WorkflowError(f"{out} cannot be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _write(
    model: PlainModel,
    settings: QuantiseSettings,
    importance: Mapping[str, Array],
    path: Path,
    progress: Report,
) -> dict[str, _Tally]:
    import gguf

    writer = gguf.GGUFWriter(path, model.architecture)
    for key, value in model.keys.items():
        _add_key(writer, key, value, model.key_types.get(key))
    writer.add_file_type(FILE_TYPES[settings.quant_format])
    writer.add_quantization_version(QUANTISATION_VERSION)
    tied = not any(tensor.name == "output.weight" for tensor in model.tensors)
    types = [type_of(tensor.name, tensor.shape, settings.quant_format, tied=tied) for tensor in model.tensors]
    for tensor, type_name in zip(model.tensors, types, strict=True):
        kind, n_bytes = gguf.GGMLQuantizationType[type_name], _n_bytes(tensor, type_name)
        row_bytes = (*tensor.shape[:-1], n_bytes // tensor.n_rows)
        writer.add_tensor_info(tensor.name, row_bytes, np.dtype(np.uint8), n_bytes, kind)
    tallies: dict[str, _Tally] = {}
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, (tensor, type_name) in enumerate(zip(model.tensors, types, strict=True), 1):
            tally = tallies.setdefault(type_name, _Tally())
            writer.write_tensor_data(_quantised(tensor, type_name, importance.get(tensor.name), tally))
            progress(f"quantising: {number} of {counted(len(types), 'tensor')}")
    finally:
        writer.close()
    return tallies


def _n_bytes(tensor: PlainTensor, type_name: str) -> int:
    kind = BLOCK_TYPES[type_name]
    return tensor.n_rows * tensor.shape[-1] // kind.values * kind.block_bytes


def _quantised(tensor: PlainTensor, type_name: str, importance: Array | None, tally: _Tally) -> Array:
    """The bytes of one tensor, some rows at a time; its errors are added to `tally`."""
    weights = importance if type_name in WEIGHED else None
    out = np.empty((tensor.n_rows, _n_bytes(tensor, type_name) // tensor.n_rows), np.uint8)
    step = max(1, NUMBERS_AT_ONCE // tensor.shape[-1])
    for start in range(0, tensor.n_rows, step):
        stop = min(tensor.n_rows, start + step)
        rows = np.ascontiguousarray(tensor.rows(start, stop), np.float32)
        try:
            out[start:stop] = encoded(rows, type_name, weights)
        except OverflowError as error:
            raise WorkflowError(f"{tensor.name} has {error}: take another --format") from None
        read = as_float32(decode_rows(type_name, out[start:stop].tobytes(), stop - start), tensor.name)
        tally.squares += float(np.vdot(rows, rows))
        tally.squared_errors += float(np.square(read - rows).sum(dtype=np.float64))
    tally.tensors += 1
    tally.weights += out.shape[0] * tensor.shape[-1]
    tally.n_bytes += out.nbytes
    return out


def _add_key(writer: Any, key: str, value: Any, types: tuple[int, int | None] | None) -> None:
    """A value under the type that it had, else under that of llama.cpp's converter."""
    import gguf

    kinds = gguf.GGUFValueType
    if value == []:
        raise WorkflowError(f"the model's {key} is an empty list, which the gguf package cannot write")
    if types is not None:
        sub_type = None if types[1] is None else kinds(types[1])
        writer.add_key_value(key, value, kinds(types[0]), sub_type)
    elif isinstance(value, list):
        writer.add_array(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _check(model: PlainModel, path: Path, located: Located) -> None:
    """Read the file as any model; one from a Hugging Face directory must have the same config."""
    with open_source(Located(located.name, path)) as written:
        written.tokenizer_json()  # ModelError where it cannot be built
        if model.config is not None:
            check_read_back(model.config, written.config, model.name)

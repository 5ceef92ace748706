"""A predictor as one safetensors file. Files that are read are not trusted."""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise._files import read_input, write_file
from phasewise._json import read_json
from phasewise._safetensors import LENGTH_BYTES, entries_of, header_bytes
from phasewise._safetensors import METADATA_KEY as TABLES_METADATA
from phasewise.tuner.errors import PredictorError
from phasewise.tuner.predictor.features import N_FIGURES, N_ROWS
from phasewise.tuner.predictor.model import LengthPredictor, Scaling
from phasewise.tuner.predictor.network import Params

KIND = "phasewise length predictor"
SCHEMA_VERSION = 1
METADATA_KEY = "phasewise"
MAX_FILE_BYTES = 256 << 20
MAX_MEMBERS = 64


def save_predictor(predictor: LengthPredictor, path: Path) -> None:
    """Write the predictor to a file, atomically; the same predictor gives the same bytes."""
    about: dict[str, Any] = {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        "model": predictor.model_name,
        "members": len(predictor.members),
        "trained_on": dict(predictor.trained_on),
    }
    data = _file_of(_arrays(predictor), {METADATA_KEY: json.dumps(about, sort_keys=True)})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, data)
    except OSError as error:
        raise PredictorError(f"predictor {path} cannot be written: {error.strerror}") from None


def load_predictor(path: str | os.PathLike[str]) -> LengthPredictor:
    """The predictor in a file. PredictorError, in one line, for any other file."""
    try:
        there = os.stat(path)
        if not stat.S_ISREG(there.st_mode):
            raise PredictorError(f"predictor {path} cannot be read: it is no regular file")
        if there.st_size > MAX_FILE_BYTES:
            raise PredictorError(
                f"predictor {path} is larger than {MAX_FILE_BYTES >> 20} MiB: it is none of ours"
            )
        metadata, arrays = _parts_of(read_input(path, MAX_FILE_BYTES))
        return _predictor(_about(metadata), arrays)
    except FileNotFoundError:
        raise PredictorError(f"no predictor {path}: make one with `phasewise predict-len train`") from None
    except OSError as error:
        raise PredictorError(f"predictor {path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise PredictorError(
            f"predictor {path} is no safetensors file that can be read: it {error}"
        ) from None
    except _Unfit as error:
        raise PredictorError(
            f"predictor {path} {error}: make it anew with `phasewise predict-len train`"
        ) from None


class _Unfit(Exception):
    """A file is no valid predictor; the message continues a sentence that begins with the file's name."""


def _file_of(arrays: Mapping[str, npt.NDArray[np.float32]], metadata: Mapping[str, str]) -> bytes:
    """The bytes of a safetensors file of float32 arrays."""
    table: dict[str, Any] = {TABLES_METADATA: dict(metadata)}
    offset = 0
    for name, array in arrays.items():
        places = {"shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        table[name] = {"dtype": "F32", **places}
        offset += array.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    return struct.pack("<Q", len(text)) + text + b"".join(array.tobytes() for array in arrays.values())


def _parts_of(data: bytes) -> tuple[Any, dict[str, npt.NDArray[Any]]]:
    """The metadata and arrays of a file; arrays other than float32 come as bytes. ValueError, whose message
    follows the file's name."""
    start = LENGTH_BYTES + header_bytes(data[:LENGTH_BYTES], len(data))
    try:
        table = read_json(data[LENGTH_BYTES:start])
    except ValueError:
        table = None
    if not isinstance(table, dict):
        raise ValueError("has no table of tensors")
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, entry in entries_of(table, start, len(data)).items():
        content = data[entry.offset : entry.offset + entry.n_bytes]
        if entry.dtype == "F32":
            arrays[name] = np.frombuffer(content, "<f4").reshape(entry.shape)
        else:
            arrays[name] = np.frombuffer(content, np.uint8)
    return table.get(TABLES_METADATA), arrays


def _arrays(predictor: LengthPredictor) -> dict[str, npt.NDArray[Any]]:
    members = {
        f"members.{number}.{name}": array
        for number, params in enumerate(predictor.members)
        for name, array in params.arrays().items()
    }
    whole = {
        "rarity": predictor.rarity,
        "bounds": predictor.bounds,
        "prices": predictor.prices,
        "figures.mean": predictor.scaling.mean,
        "figures.inverse_deviation": predictor.scaling.inverse_deviation,
    }
    return {name: np.ascontiguousarray(array, np.float32) for name, array in (whole | members).items()}


def _about(metadata: dict[str, str] | None) -> dict[str, Any]:
    try:
        about = read_json((metadata or {})[METADATA_KEY])
        version = about["schema_version"]
        if about["kind"] != KIND or not isinstance(about["model"], str):
            raise ValueError
        if not isinstance(about["trained_on"], dict) or type(about["members"]) is not int:
            raise ValueError
        if not 1 <= about["members"] <= MAX_MEMBERS:
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise _Unfit("does not say that it is a length predictor") from None
    if version != SCHEMA_VERSION:
        raise _Unfit(f"has schema version {version!r:.20}; this phasewise reads {SCHEMA_VERSION}")
    return dict(about)


def _taken(arrays: dict[str, npt.NDArray[Any]], name: str, *shape: int | None) -> npt.NDArray[np.float32]:
    """Take a float32 array of this shape (None: any size) with finite numbers, else raise `_Unfit`."""
    array = arrays.get(name)
    if array is None or array.dtype != np.float32 or array.ndim != len(shape):
        raise _Unfit(f"lacks {name}, or has it in an unknown form")
    if any(size not in (None, got) for size, got in zip(shape, array.shape, strict=True)):
        raise _Unfit(f"has {name} of shape {array.shape}")
    if not np.isfinite(array).all():
        raise _Unfit(f"has numbers in {name} that are none")
    return array


def _prices(arrays: dict[str, npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    prices = _taken(arrays, "prices", None)
    if (np.diff(prices) < 0).any() or (prices < 0).any():
        raise _Unfit("has prices that do not ascend")
    return prices


def _predictor(about: dict[str, Any], arrays: dict[str, npt.NDArray[Any]]) -> LengthPredictor:
    take = partial(_taken, arrays)
    bounds = take("bounds", None)
    if not len(bounds) or bounds[0] <= 0 or (np.diff(bounds) <= 0).any():
        raise _Unfit("has bounds of bins that do not ascend")
    members = []
    for number in range(about["members"]):
        table = take(f"members.{number}.table", N_ROWS, None)
        w1 = take(f"members.{number}.w1", table.shape[1] + N_FIGURES, None)
        shapes = {"b1": (w1.shape[1],), "w2": (w1.shape[1], len(bounds) + 1), "b2": (len(bounds) + 1,)}
        shapes |= {"w3": (w1.shape[1],), "b3": (1,)}
        rest = {name: take(f"members.{number}.{name}", *shape) for name, shape in shapes.items()}
        members.append(Params(table=table, w1=w1, **rest))
    scaling = Scaling(take("figures.mean", N_FIGURES), take("figures.inverse_deviation", N_FIGURES))
    rarity, prices = take("rarity", N_ROWS), _prices(arrays)
    return LengthPredictor(
        about["model"], rarity, scaling, bounds, tuple(members), prices, about["trained_on"]
    )

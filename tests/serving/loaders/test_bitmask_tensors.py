"""Sparse matrices of compressed-tensors: its own files exactly, ours like them, hostile ones in a line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from phasewise.cython_kernels import packing
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders import load_model
from phasewise.serving.loaders.formats.model_directory import (
    ModelDirectory,
    open_all,
    read_entries,
    tensor_of,
)
from phasewise.serving.loaders.quantised.scheme import SPARSE, check_compression, parts_in
from phasewise.serving.loaders.quantised.tensors import bitmask_tensor
from phasewise.serving.loaders.source import SourceFile, SourceTensor
from phasewise.serving.loaders.storage import StorageChoice
from phasewise.workflows.prune.directory import Tensor, bitmask_tensors, write_tensors
from phasewise.workflows.prune.run import prune
from phasewise.workflows.prune.settings import Pattern, PruneSettings
from tests.support.models.tiny_models import write_tiny_hf

FIXTURES = Path(__file__).parents[2] / "data" / "sparse"
N, K = 9, 44


def opened(path: Path) -> SourceTensor:
    (parts,) = parts_in(open_all(ModelDirectory(path.parent), [path.name], ExitStack()), SPARSE).values()
    return bitmask_tensor("w", parts)


def dense(name: str) -> np.ndarray:
    with SourceFile(FIXTURES / "dense.safetensors") as file:
        rows = tensor_of(file, name, read_entries(file)[name]).rows(0, N)
    assert isinstance(rows, np.ndarray)
    return rows


@pytest.mark.parametrize(("name", "expected"), [("bitmask", "half"), ("24", "two")])
def test_files_of_the_package_are_read_exactly(name: str, expected: str) -> None:
    tensor = opened(FIXTURES / f"{name}.safetensors")

    assert tensor.shape == (N, K)
    assert np.array_equal(tensor.rows(0, N), dense(expected))
    assert np.array_equal(tensor.rows(3, 7), dense(expected)[3:7])


def parts_of(w: np.ndarray) -> dict[str, Tensor]:
    return {tensor.name: tensor for tensor in bitmask_tensors("w.weight", packing.to_bf16(w))}


def read(path: Path, parts: dict[str, Tensor]) -> np.ndarray:
    write_tensors(path, parts.values(), 8)
    rows = opened(path).rows(0, N)
    assert isinstance(rows, np.ndarray)
    return rows


def test_what_we_write_is_what_the_package_writes(tmp_path: Path) -> None:
    """Tensor for tensor, and so readable by it."""
    wanted = FIXTURES / "bitmask.safetensors"
    write_tensors(tmp_path / "ours", parts_of(dense("half")).values(), 8)
    tensors = {}
    for path in (wanted, tmp_path / "ours"):
        with SourceFile(path) as file:
            tensors[path] = {
                name.rpartition(".")[2]: (entry.dtype, entry.shape, file.read(entry.offset, entry.n_bytes))
                for name, entry in read_entries(file).items()
            }

    assert tensors[wanted] == tensors[tmp_path / "ours"]


def changed(name: str, change: Callable[[np.ndarray], None]) -> Callable[[dict[str, Tensor]], None]:
    def apply(parts: dict[str, Tensor]) -> None:
        array = parts[name].array.copy()
        change(array)
        parts[name] = Tensor(name, parts[name].dtype, array)

    return apply


def fewer_values(parts: dict[str, Tensor]) -> None:
    parts["w.compressed"] = Tensor("w.compressed", "BF16", parts["w.compressed"].array[:-3])


HOSTILE: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "a count that disagrees": changed("w.bitmask", lambda a: a.__setitem__((0, 0), a[0, 0] ^ 1)),
    "offsets that fall": changed("w.row_offsets", lambda a: a.__setitem__(4, 0)),
    "an offset of 2^63": changed("w.row_offsets", lambda a: a.__setitem__(0, -(2**63))),
    "an offset beyond the end": changed("w.row_offsets", lambda a: a.__setitem__(8, 2**62)),
    "bits beyond the last column": changed("w.bitmask", lambda a: a.__setitem__((2, 5), 0xFF)),
    "a shape of other sizes": changed("w.shape", lambda a: a.__setitem__(1, 2**40)),
    "a shape below zero": changed("w.shape", lambda a: a.__setitem__(0, -1)),
    "fewer values than bits": fewer_values,
    "no bitmask": lambda parts: parts.pop("w.bitmask"),
    "no offsets": lambda parts: parts.pop("w.row_offsets"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_parts_are_refused_in_a_line(tmp_path: Path, what: str) -> None:
    parts = parts_of(dense("half"))
    HOSTILE[what](parts)

    with pytest.raises(ModelError) as refused:
        read(tmp_path / "hostile", parts)

    assert "'w'" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_three_of_four_are_refused_as_two(tmp_path: Path) -> None:
    with SourceFile(FIXTURES / "24.safetensors") as file:
        entries = read_entries(file)
        raw = {name: file.read(entry.offset, entry.n_bytes) for name, entry in entries.items()}
    parts = []
    for name, entry in entries.items():
        array = np.frombuffer(raw[name], {"I64": "<i8", "U8": "u1", "BF16": "<u2"}[entry.dtype]).copy()
        if name.endswith("bitmask"):
            array[0] = 0b00110111
        parts.append(Tensor(name, entry.dtype, array.reshape(entry.shape)))
    write_tensors(tmp_path / "three", parts, 8)

    with pytest.raises(ModelError, match="two of every four"):
        opened(tmp_path / "three").rows(0, N)


@pytest.mark.parametrize("pattern", [Pattern(0.5), Pattern(0.5, 2, 4)])
def test_a_pruned_bitmask_directory_holds_the_weights_of_the_dense_one(
    tmp_path: Path, pattern: Pattern
) -> None:
    model = str(write_tiny_hf(tmp_path / "m", "llama"))
    models = {}
    for storage in ("dense", "bitmask"):
        out = tmp_path / storage
        prune(PruneSettings(model, out, pattern, storage=storage))  # type: ignore[arg-type]
        models[storage] = load_model(str(out), "native", tmp_path / "cache", storage=StorageChoice("always"))

    for name, weight in models["dense"].weights.items():
        assert np.array_equal(packing.unpack(models["bitmask"].weights[name]), packing.unpack(weight)), name


def test_nan_among_the_values_is_refused(tmp_path: Path) -> None:
    model = write_tiny_hf(tmp_path / "m", "llama")
    prune(PruneSettings(str(model), tmp_path / "out", Pattern(0.5), storage="bitmask"))
    path = tmp_path / "out" / "model.safetensors"
    with SourceFile(path) as file:
        entry = next(entry for name, entry in read_entries(file).items() if name.endswith(".compressed"))
    content = bytearray(path.read_bytes())
    content[entry.offset : entry.offset + 2] = b"\xc0\x7f"
    path.write_bytes(content)

    with pytest.raises(ModelError, match="NaN"):
        load_model(str(tmp_path / "out"), "native", tmp_path / "cache")


@pytest.mark.parametrize(
    "config",
    [
        {"format": "marlin-24"},
        {"sparsity_config": {"format": "marlin-24"}},
        {"sparsity_config": {"format": "never-heard-of"}},
        {"format": "pack-quantized", "config_groups": {"group_0": {}}},
    ],
)
def test_other_formats_are_refused_by_name(config: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"marlin-24|never-heard-of|pack-quantized"):
        check_compression(config, "config.json")

"""Weights of a directory's safetensors that are made of several tensors of the files; among them sparse
matrices of compressed-tensors, `sparse-bitmask` and `sparse-24-bitmask`, read as hostile input.

A sparse weight is `.shape` [2]; `.bitmask` uint8 [n, ceil(k / 8)], whose bit i of a row (the lowest of a byte
first) is for column i; `.compressed`, the values whose bits are set, row by row; and `.row_offsets` int64
[n], where rows begin among them. Of 2:4 every four columns have two bits, and there are no offsets."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from phasewise.cython_kernels.packing import Array
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.model_directory import READABLE
from phasewise.serving.loaders.quantised.floats import (
    STACK,
    fp8_tensor,
    mxfp4_stack,
    mxfp4_tensor,
    nvfp4_tensor,
)
from phasewise.serving.loaders.quantised.integers import awq_tensor, bytes_tensor, gptq_tensor, packed_tensor
from phasewise.serving.loaders.quantised.scheme import (
    OF_INPUTS,
    PARTS,
    SPARSE,
    Found,
    Opened,
    PartReader,
    Parts,
    Quantisation,
    parts_in,
)
from phasewise.serving.loaders.source import SourceTensor


def bitmask_tensor(name: str, parts: Parts) -> SourceTensor:
    """The matrix `name` from its parts. ModelError where they do not fit together."""
    read = PartReader(name, parts, SPARSE)
    n, k = read.stated_shape("shape")
    values = read.entry("compressed", READABLE, (1, 2), may_be_empty=True)
    read.entry("bitmask", ("U8",))
    read.expect("bitmask", (n, -(-k // 8)))
    is_24 = len(values.shape) == 2
    if is_24:
        if k % 4:
            raise ModelError(f"{read.what} has {k} columns: 2:4 keeps two of every four")
        read.expect("compressed", (n, k // 2))
    else:
        read.entry("row_offsets", ("I64",), (1,))
        read.expect("row_offsets", (n,))

    def rows(start: int, stop: int) -> Array:
        mask = read.raw("bitmask", "u1", start, stop)
        bits = np.unpackbits(mask, axis=1, bitorder="little").astype(bool)
        if bits[:, k:].any():
            raise ModelError(f"{read.what} has bits beyond its last column, {k}")
        kept = bits[:, :k]
        if is_24:
            first, count = start * k // 2, (stop - start) * k // 2
            if (kept.reshape(stop - start, k // 4, 4).sum(axis=2) != 2).any():
                raise ModelError(f"{read.what} does not keep two of every four columns")
        else:
            first, count = _first_value(read, kept, n, values.shape[0], start, stop), int(kept.sum())
        out = np.zeros((stop - start, k), np.float32)
        out[kept] = read.some_floats("compressed", first, count)
        return out

    return SourceTensor(f"{values.dtype} sparse", (n, k), read.n_bytes, READABLE[values.dtype], rows)


def _first_value(read: PartReader, kept: Array, n: int, total: int, start: int, stop: int) -> int:
    """The place where the first row's values begin. Offsets must be those that the bits count."""
    offsets = read.some("row_offsets", "<i8", start, min(stop + 1, n) - start).tolist()
    offsets += [total] if stop == n else []
    counts = [after - before for before, after in pairwise(offsets)]
    if (
        counts != kept.sum(axis=1).tolist()
        or not 0 <= offsets[0] <= total
        or (start == 0 and offsets[0] != 0)
    ):
        raise ModelError(f"{read.what} has row offsets that are not what its bits count")
    return int(offsets[0])


def made_tensors(
    opened: Opened, quantisation: Quantisation | None
) -> tuple[Iterator[tuple[str, SourceTensor]], set[str]]:
    """Names and tensors, made one by one, and the names of all tensors of the files that they are made of."""
    sparse, stacks = parts_in(opened, SPARSE), parts_in(opened, STACK, "_")
    stacks = {stem: own for stem, own in stacks.items() if len(own) == len(STACK)}
    quantised: dict[str, dict[str, Found]] = {}
    used = {f"{stem}.{part}" for stem, own in sparse.items() for part in own}
    used |= {f"{stem}_{part}" for stem, own in stacks.items() for part in own}
    if quantisation is not None:
        quantised = parts_in(opened, PARTS)
        for file, entries in opened:
            for stem in quantised:
                if (entry := entries.get(f"{stem}.weight")) is not None:
                    quantised[stem]["weight"] = file, entry
            used |= {theirs for theirs in entries if theirs.rpartition(".")[2] in OF_INPUTS}
        used |= {f"{stem}.{part}" for stem, own in quantised.items() for part in own}

    def composed() -> Iterator[tuple[str, SourceTensor]]:
        for stem, own in quantised.items():
            assert quantisation is not None
            yield f"{stem}.weight", _quantised(f"{stem}.weight", own, quantisation)
        for stem, own in sparse.items():
            yield f"{stem}.weight", bitmask_tensor(f"{stem}.weight", own)
        for stem, own in stacks.items():
            yield f"{stem}.mxfp4", mxfp4_stack(stem, own)

    return composed(), used


def _quantised(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    if "qweight" in parts and quantisation.method in ("awq", "gptq"):
        return (awq_tensor if quantisation.method == "awq" else gptq_tensor)(name, parts, quantisation)
    if quantisation.method in ("compressed-tensors", "fp8"):
        if "weight_packed" in parts:
            dtype = parts["weight_packed"][1].dtype
            if dtype == "I32":
                return packed_tensor(name, parts, quantisation)
            has_scale = "weight_global_scale" in parts
            return (nvfp4_tensor if has_scale else mxfp4_tensor)(name, parts, quantisation)
        if "weight" in parts:
            is_float = parts["weight"][1].dtype != "I8"
            return (fp8_tensor if is_float else bytes_tensor)(name, parts, quantisation)
    names = ", ".join(sorted(parts))
    raise ModelError(
        f"the quantised tensor {name!r:.80} is made of {names}, which {quantisation.method} does not have"
    )

"""Weights of a directory's safetensors that are made of several tensors of the files; among them sparse
matrices of compressed-tensors, `sparse-bitmask` and `sparse-24-bitmask`, read as hostile input.

A sparse weight is `.shape` [2]; `.bitmask` uint8 [n, ceil(k / 8)], whose bit i of a row (the lowest of a byte
first) is for column i; `.compressed`, the values whose bits are set, row by row; and `.row_offsets` int64
[n], where rows begin among them. Of 2:4 every four columns have two bits, and there are no offsets.

FP8 (e4m3) has a scale for all of a weight, for each output, for groups of inputs or for blocks of both. The
product, rounded once to float32, is the number. Codes stay as they are where 128 inputs share a scale.
NVFP4 has a scale in e4m3 for each 16 inputs, divided by one for all; MXFP4 a power of two for each 32. Both
keep their codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from phasewise.cython_kernels.blocks import BLOCKS, BlockRows, e4m3_numbers, factors_of
from phasewise.cython_kernels.packing import Array
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.model_directory import READABLE
from phasewise.serving.loaders.quantised.integers import (
    awq_tensor,
    bytes_tensor,
    gptq_tensor,
    packed_tensor,
)
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
from phasewise.serving.loaders.source import (
    F32,
    SourceTensor,
    block_form,
)

FP8_BLOCK, LARGEST_FP8_SCALE = BLOCKS["fp8"].inputs, 2.0**7
FP4_BLOCK, NVFP4_GROUP, LARGEST_FACTOR = 32, BLOCKS["nvfp4"].group, 2.0**60
STACK = ("blocks", "scales")
FP8, NVFP4, MXFP4 = block_form("fp8"), block_form("nvfp4"), block_form("mxfp4")


def _e4m3_values() -> Array:
    """The numbers of all 256 codes; 0x7F and 0xFF are NaN."""
    codes = np.arange(256)
    return np.where(codes & 127 == 127, np.float32(np.nan), e4m3_numbers(codes))


E4M3 = _e4m3_values()


def fp8_tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    """Read an FP8 weight with `weight_scale`, or with `weight_scale_inv`, which multiplies too."""
    read = PartReader(name, parts, ("weight", "weight_scale", "weight_scale_inv"))
    n, k = read.entry("weight", ("F8_E4M3",)).shape
    scheme = quantisation.scheme_of(True, 8, read.what)
    part = "weight_scale_inv" if "weight_scale_inv" in read else "weight_scale"
    scales = read.floats(part)
    of_rows, columns = _scale_reader(read, scales, n, k, scheme.block)

    def rows_of_blocks(start: int, stop: int) -> BlockRows:
        of_blocks = np.broadcast_to(of_rows(start, stop), (stop - start, k))[:, ::FP8_BLOCK]
        codes = read.raw("weight", "u1", start, stop)
        return BlockRows("fp8", codes, np.ascontiguousarray(of_blocks), None, None, None)

    def rows(start: int, stop: int) -> Array:
        with np.errstate(over="ignore", invalid="ignore"):  # refused where it is packed
            product: Array = E4M3[read.raw("weight", "u1", start, stop)] * of_rows(start, stop)
        return product

    if k % FP8_BLOCK == columns % FP8_BLOCK == 0 and (np.abs(scales) < LARGEST_FP8_SCALE).all():
        return SourceTensor("FP8", (n, k), read.n_bytes, FP8, rows_of_blocks)
    return SourceTensor("FP8", (n, k), read.n_bytes, F32, rows)


def nvfp4_tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    """Read a weight in `nvfp4-pack-quantized`. The sign of a scale goes to its codes."""
    read = PartReader(name, parts, ("weight_packed", "weight_scale", "weight_global_scale"))
    n, k = _packed_shape(read)
    quantisation.scheme_of(True, 4, read.what)
    read.entry("weight_scale", ("F8_E4M3",))
    _check_blocks(read, k)
    read.expect("weight_scale", (n, k // NVFP4_GROUP))
    whole = read.floats("weight_global_scale")
    if whole.size != 1 or not 1 / LARGEST_FACTOR <= whole.flat[0] <= LARGEST_FACTOR:
        raise ModelError(f"{read.what} has {whole.size} global scales: one, from 2^-60 to 2^60, expected")
    factors = factors_of(1 / whole.reshape(1).astype(np.float64))

    def rows(start: int, stop: int) -> BlockRows:
        scales = read.raw("weight_scale", "u1", start, stop)
        codes = _nibbles(read, start, stop) ^ np.repeat(scales >> 7 << 3, NVFP4_GROUP, axis=1)
        of_rows = np.repeat(factors, stop - start, axis=0)
        return BlockRows("nvfp4", codes, of_rows, None, scales & np.uint8(127), None)

    return SourceTensor("NVFP4", (n, k), read.n_bytes, NVFP4, rows)


def mxfp4_tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    """Read a weight in `mxfp4-pack-quantized`, whose blocks stay as they are."""
    read = PartReader(name, parts, ("weight_packed", "weight_scale"))
    n, k = _packed_shape(read)
    quantisation.scheme_of(True, 4, read.what)
    read.entry("weight_scale", ("U8",))
    _check_blocks(read, k)
    read.expect("weight_scale", (n, k // FP4_BLOCK))

    def rows(start: int, stop: int) -> BlockRows:
        exponents = read.raw("weight_scale", "u1", start, stop)
        return BlockRows("mxfp4", _nibbles(read, start, stop), exponents, None, None, None)

    return SourceTensor("MXFP4", (n, k), read.n_bytes, MXFP4, rows)


def mxfp4_stack(name: str, parts: Parts) -> SourceTensor:
    """Read a stack of matrices [experts, outputs, inputs] in MXFP4: blocks [experts, outputs, inputs / 32,
    16] of two numbers a byte, the even one low, and an exponent for each block."""
    read = PartReader(name, parts, STACK)
    shape = read.entry("blocks", ("U8",), (4,)).shape
    read.expect("blocks", (*shape[:3], FP4_BLOCK // 2))
    read.entry("scales", ("U8",), (3,))
    read.expect("scales", shape[:3])
    per_row = shape[2]

    def rows(start: int, stop: int) -> BlockRows:
        first, count = start * per_row, (stop - start) * per_row
        pairs = read.some("blocks", "u1", first * 16, count * 16).reshape(stop - start, -1)
        exponents = read.some("scales", "u1", first, count).reshape(stop - start, -1)
        return BlockRows("mxfp4", _in_pairs(pairs), exponents, None, None, None)

    return SourceTensor("MXFP4", (*shape[:2], per_row * FP4_BLOCK), read.n_bytes, MXFP4, rows)


def _check_blocks(read: PartReader, k: int) -> None:
    if k % FP4_BLOCK:
        raise ModelError(f"{read.what} has {k} inputs: blocks of {FP4_BLOCK} expected")


def _packed_shape(read: PartReader) -> tuple[int, int]:
    n, half = read.entry("weight_packed", ("U8",)).shape
    return n, 2 * half


def _nibbles(read: PartReader, start: int, stop: int) -> Array:
    return _in_pairs(read.raw("weight_packed", "u1", start, stop))


def _in_pairs(raw: Array) -> Array:
    """Unpack two numbers a byte, the even one low."""
    return np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1)


def _scale_reader(
    read: PartReader, scales: Array, n: int, k: int, block: tuple[int, int] | None
) -> tuple[Callable[[int, int], Array], int]:
    """A reader of the scales of some rows, [rows, k] or what broadcasts to it; how many inputs share one."""
    if scales.size == 1:
        return lambda start, stop: scales.reshape(1, 1), k
    if scales.shape in ((n,), (n, 1)):
        by_output = scales.reshape(n, 1)
        return lambda start, stop: by_output[start:stop], k
    rows, columns = block or (1, -1)
    if block is None and scales.ndim == 2 and scales.shape[0] == n and k % scales.shape[1] == 0:
        columns = k // scales.shape[1]
    if columns < 1 or scales.shape != (-(-n // rows), -(-k // columns)):
        raise ModelError(
            f"{read.what} of {n} x {k} has scales {scales.shape}: not one, one an output, nor one a block"
        )
    of_inputs = np.arange(k) // columns
    return lambda start, stop: scales[np.arange(start, stop) // rows][:, of_inputs], columns


def bitmask_tensor(name: str, parts: Parts) -> SourceTensor:
    """Read the sparse matrix `name` from its parts. Raises ModelError where they do not fit together."""
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
    """The place of the first row's first value. Raises ModelError for offsets that contradict the bits."""
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
    """Names and tensors that are composed of several, made one by one, and the names of those they use."""
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

"""Weights of a directory's safetensors that are made of several tensors of the files, read as hostile input.

A sparse weight of compressed-tensors (`sparse-bitmask`, `sparse-24-bitmask`) is `.shape` [2]; `.bitmask`
uint8 [n, ceil(k / 8)], whose bit i of a row (the lowest of a byte first) is for column i; `.compressed`, the
values whose bits are set, row by row; and `.row_offsets` int64 [n], where rows begin among them. Of 2:4 every
four columns have two bits, and there are no offsets.

FP8 (e4m3) has a scale for all of a weight, for each output, for groups of inputs or for blocks of both. The
product, rounded once to float32, is the number. Codes stay as they are where 128 inputs share a scale.
NVFP4 has a scale in e4m3 for each 16 inputs, divided by one for all; MXFP4 a power of two for each 32. Both
keep their codes and scales.

Of integers, compressed-tensors (`pack-quantized`, `int-quantized`) packs the inputs of an output one after
the other, codes above 2^(bits - 1), zero points alike along outputs. AWQ (gemm) and GPTQ store [inputs,
outputs]: AWQ packs eight outputs to a word, in the order 0 2 4 6 1 3 5 7, GPTQ eight inputs; zero points lie
[groups, outputs], packed along outputs. GPTQ's first format stores them less one. A weight is worth s (q - z)
in float32, rounded once: what the packages give in float32, and, rounded to a narrower type, in that. Scales
of 16 bits times integers of 8 are exact."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from phasewise.cython_kernels import packing
from phasewise.cython_kernels.blocks import BLOCKS, BlockRows, e4m3_numbers, factors_of
from phasewise.cython_kernels.packing import COLUMN_GROUP, Array, QuantRows
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.formats.model_directory import READABLE
from phasewise.serving.loaders.quantised.scheme import (
    OF_INPUTS,
    PARTS,
    SPARSE,
    Found,
    Opened,
    PartReader,
    Parts,
    Quantisation,
    in_order,
    parts_in,
    unpacked,
)
from phasewise.serving.loaders.source import F32, INT8_ZERO_POINT, Rows, SourceTensor, WeightForm, block_form

MOST_COLUMN_INPUTS = 65536  # of a sum of bytes in int32
_SIGNIFICAND_BITS = 24


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [n, k] of integers with one scale, and maybe one zero point, for each `group` inputs.

    `codes(start, stop)`: uint8 [rows, k] of these outputs. `scales`, `zeros`: float32 and int16 [n, groups],
    one entry where all rows or all groups have the same. `order`: the group of each input, where groups are
    no runs. `byte_rows`: True if inputs may be rounded to bytes with one scale for each row."""

    n: int
    k: int
    bits: int
    group: int
    codes: Callable[[int, int], Array]
    scales: Array
    zeros: Array
    byte_rows: bool = False
    order: Array | None = None

    @cached_property
    def form(self) -> WeightForm:
        """The smallest packed form that holds the numbers exactly."""
        if self.order is not None or (self.group % 16 and self.group < self.k):
            return F32
        zero = int(self.zeros.flat[0])
        one_zero = bool((self.zeros == zero).all()) and 0 <= zero <= 255
        by_column = self.byte_rows and self.group >= self.k and one_zero and self.k <= MOST_COLUMN_INPUTS
        if by_column and self.bits == 8:
            return WeightForm("q8", COLUMN_GROUP, zero, "float32")
        whole = self.group % 32 == 0 or self.group >= self.k
        kind, group = ("q4", 32) if self.bits <= 4 and whole else ("q8", 32 if whole else 16)
        if one_zero:
            return WeightForm(kind, group, zero, "float16" if fits_half(self.scales) else "float32")  # type: ignore[arg-type]
        if significant_bits(self.scales) + self.bits <= _SIGNIFICAND_BITS:
            return WeightForm(kind, group, 0, "float32", has_mins=True)  # type: ignore[arg-type]
        return WeightForm("q8", group, INT8_ZERO_POINT, "float32") if self.bits < 8 else F32

    def reader(self) -> Callable[[int, int], Rows]:
        """A reader of rows in the packed form."""
        form = self.form

        def rows(start: int, stop: int) -> Rows:
            codes = self.codes(start, stop)
            if form == F32:
                return self._multiplied(codes, start, stop)
            scales, zeros = (
                spread(_of_rows(array, start, stop), self.group, self.k, form.group)
                for array in (self.scales, self.zeros)
            )
            bits, mins = (4 if form.kind == "q4" else 8), None
            if form.has_mins:
                with np.errstate(over="ignore", invalid="ignore"):
                    mins = -(scales * zeros.astype(np.float32))
            elif form.zero_point != int(self.zeros.flat[0]) or (self.zeros != form.zero_point).any():
                steps = np.repeat(zeros, form.group, axis=1)[:, : self.k]
                codes = (codes.astype(np.int16) - steps + form.zero_point).astype(np.uint8)
            return QuantRows(codes, scales.astype(form.scale_dtype), mins, form.zero_point, form.group, bits)

        return rows

    def _multiplied(self, codes: Array, start: int, stop: int) -> Array:
        groups = self.order if self.order is not None else np.arange(self.k) // self.group
        scales, zeros = (_of_rows(array, start, stop) for array in (self.scales, self.zeros))
        scales, zeros = (array[:, groups] if array.shape[1] > 1 else array for array in (scales, zeros))
        with np.errstate(over="ignore", invalid="ignore"):
            product: Array = (codes.astype(np.int16) - zeros).astype(np.float32) * scales
        return product


def _of_rows(array: Array, start: int, stop: int) -> Array:
    rows = array[start:stop] if array.shape[0] > 1 else array
    return np.broadcast_to(rows, (stop - start, array.shape[1]))


def spread(array: Array, group: int, k: int, packed_group: int) -> Array:
    """Turn entries of each `group` inputs into entries of each `packed_group`, a divisor or all of k."""
    count = packing.groups_of(k, packed_group)
    if array.shape[1] == 1:
        return np.ascontiguousarray(np.broadcast_to(array, (array.shape[0], count)))
    return np.ascontiguousarray(np.repeat(array, group // packed_group, axis=1)[:, :count])


def fits_half(numbers: Array) -> bool:
    """True if float16 holds all numbers. NaN and infinity are refused where rows are packed."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves = numbers.astype(np.float16).astype(np.float32)
    return bool((halves == numbers).all())


def significant_bits(numbers: Array) -> int:
    """Bits from the first to the last that is set, of float32 numbers; 1 for powers of two."""
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return 1
    mantissas, _ = np.frexp(finite.astype(np.float64))
    whole = np.abs(mantissas * (1 << _SIGNIFICAND_BITS)).astype(np.int64)
    lowest = int(np.bitwise_or.reduce(whole.ravel()))
    return _SIGNIFICAND_BITS - (lowest & -lowest).bit_length() + 1 if lowest else 1


AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight outputs
WORD_BITS = 32


def packed_tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    """Read a weight in `pack-quantized`."""
    read = PartReader(
        name, parts, ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
    )
    n, k = read.stated_shape("weight_shape")
    words = read.entry("weight_packed", ("I32",)).shape
    bits = words[1] * WORD_BITS // k
    if not 1 <= bits <= 8 or words != (n, -(-k * bits // WORD_BITS)):
        raise ModelError(f"{read.what} of {n} x {k} has {words} words, in which no number of bits packs it")
    scheme = quantisation.scheme_of(False, bits, read.what)
    scales = _scales_by_output(read, n)
    group = _group_of(read, k, scales.shape[1], scheme.strategy)
    zeros = _zeros(read, n, bits, scales.shape[1], scheme.symmetric)
    order = _order(read, "weight_g_idx", k, group, scales.shape[1])

    def codes(start: int, stop: int) -> Array:
        return unpacked(read.raw("weight_packed", "<i4", start, stop), bits, k)

    return _tensor(
        f"W{bits}", read, IntegerWeight(n, k, bits, group, codes, scales, zeros, scheme.byte_rows, order)
    )


def bytes_tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    """Read an int8 weight in `int-quantized` or `naive-quantized`."""
    read = PartReader(name, parts, ("weight", "weight_scale", "weight_zero_point"))
    n, k = read.entry("weight", ("I8",)).shape
    scheme = quantisation.scheme_of(False, 8, read.what)
    scales = _scales_by_output(read, n)
    group = _group_of(read, k, scales.shape[1], scheme.strategy)
    zeros = _zeros(read, n, 8, scales.shape[1], scheme.symmetric)

    def codes(start: int, stop: int) -> Array:
        return read.raw("weight", "u1", start, stop) ^ np.uint8(0x80)

    kind = "W8A8" if scheme.byte_rows else "W8"
    return _tensor(kind, read, IntegerWeight(n, k, 8, group, codes, scales, zeros, scheme.byte_rows))


def awq_tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    """Read a weight of four bits in AWQ's `gemm` packing."""
    read = PartReader(name, parts, ("qweight", "qzeros", "scales"))
    scheme = quantisation.scheme_of(False, 4, read.what)
    k, words = read.entry("qweight", ("I32",)).shape
    n, per_word = words * WORD_BITS // scheme.bits, WORD_BITS // scheme.bits
    scales = _scales_by_input(read, n)
    group = _group_of(read, k, scales.shape[1], scheme.strategy)
    read.entry("qzeros", ("I32",))
    read.expect("qzeros", (scales.shape[1], words))
    zeros = unpacked(read.raw("qzeros", "<i4"), 4, n).reshape(-1, words, per_word)[..., AWQ_ORDER]

    def codes(start: int, stop: int) -> Array:
        first, end = start // per_word, -(-stop // per_word)
        some = unpacked(read.raw("qweight", "<i4")[:, first:end], 4, (end - first) * per_word)
        outputs = some.reshape(k, -1, per_word)[..., AWQ_ORDER].reshape(k, -1).T
        return np.ascontiguousarray(outputs[start - first * per_word : stop - first * per_word])

    own_zeros = np.ascontiguousarray(zeros.reshape(-1, n).T.astype(np.int16))
    return _tensor("AWQ", read, IntegerWeight(n, k, 4, group, codes, scales, own_zeros))


def gptq_tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    """Read a weight of 2, 4 or 8 bits in GPTQ's packing."""
    read = PartReader(name, parts, ("qweight", "qzeros", "scales", "g_idx"))
    bits = quantisation.schemes[0].bits
    words, n = read.entry("qweight", ("I32",)).shape
    per_word = WORD_BITS // bits
    k = words * per_word
    scales = _scales_by_input(read, n)
    group = _group_of(read, k, scales.shape[1], "group")
    read.entry("qzeros", ("I32",))
    read.expect("qzeros", (scales.shape[1], -(-n // per_word)))
    zeros = unpacked(read.raw("qzeros", "<i4"), bits, n).astype(np.int16) + quantisation.zero_offset
    order = _order(read, "g_idx", k, group, scales.shape[1])

    def codes(start: int, stop: int) -> Array:
        some = np.ascontiguousarray(read.raw("qweight", "<i4")[:, start:stop].T)
        return unpacked(some, bits, k)

    weight = IntegerWeight(n, k, bits, group, codes, scales, np.ascontiguousarray(zeros.T), order=order)
    return _tensor(f"GPTQ {bits} bits", read, weight)


def _tensor(kind: str, read: PartReader, weight: IntegerWeight) -> SourceTensor:
    return SourceTensor(kind, (weight.n, weight.k), read.n_bytes, weight.form, weight.reader())


def _scales_by_output(read: PartReader, n: int) -> Array:
    """Scales [n, groups], or [1, 1] where the whole weight has one."""
    scales = read.floats("weight_scale")
    if scales.size == 1:
        return scales.reshape(1, 1)
    if scales.ndim == 1:
        scales = scales.reshape(-1, 1)
    if scales.ndim != 2 or scales.shape[0] != n:
        raise ModelError(f"{read.what} of {n} outputs has scales {scales.shape}")
    return scales


def _scales_by_input(read: PartReader, n: int) -> Array:
    read.entry("scales", ("F16", "BF16", "F32"))
    scales = read.floats("scales")
    if scales.shape[1] != n:
        raise ModelError(f"{read.what} of {n} outputs has scales {scales.shape}")
    return np.ascontiguousarray(scales.T)


def _group_of(read: PartReader, k: int, groups: int, strategy: str) -> int:
    """Inputs of a group, by the number of groups."""
    if groups == 1:
        return k
    if k % groups or strategy not in ("group", "tensor_group"):
        raise ModelError(
            f"{read.what} of {k} inputs has {groups} scales by {strategy}: equal groups expected"
        )
    return k // groups


def _zeros(read: PartReader, n: int, bits: int, groups: int, symmetric: bool) -> Array:
    """Zero points [n, groups], packed or as bytes; one entry where all rows or all groups have the same."""
    middle = 1 << (bits - 1)
    if "weight_zero_point" not in read:
        if symmetric:
            return np.full((1, 1), middle, np.int16)
        raise ModelError(f"{read.what} lacks its weight_zero_point: its weights are not symmetric")
    if read.entry("weight_zero_point", ("I32", "I8"), (0, 1, 2)).dtype == "I32":
        read.expect("weight_zero_point", (-(-n * bits // WORD_BITS), groups))
        words = np.ascontiguousarray(read.raw("weight_zero_point", "<i4").T)
        return np.ascontiguousarray(unpacked(words, bits, n).T.astype(np.int16))
    zeros = read.raw("weight_zero_point", "<i1").astype(np.int16) + middle
    if zeros.size == 1:
        return zeros.reshape(1, 1)
    if zeros.shape not in ((n, groups), (n,)):
        raise ModelError(f"{read.what} of {n} outputs has zero points {zeros.shape}")
    return zeros.reshape(n, -1)


def _order(read: PartReader, part: str, k: int, group: int, groups: int) -> Array | None:
    """The group of each input; None where groups are runs."""
    if part not in read:
        return None
    order = read.group_order(part, k, groups)
    return None if order is None or in_order(order, group) else order


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

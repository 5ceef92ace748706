"""Integer weights: compressed-tensors' `pack-quantized` and `int-quantized`, AWQ (gemm) and GPTQ; and the
packed form that holds integers with scales exactly.

compressed-tensors packs the inputs of an output one after the other, codes above 2^(bits - 1), zero points
alike along outputs. AWQ and GPTQ store [inputs, outputs]: AWQ packs eight outputs to a word, in the order 0 2
4 6 1 3 5 7, GPTQ eight inputs; zero points lie [groups, outputs], packed along outputs. GPTQ's first format
stores them less one.

A weight is worth s (q - z) in float32, rounded once: what the packages give in float32, and, rounded to a
narrower type, in that. Scales of 16 bits times integers of 8 are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phasewise.cython_kernels import packing
from phasewise.cython_kernels.packing import COLUMN_GROUP, Array, QuantRows
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.quantised.scheme import PartReader, Parts, Quantisation, in_order, unpacked
from phasewise.serving.loaders.source import F32, INT8_ZERO_POINT, Rows, SourceTensor, WeightForm

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
    zeros = np.full((1, 1), 1 << (bits - 1), np.int16)
    if "weight_zero_point" in read:
        zeros = _packed_zeros(read, n, bits, scales.shape[1])
    elif not scheme.symmetric:
        raise ModelError(f"{read.what} lacks its weight_zero_point: its weights are not symmetric")
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
    zeros = np.full((1, 1), 128, np.int16)
    if "weight_zero_point" in read:
        zeros = _plain_zeros(read, n, scales.shape[1], 128)
    elif not scheme.symmetric:
        raise ModelError(f"{read.what} lacks its weight_zero_point: its weights are not symmetric")

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


def _packed_zeros(read: PartReader, n: int, bits: int, groups: int) -> Array:
    entry = read.entry("weight_zero_point", ("I32", "I8"))
    if entry.dtype == "I8":
        return _plain_zeros(read, n, groups, 1 << (bits - 1))
    read.expect("weight_zero_point", (-(-n * bits // WORD_BITS), groups))
    words = np.ascontiguousarray(read.raw("weight_zero_point", "<i4").T)
    return np.ascontiguousarray(unpacked(words, bits, n).T.astype(np.int16))


def _plain_zeros(read: PartReader, n: int, groups: int, offset: int) -> Array:
    read.entry("weight_zero_point", ("I8",), (0, 1, 2))
    zeros = read.raw("weight_zero_point", "<i1").astype(np.int16) + offset
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

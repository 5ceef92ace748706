"""The packed form that holds integers with scales exactly, and the integers in it.

A weight is worth s (q - z) in float32, rounded once: what the packages give in float32, and, rounded to a
narrower type, in that. Scales of 16 bits times integers of 8 are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from phasewise.cython_kernels import packing
from phasewise.cython_kernels.packing import COLUMN_GROUP, Array, QuantRows
from phasewise.serving.loaders.forms import F32, INT8_ZERO_POINT, Rows, WeightForm

MOST_COLUMN_INPUTS = 65536  # of a sum of bytes in int32
_SIGNIFICAND_BITS = 24


@dataclass(frozen=True)
class IntegerWeight:
    """A weight [n, k] of integers with one scale, and maybe one zero point, for each `group` inputs.

    codes(start, stop), of outputs: uint8 [rows, k]. scales float32 and zeros int16, [n, groups]: one entry
    where all rows or all groups have the same one. order: the group of each input, where they do not follow
    one another. byte_rows: inputs may be rounded to bytes with one scale for each row.
    """

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
        """Rows in that form."""
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
    """Entries of each `group` inputs as entries of each `packed_group`, which divides it or is all of k."""
    count = packing.groups_of(k, packed_group)
    if array.shape[1] == 1:
        return np.ascontiguousarray(np.broadcast_to(array, (array.shape[0], count)))
    return np.ascontiguousarray(np.repeat(array, group // packed_group, axis=1)[:, :count])


def fits_half(numbers: Array) -> bool:
    """True if float16 holds all of them. What is no number is refused where it is packed."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves = numbers.astype(np.float16).astype(np.float32)
    return bool((halves == numbers).all())


def significant_bits(numbers: Array) -> int:
    """From the first to the last bit that is set, of float32 numbers; 1 for powers of two."""
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return 1
    mantissas, _ = np.frexp(finite.astype(np.float64))
    whole = np.abs(mantissas * (1 << _SIGNIFICAND_BITS)).astype(np.int64)
    lowest = int(np.bitwise_or.reduce(whole.ravel()))
    return _SIGNIFICAND_BITS - (lowest & -lowest).bit_length() + 1 if lowest else 1

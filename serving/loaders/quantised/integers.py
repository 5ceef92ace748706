"""Integer weights: compressed-tensors' `pack-quantized` and `int-quantized`, AWQ (gemm) and GPTQ.

compressed-tensors packs the inputs of an output one after the other, codes above 2^(bits - 1), zero points
alike along outputs. AWQ and GPTQ store [inputs, outputs]: AWQ packs eight outputs to a word, in the order 0 2
4 6 1 3 5 7, GPTQ eight inputs; zero points lie [groups, outputs], packed along outputs. GPTQ's first format
stores them less one.
"""

from __future__ import annotations

import numpy as np

from phasewise.cython_kernels.packing import Array
from phasewise.serving.errors import ModelError
from phasewise.serving.loaders.quantised.numbers import IntegerWeight
from phasewise.serving.loaders.quantised.parts import PartReader, Parts, in_order, unpacked
from phasewise.serving.loaders.quantised.scheme import Quantisation
from phasewise.serving.loaders.source import SourceTensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight outputs
WORD_BITS = 32


def packed_tensor(name: str, parts: Parts, quantisation: Quantisation) -> SourceTensor:
    """`pack-quantized`."""
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
    """`int-quantized` and `naive-quantized` weights of int8."""
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
    """AWQ's `gemm` packing, of four bits."""
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
    """GPTQ's packing, of 2, 4 or 8 bits."""
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
    """[n, groups], or [1, 1] where all of the weight has one scale."""
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
    """The group of each input where they are not runs."""
    if part not in read:
        return None
    order = read.group_order(part, k, groups)
    return None if order is None or in_order(order, group) else order

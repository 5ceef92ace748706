"""Weights to time products with: names of formats, random weights, and copies that no cache holds."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise._words import number
from phasewise.cython_kernels import packing, sparse
from phasewise.cython_kernels.blocks import BLOCKS
from phasewise.cython_kernels.packing import PackedWeight
from phasewise.topology import Kind, Machine
from phasewise.tuner.errors import TunerError

LEAST_COLD_BYTES = 64 << 20
MOST_COLD_BYTES = 512 << 20
"""Bounds of the total bytes of a weight's copies; between the bounds, twice the last cache."""

LINE = 64

Array = npt.NDArray[Any]


_SPARSE = re.compile(r"(bf16|int8|int8g16|int8c)s(\d{1,2})")
SIXTEENTHS = 16


def format_name(weight: PackedWeight) -> str:
    """The database's name for a weight's format and storage: `dense_format`, and for a sparse weight the
    share that it keeps, in sixteenths: bf16s8 keeps half."""
    name = dense_format(weight)
    return f"{name}s{round(SIXTEENTHS * sparse.kept_share(weight))}" if weight.is_sparse else name


def dense_format(weight: PackedWeight) -> str:
    """The database's name for a weight's format without its storage: f32, bf16, f16, int8, int8m, int8g16,
    int8c, int4, int4m, or a kind in blocks, such as q4_k."""
    return format_of_kind(weight.kind, weight.group, weight.mins is not None)


def format_of_kind(kind: str, group: int, has_mins: bool) -> str:
    """The `dense_format` of weights of a packed kind and a group size, with or without minima."""
    if kind in packing.DENSE_KINDS or kind in BLOCKS:
        return kind
    bits = "int8" if kind == "q8" else "int4"
    grouping = {0: "c", 16: "g16", 32: ""}[group]
    return f"{bits}{grouping}{'m' if has_mins else ''}"


def split_format(weight_format: str) -> tuple[str, float | None]:
    """The format without storage, and the share that is kept; None: stored dense."""
    match = _SPARSE.fullmatch(weight_format)
    if match is None:
        return weight_format, None
    if int(match[2]) > SIXTEENTHS:
        raise TunerError(f"{weight_format!r:.40} keeps more than {SIXTEENTHS} sixteenths")
    return match[1], int(match[2]) / SIXTEENTHS


def sparse_format(weight_format: str, density: float) -> str:
    """The name of a format stored sparse with this density. TunerError where there is none."""
    name = f"{weight_format}s{round(SIXTEENTHS * density)}"
    if _SPARSE.fullmatch(name) is None or not 0 <= density <= 1:
        raise TunerError(f"{weight_format} weights of density {number(density)} are not stored sparse")
    return name


def random_weight(weight_format: str, n: int, k: int, seed: int = 0) -> PackedWeight:
    """A random weight of a format (`format_name`)."""
    rng = np.random.default_rng(seed)
    dense, density = split_format(weight_format)
    if density is not None:
        weight = random_weight(dense, n, k, seed)
        weight.values[rng.random(weight.values.shape) >= density] = weight.zero_point
        return sparse.to_sparse(weight)
    weight = blank_weight(weight_format, n, k)
    shape = weight.values.shape
    if weight.kind in ("f32", "f16"):
        return replace(
            weight, values=rng.standard_normal(shape, dtype=np.float32).astype(weight.values.dtype)
        )
    if weight.kind == "bf16":
        values = packing.to_bf16(rng.standard_normal(shape, dtype=np.float32))
        return replace(weight, values=values, top_exponent=packing.bf16_top_exponent(values))
    if weight.kind in BLOCKS:
        factors = None if weight.scales is None else np.full_like(weight.scales, 2.0**-8)
        return replace(weight, values=_random_blocks(weight, rng), scales=factors)
    assert weight.scales is not None
    steps = rng.random(weight.scales.shape, dtype=np.float32) / 100 + np.float32(0.01)
    scales = steps.astype(weight.scales.dtype)
    return replace(
        weight,
        values=rng.integers(0, 256, shape, dtype=np.uint8),
        scales=scales,
        mins=None if weight.mins is None else scales * scales.dtype.type(-8),
    )


def _random_blocks(weight: PackedWeight, rng: np.random.Generator) -> Array:
    """Random codes and sub-scales for a weight of blocks; scales and minima are about 0.01."""
    form = BLOCKS[weight.kind]
    values = rng.integers(0, 256, weight.values.shape, dtype=np.uint8)
    if form.scaling == "exponent":
        values[..., -packing.PANEL :] = rng.integers(118, 123, (*weight.values.shape[:2], packing.PANEL))
        return values
    if form.has_factors:
        values[..., -packing.PANEL * form.groups :] &= 63
        return values
    if form.is_float:
        values[..., -4 * packing.PANEL :].view(np.float32)[...] = 0.01
        return values
    count = packing.PANEL * (2 if form.has_mins else 1)
    steps = rng.random((*weight.values.shape[:2], count), dtype=np.float32) / 100 + np.float32(0.01)
    values[..., -2 * count :] = steps.astype(np.float16).view(np.uint8)
    return values


def blank_weight(weight_format: str, n: int, k: int) -> PackedWeight:
    """A weight with uninitialised arrays, for code that looks at sizes only; takes almost no memory."""
    weight_format, density = split_format(weight_format)
    if density is not None:
        return _blank_sparse(blank_weight(weight_format, n, k), density)
    kind = kind_of(weight_format)
    try:
        values = np.empty(packing.values_shape(kind, n, k), dtype=packing.values_dtype(kind))
    except ValueError as error:
        raise TunerError(str(error)) from None
    if kind in packing.DENSE_KINDS:
        return PackedWeight(kind, n, k, 0, 0, values, None, None)
    group = scale_group_of(weight_format)
    shape = packing.scales_shape(kind, n, k, group)
    if kind in BLOCKS:
        factors = np.zeros(shape, np.float32) if BLOCKS[kind].has_factors else None
        return PackedWeight(kind, n, k, group, BLOCKS[kind].zero_point, values, factors, None)
    scales = np.empty(shape, dtype=np.float16 if group else np.float32)
    if weight_format.endswith("m"):
        return PackedWeight(kind, n, k, group, 0, values, scales, np.empty_like(scales))
    return PackedWeight(kind, n, k, group, 128 if kind == "q8" else 8, values, scales, None)


def _blank_sparse(dense: PackedWeight, density: float) -> PackedWeight:
    """A blank sparse weight whose slots are equally long."""
    shape = packing.offsets_shape(dense.n, dense.k)
    without_offsets = sparse.values_bytes(dense.kind, dense.n, dense.k, density) - 4 * shape[0] * shape[1]
    stream = round(without_offsets)
    places = np.linspace(0, stream // packing.SLOT_UNIT, shape[0] * shape[1], endpoint=False)
    values = np.empty(stream + packing.SPARSE_TAIL, dtype=np.uint8)
    return replace(dense, values=values, offsets=places.astype(np.uint32).reshape(shape))


def kind_of(weight_format: str) -> packing.Kind:
    """The packed kind of a format. TunerError for a format that no kernel reads."""
    kinds: dict[str, packing.Kind] = {
        **{kind: kind for kind in packing.DENSE_KINDS},
        **dict.fromkeys(("int8", "int8m", "int8g16", "int8c"), "q8"),
        **dict.fromkeys(("int4", "int4m"), "q4"),
        **packing.BLOCK_KINDS,
    }
    weight_format, _ = split_format(weight_format)
    if weight_format not in kinds:
        names = ", ".join(kinds)
        raise TunerError(f"there are no kernels for weights of format {weight_format!r:.40}, only {names}")
    return kinds[weight_format]


def scale_group_of(weight_format: str) -> int:
    """The inputs that share a scale in a format; 0 for one scale per column, or none."""
    weight_format, _ = split_format(weight_format)
    if weight_format in BLOCKS:
        return BLOCKS[weight_format].group
    if weight_format in packing.DENSE_KINDS:
        return 0
    return {"int8c": 0, "int8g16": 16}.get(weight_format, packing.DEFAULT_GROUP)


def copies_of(weight: PackedWeight, total_bytes: int) -> list[PackedWeight]:
    """Copies of a weight: at least one, and together at least `total_bytes`. They lie in one piece of memory,
    each array on a cache line, as in a packed file; numpy asks for huge pages for a piece that large."""
    count = -(-total_bytes // weight.nbytes)
    room = np.empty(LINE + count * sum(_lined(array.nbytes) for array in weight.arrays), dtype=np.uint8)
    offset = -room.ctypes.data % LINE

    def copy(array: Array | None) -> Array | None:
        nonlocal offset
        if array is None:
            return None
        placed: Array = room[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape)
        placed[...] = array
        offset += _lined(array.nbytes)
        return placed

    copies = []
    for _ in range(count):
        values = copy(weight.values)
        assert values is not None
        scales, mins, offsets = copy(weight.scales), copy(weight.mins), copy(weight.offsets)
        copies.append(replace(weight, values=values, scales=scales, mins=mins, offsets=offsets))
    return copies


def _lined(size_bytes: int) -> int:
    return -(-size_bytes // LINE) * LINE


def cold_bytes(machine: Machine) -> int:
    """Bytes of copies to read between two uses of one copy, so that no cache holds it."""
    caches = [node.size_bytes or 0 for kind in (Kind.L2, Kind.L3, Kind.L4) for node in machine.nodes(kind)]
    return min(MOST_COLD_BYTES, max(LEAST_COLD_BYTES, 2 * max(caches, default=0)))

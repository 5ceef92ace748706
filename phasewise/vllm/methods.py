"""vLLM's methods of linear layers, by which our packed weights come in.

vLLM gives every layer a method: `process_weights_after_loading(layer)` makes of a loaded weight what its
kernels read, and `apply(layer, x, bias)` multiplies. Three classes have them for what we multiply. Both of
each are replaced; a layer that we do not take goes through vLLM's as before.

Products run by the schedules of this machine's database.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any, TypeAlias

import numpy as np
import torch

from phasewise.cython_kernels import packing
from phasewise.cython_kernels.packing import COLUMN_GROUP, PackedWeight, QuantRows
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.location import locate
from phasewise.topology import Machine, read_machine
from phasewise.torch.packed_linear import WeightFormat, packed_weight, stored
from phasewise.torch.shared_threads import hold, torch_team
from phasewise.tuner.weights import format_name
from phasewise.vllm.plugin import logger

MOST_ROWS = 8192
"""Rows of one product for which schedules are looked up; beyond them the default runs."""


def row_schedules(packed: PackedWeight) -> tuple[str | None, int, list[tuple[int, Any]]]:
    """A weight's compute path and k parts, and its schedules by the last number of rows."""
    lookup = _lookup()
    path, k_parts = lookup.arithmetic(packed)
    ranges = [(rows.last_m, rows.schedule) for rows in lookup.products(packed, MOST_ROWS)]
    _tell(format_name(packed), packed.n, packed.k, sum(schedule is not None for _, schedule in ranges))
    return path, k_parts, ranges


@cache
def _tell(weight_format: str, n: int, k: int, tuned: int) -> None:
    """Once for each shape."""
    by = f"by {tuned} tuned schedules" if tuned else "by the default schedule"
    logger.info("weights of %d x %d are multiplied by phasewise: %s, %s", n, k, weight_format, by)


@cache
def _lookup() -> ScheduleLookup:
    database = os.environ.get("PHASEWISE_DB") or None
    try:
        if locate(database).is_absent:
            return ScheduleLookup()
        from phasewise.kerneldb.start_reads import open_start_reads
        from phasewise.workflows.opening.tuned_schedules import read_schedules

        machine = read_machine()
        cores = cores_of(torch_team().observed_cpus(), machine)
        with open_start_reads(database, logger.warning) as reads:
            return read_schedules(reads, machine, cores, logger.info)
    except KernelDbError as error:
        logger.warning("the default schedules are used: %s", error)
        return ScheduleLookup()


def cores_of(seen: Sequence[int], machine: Machine) -> tuple[int, ...]:
    """The CPUs that the threads were seen on; of threads that move, as many cores as there are threads."""
    if len(set(seen)) == len(seen) and min(seen) >= 0:
        return tuple(sorted(seen))
    first = [core[0] for core in machine.allowed_cores()] or list(machine.allowed_pus)
    return tuple(first[: len(seen)])


NUMBER = "phasewise_number"
"""The attribute of a layer that we multiply for: the number of its weight (`shared_threads.hold`)."""
NUMBERS = (torch.bfloat16, torch.float32)
"""The types of activations, and of weights that are no integers."""
MOST_COLUMN_INPUTS = 65536  # sums of bytes in int32
INT8_ZERO_POINT = 128

Read: TypeAlias = Callable[[Any], PackedWeight | None]
"""A layer's loaded weight, packed; None: it stays vLLM's. ValueError: the same, and why."""

_taken: dict[int, str] = {}
"""The layers that this process multiplies for, by the numbers of their weights."""


def taken_layers() -> str:
    """A digest of them: steps that vLLM has compiled have the numbers in them."""
    return hashlib.sha256(repr(sorted(_taken.items())).encode()).hexdigest()[:16]


def take_over(weight_format: WeightFormat) -> None:
    """Replace the methods of vLLM's classes, once in a process."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsLinearMethod,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

    def linear(layer: Any) -> PackedWeight | None:
        return _plain(layer, weight_format)

    def head(layer: Any) -> PackedWeight | None:
        """Outputs alone: rows are looked up in the embedding, whose weight it may be."""
        return _plain(layer, "native") if isinstance(layer, ParallelLMHead) else None

    replace_methods(UnquantizedLinearMethod, linear, keeps_weight=False)
    replace_methods(UnquantizedEmbeddingMethod, head, keeps_weight=True)
    replace_methods(CompressedTensorsLinearMethod, eight_bits, keeps_weight=False)


def replace_methods(method: Any, read: Read, *, keeps_weight: bool) -> None:
    """Replace both of a class; nothing if they have been. Classes below it that have their own keep them.

    keeps_weight: the layer's own weight stays beside the packed one, as it is read elsewhere.
    """
    process, apply = method.process_weights_after_loading, method.apply
    if getattr(apply, NUMBER, False):
        return

    @wraps(process)
    def process_weights_after_loading(self: Any, layer: Any) -> None:
        packed = _read(read, layer) if type(self) is method else None
        if packed is None:
            process(self, layer)
            return
        path, k_parts, schedules = row_schedules(packed)
        number = hold(packed, path, k_parts, schedules, getattr(layer, NUMBER, None))
        setattr(layer, NUMBER, number)
        _taken[number] = f"{_name(layer)} {packed.n} x {packed.k}"
        if not keeps_weight:
            empty = torch.empty(0, dtype=layer.weight.dtype)
            layer.weight = torch.nn.Parameter(empty, requires_grad=False)

    @wraps(apply)
    def apply_packed(self: Any, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        number = getattr(layer, NUMBER, None)
        if number is None:
            return apply(self, layer, x, bias)
        return torch.ops.phasewise.packed_linear(x, bias, number)

    setattr(apply_packed, NUMBER, True)
    method.process_weights_after_loading, method.apply = process_weights_after_loading, apply_packed


def _read(read: Read, layer: Any) -> PackedWeight | None:
    try:
        return read(layer)
    except ValueError as error:
        logger.warning("%s stays vLLM's: %s", _name(layer), error)
        return None


def _name(layer: Any) -> str:
    return getattr(layer, "prefix", "") or type(layer).__name__


def _plain(layer: Any, weight_format: WeightFormat) -> PackedWeight | None:
    """A matrix of floats. Layers that vLLM itself does not multiply by are left to it."""
    weight = layer.weight
    if weight.ndim != 2 or weight.is_meta or not weight.numel():
        return None
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):
        return None
    if weight.dtype not in NUMBERS:
        raise ValueError(f"its weight is {weight.dtype}; bfloat16 and float32 are packed")
    return packed_weight(weight, weight_format=weight_format)


def eight_bits(layer: Any) -> PackedWeight | None:
    """compressed-tensors' W8A8: bytes with a scale for each output, and rows rounded as they come."""
    scheme = layer.scheme
    if type(scheme).__name__ != "CompressedTensorsW8A8Int8":
        return None
    if scheme.is_static_input_scheme or not scheme.input_symmetric:
        raise ValueError("activations with a scale or a zero point from the file are not packed")
    if layer.weight.shape[1] > MOST_COLUMN_INPUTS:
        raise ValueError(f"{layer.weight.shape[1]} inputs are too many for one scale")
    scales = layer.weight_scale.detach().to(torch.float32).reshape(-1)
    if scheme.strategy == "tensor":  # one of each weight that the layer has put together
        scales = scales.repeat_interleave(torch.tensor(layer.logical_widths))
    codes = (layer.weight.detach().numpy().astype(np.int16) + INT8_ZERO_POINT).astype(np.uint8)
    rows = QuantRows(codes, scales.numpy()[:, None], None, INT8_ZERO_POINT, COLUMN_GROUP, 8)
    return stored(packing.pack_quant(rows), "auto")

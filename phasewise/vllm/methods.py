"""Replacement of vLLM's methods of linear layers, so that layers multiply by our packed weights.

vLLM gives every layer a method: `process_weights_after_loading(layer)` makes of a loaded weight what its
kernels read, and `apply(layer, x, bias)` multiplies. Three classes have these two for the layers that we
multiply; both are replaced, and a layer that we do not take goes through vLLM's as before.

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
"""Most rows of a product for which schedules are looked up; larger products run by the default schedule."""


def row_schedules(packed: PackedWeight) -> tuple[str | None, int, list[tuple[int, Any]]]:
    """Look up a weight's compute path and k parts, and its schedules by the last number of rows of each."""
    lookup = _lookup()
    path, k_parts = lookup.arithmetic(packed)
    ranges = [(rows.last_m, rows.schedule) for rows in lookup.products(packed, MOST_ROWS)]
    _tell(format_name(packed), packed.n, packed.k, sum(schedule is not None for _, schedule in ranges))
    return path, k_parts, ranges


@cache
def _tell(weight_format: str, n: int, k: int, tuned: int) -> None:
    """Log the schedules of a weight, once for each shape."""
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
    """The CPUs that the threads were seen on; if threads moved, the first cores, one for each thread."""
    if len(set(seen)) == len(seen) and min(seen) >= 0:
        return tuple(sorted(seen))
    first = [core[0] for core in machine.allowed_cores()] or list(machine.allowed_pus)
    return tuple(first[: len(seen)])


NUMBER = "phasewise_number"
"""The attribute that marks a layer that we multiply, and holds the number of its weight
(`shared_threads.hold`)."""
NUMBERS = (torch.bfloat16, torch.float32)
"""Types of activations, and of weights that are floats."""
MOST_COLUMN_INPUTS = 65536  # sums of bytes in int32
INT8_ZERO_POINT = 128

Read: TypeAlias = Callable[[Any], PackedWeight | None]
"""Function from a layer to its packed weight. None or ValueError, with the reason: it stays vLLM's."""

_taken: dict[int, str] = {}
"""Descriptions of the layers that this process multiplies, by the numbers of their weights."""


def taken_layers() -> str:
    """A digest of the taken layers and their numbers, which steps that vLLM has compiled contain."""
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
        """Pack the weight of an output head; rows of an embedding are looked up, which vLLM does."""
        return _plain(layer, "native") if isinstance(layer, ParallelLMHead) else None

    replace_methods(UnquantizedLinearMethod, linear, keeps_weight=False)
    replace_methods(UnquantizedEmbeddingMethod, head, keeps_weight=True)
    replace_methods(CompressedTensorsLinearMethod, eight_bits, keeps_weight=False)


def replace_methods(method: Any, read: Read, *, keeps_weight: bool) -> None:
    """Replace both functions of a method's class, unless they are replaced already. Subclasses with functions
    of their own keep them.

    keeps_weight: keep the layer's own weight beside the packed one, since it is read elsewhere.
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
    """Pack a matrix of floats; None for a layer that vLLM itself does not multiply by."""
    weight = layer.weight
    if weight.ndim != 2 or weight.is_meta or not weight.numel():
        return None
    if getattr(layer, "_cpu_skip_gemm_dispatch", False):
        return None
    if weight.dtype not in NUMBERS:
        raise ValueError(f"its weight is {weight.dtype}; bfloat16 and float32 are packed")
    return packed_weight(weight, weight_format=weight_format)


def eight_bits(layer: Any) -> PackedWeight | None:
    """Pack a weight of compressed-tensors' W8A8: bytes with a scale for each output; rows of activations are
    rounded when they come."""
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

"""PyTorch operators that multiply by packed weights on the threads of PyTorch's own operations.

`torch.ops.phasewise.packed_linear(x, bias, number)` is x W^T + bias by the weight that `hold` gave the
number. A compiler of PyTorch sees one opaque operator. The operator makes no threads: it calls those of the
OpenMP library that PyTorch has loaded, as PyTorch's own operators do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from phasewise.cython_kernels._native import OpenMPProduct, OpenMPTeam
from phasewise.cython_kernels.errors import TeamError
from phasewise.cython_kernels.packing import PackedWeight

_FUNCTIONS = ("GOMP_parallel", "omp_get_thread_num")
"""Functions of GNU's OpenMP library, which Intel's and LLVM's also have for programs compiled for it."""

_held: list[OpenMPProduct] = []


def torch_team() -> OpenMPTeam:
    """Make a team of as many threads as torch uses now. TeamError where torch's build has no OpenMP library
    that other code can find."""
    return _team(torch.get_num_threads())


@cache
def _team(threads: int) -> OpenMPTeam:
    loaded = ctypes.CDLL(None)
    try:
        addresses = [ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS]
    except AttributeError as error:
        raise TeamError(f"this build of PyTorch has loaded no OpenMP library: {error}") from None
    return OpenMPTeam(threads, *addresses)


def hold(
    packed: PackedWeight,
    path: str | None = None,
    k_parts: int = 1,
    schedules: Sequence[tuple[int, Any]] = (),
    number: int | None = None,
) -> int:
    """Keep a weight for the operator and return its number, valid until the process ends or another weight
    takes it.

    path, k_parts, schedules: arguments of `OpenMPProduct`. number: the number of a weight to replace.
    """
    product = OpenMPProduct(torch_team(), packed, path, k_parts, schedules)
    if number is None:
        _held.append(product)
        return len(_held) - 1
    _held[number] = product
    return number


def _packed_linear(x: torch.Tensor, bias: torch.Tensor | None, number: int) -> torch.Tensor:
    product = _held[number]
    if x.dtype not in (torch.bfloat16, torch.float32) or x.shape[-1:] != (product.k,):
        raise ValueError(f"x is {x.dtype} {tuple(x.shape)}: bfloat16 or float32 [..., {product.k}] expected")
    if bias is not None and (bias.dtype != x.dtype or bias.shape != (product.n,)):
        raise ValueError(f"a bias of {bias.dtype} {tuple(bias.shape)}: {x.dtype} [{product.n}] expected")
    return multiply(product, x, bias)


def multiply(product: OpenMPProduct, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Compute x W^T + bias for x [..., k] and a bias [n] of one type, bfloat16 or float32, in that type."""
    rows, y = x.contiguous(), x.new_empty((*x.shape[:-1], product.n))
    bias = None if bias is None else bias.contiguous()
    product.multiply(
        rows.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
        rows.numel() // product.k,
        x.dtype == torch.bfloat16,
    )
    return y


def _shape_of_it(x: torch.Tensor, bias: torch.Tensor | None, number: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _held[number].n))


_library = torch.library.Library("phasewise", "DEF")
_library.define("packed_linear(Tensor x, Tensor? bias, int number) -> Tensor")
_library.impl("packed_linear", _packed_linear, "CPU")
torch.library.register_fake("phasewise::packed_linear", _shape_of_it, lib=_library)

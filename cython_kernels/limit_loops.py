"""Loops that run one core at its limits (families/limits.c), for the instruction set in use."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from phasewise.cython_kernels import _native

KINDS = ("f32", "f16", "bf16", "int8")


def peak(kind: str, rounds: int) -> int:
    """Multiply-adds of `kind` without memory traffic; returns the operations done. Releases the GIL."""
    return int(_native.limit_peak(kind, rounds))


def read(buffer: npt.NDArray[np.uint8]) -> int:
    """Read `buffer` once, in whole blocks of 512 bytes; returns the bytes read. Releases the GIL."""
    return int(_native.limit_read(buffer))

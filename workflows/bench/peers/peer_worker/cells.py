"""The cells that a peer is asked to compute, the weights for them, and the form of its answer."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

GROUP = 32
"""Inputs that share a scale in the 4-bit format."""


@dataclass(frozen=True)
class Cell:
    """The product to compute, and the number of weights."""

    format: str
    n: int
    k: int
    m: int
    copies: int

    def x(self) -> np.ndarray:
        return np.random.default_rng(1).standard_normal((self.m, self.k), dtype=np.float32)

    def weight(self) -> np.ndarray:
        """Read-only: it is kept for the next cell of the same shape."""
        return random_weight(self.n, self.k)


@functools.lru_cache(maxsize=1)
def random_weight(n: int, k: int) -> np.ndarray:
    weight = np.random.default_rng(2).standard_normal((n, k), dtype=np.float32)
    weight.flags.writeable = False
    return weight


@dataclass(frozen=True)
class Setting:
    """One way in which a peer computes a cell."""

    name: str
    run: Callable[[int], Any]
    """Multiplies with the weight of this number, or with `products` of them at once."""
    row: Callable[[Any], np.ndarray]
    """The first row of y, float32 [n], from what `run(0)` returned."""
    products: int = 1


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, as uint16."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


@functools.lru_cache(maxsize=1)
def eight_bits(n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The random weight, kept for the next cell: q int8 [n, k], scales float32 [n, 1], w = q * scale."""
    w = random_weight(n, k)
    scales = np.abs(w).max(axis=1, keepdims=True) / np.float32(127)
    return np.rint(w / scales).astype(np.int8), scales


def four_bits(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q uint8 [n, k] of 0..15 and scales float32 [n, k / 32], w = (q - 8) * scale."""
    groups = w.reshape(w.shape[0], -1, GROUP)
    scales = np.abs(groups).max(axis=2) / np.float32(7)
    return (np.rint(groups / scales[..., None]) + 8).astype(np.uint8).reshape(w.shape), scales


def address(array: np.ndarray) -> ctypes.c_void_p:
    """The address of the array's values, for a C function."""
    return ctypes.c_void_p(array.ctypes.data)

"""The operations that give other bits on another instruction set: exactly these, and no others.

`python -m tests.support.isa_operations` prints the list for this machine. What is taken off stays off;
an operation that comes to differ is a change of the arithmetic
(`serving.engine.fingerprint.ARITHMETIC_VERSION`, docs/arithmetic.md).
"""

from __future__ import annotations

from itertools import combinations_with_replacement

import numpy as np
import pytest

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import compute_paths
from tests.support.isa_operations import differences, results

HERE = list(combinations_with_replacement(dict.fromkeys(["portable", *isa.usable()]), 2))
"""Every two of this build's instruction sets, and each with itself, so there is always a pair."""


def _first_path_of_bf16(name: str) -> str:
    with isa.using(name):
        return compute_paths("bf16", 0)[0]


@pytest.mark.parametrize("pair", HERE, ids="-".join)
def test_exactly_the_listed_operations_differ(pair: tuple[str, str]) -> None:
    """bf16 weights meet the dots that each CPU has for them, which round in their own ways; by one and the
    same path they are equal, and so is everything else.
    """
    paths = {_first_path_of_bf16(name) for name in pair}
    assert set(differences(*pair)) == ({"product of bf16"} if len(paths) == 2 else set())


PATHS_OF_BF16 = {
    "avx512_bf16": "bf16_dot",
    "avx512_fp16": "f16_fma",
    "amx": "bf16_tile",
    "neon_bf16_i8mm": "bf16_dot",
}
"""By instruction sets that have dots of 16 bits; the others take `fma`."""


@pytest.mark.parametrize("name", isa.usable())
def test_bf16_takes_the_listed_path(name: str) -> None:
    assert _first_path_of_bf16(name) == PATHS_OF_BF16.get(name, "fma")


def test_a_bit_that_differs_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one operation, on one of two instruction sets."""

    def changed() -> list[tuple[str, np.ndarray]]:
        computed = list(results())
        if isa.active() == "portable":
            computed[3] = computed[3][0], np.nextafter(computed[3][1], np.float32(9))
        return computed

    monkeypatch.setattr("tests.support.isa_operations.results", changed)
    lowest, *_, highest = ["portable", *isa.usable()]
    if highest == "portable":
        pytest.skip("one instruction set")
    assert list(results())[3][0] in differences(lowest, highest)

"""The operations that give other bits on another instruction set: exactly these, and no others.

`python -m tests.support.isa_operations` prints the list for this machine. What is taken off stays off;
an operation that comes to differ is a change of the arithmetic
(`serving.engine.fingerprint.ARITHMETIC_VERSION`, docs/arithmetic.md).
"""

from __future__ import annotations

import numpy as np
import pytest

from phasewise.cython_kernels import isa
from phasewise.cython_kernels._native import compute_paths
from tests.support.isa_operations import differences, results

DIFFERENCES = {
    ("portable", "avx2"): set[str](),
    ("avx2", "avx_vnni"): set[str](),
    ("avx_vnni", "avx512"): set[str](),
    ("avx512", "avx512_vnni"): set[str](),
    ("avx512_vnni", "avx512_bf16"): {"product of bf16"},
    ("avx512_bf16", "avx512_fp16"): {"product of bf16"},
    ("avx512_fp16", "amx"): {"product of bf16"},
}
"""By neighbours on the ladder. bf16 weights meet the dots that each CPU has for them, which round in their
own ways; by the path `fma` they are equal.
"""

HERE = [pair for pair in DIFFERENCES if set(pair) <= set(isa.usable())]


@pytest.mark.parametrize("pair", HERE, ids="-".join)
def test_exactly_the_listed_operations_differ(pair: tuple[str, str]) -> None:
    assert set(differences(*pair)) == DIFFERENCES[pair]


def test_the_lowest_and_the_highest_differ_in_bf16_alone() -> None:
    """Whichever of the ladder's steps this build has."""
    lowest, *_, highest = ["portable", *isa.usable()]
    with isa.using(highest):
        differ = {"product of bf16"} if compute_paths("bf16", 0)[0] != "fma" else set()
    assert set(differences(lowest, highest)) == differ


@pytest.mark.parametrize("name", isa.usable())
def test_an_operation_gives_the_same_bits_twice(name: str) -> None:
    assert differences(name, name) == []


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

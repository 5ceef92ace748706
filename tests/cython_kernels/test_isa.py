"""The ladder of instruction sets: what runs here, what PHASEWISE_ISA may name, what the sets agree on.

The operations that give other bits on another set are exactly the listed ones: `python -m
tests.support.isa_operations` prints the list for this machine. What is taken off stays off; an operation that
comes to differ is a change of the arithmetic (`serving.engine.fingerprint.ARITHMETIC_VERSION`,
docs/arithmetic.md).
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import combinations_with_replacement

import numpy as np
import pytest

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels._native import compute_paths
from phasewise.cython_kernels.errors import IsaError
from tests.support.isa_operations import differences, results
from tests.support.kernels.gemm_reference import FORMATS, expected, make_weight


def run_with(wanted: str) -> subprocess.CompletedProcess[str]:
    code = "from phasewise.cython_kernels import isa; print(isa.active())"
    environment = os.environ | {"PHASEWISE_ISA": wanted}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_usable_sets_are_rungs_of_the_ladder_in_its_order() -> None:
    usable = isa.usable()

    assert list(usable) == [name for name in isa.ladder() if name in usable]
    assert usable[0] == "portable"
    assert isa.active() in usable


@pytest.mark.parametrize("name", isa.usable())
def test_the_environment_forces_a_set(name: str) -> None:
    assert run_with(name).stdout.strip() == name


def test_no_wish_means_the_highest() -> None:
    assert run_with("").stdout.strip() == isa.usable()[-1]


@pytest.mark.many
@pytest.mark.parametrize("name", ["sse9", "AVX2", *sorted({*isa.ladder()} - {*isa.usable()})])
def test_a_set_that_does_not_run_here_is_a_clear_error(name: str) -> None:
    got = run_with(name)

    assert got.returncode != 0
    last = got.stderr.strip().splitlines()[-1]
    assert "PHASEWISE_ISA" in last
    assert name in last
    assert isa.usable()[-1] in last


def test_using_restores_what_was_active() -> None:
    before = isa.active()

    def fail_within() -> None:
        with isa.using("portable"):
            assert isa.active() == "portable"
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    with pytest.raises(IsaError, match="no such"), isa.using("sse9"):
        pass

    assert isa.active() == before


def test_every_set_keeps_the_bound_of_one_product() -> None:
    """All of them in one test, since `quick` leaves out what is parametrized by those in the middle."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((5, 96), dtype=np.float32)
    for fmt in FORMATS:
        w = make_weight(fmt, 40, 96, rng)
        for name in isa.usable():
            with isa.using(name):
                exact, bound = expected(x, w)
                assert (np.abs(np.asarray(_native.gemm(x, w)) - exact) <= bound).all(), (name, fmt)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.startswith("q")])
@pytest.mark.parametrize("name", isa.usable())
def test_the_integer_part_is_the_same_on_every_set(name: str, fmt: str) -> None:
    """One group, scales of one: y is a * D with D exact, the same bits everywhere."""
    rng = np.random.default_rng(0)
    k = 16 if "16" in fmt else 32
    w = make_weight(fmt, 48, k, rng)
    assert w.scales is not None
    w.scales[...] = 1
    if w.mins is not None:
        w.mins[...] = 0
    x = rng.standard_normal((6, k), dtype=np.float32)
    with isa.using("portable"):
        reference = _native.gemm(x, w)
    with isa.using(name):
        assert np.array_equal(_native.gemm(x, w), reference)


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

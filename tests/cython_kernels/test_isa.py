"""The ladder of instruction sets: what runs here, what PHASEWISE_ISA may name, what the sets agree on."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.errors import IsaError
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

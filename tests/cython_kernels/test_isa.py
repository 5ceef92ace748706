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

import pytest

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels._native import compute_paths
from tests.support.isa_operations import differences


def run_with(wanted: str) -> subprocess.CompletedProcess[str]:
    code = "from phasewise.cython_kernels import isa; print(isa.active())"
    environment = os.environ | {"PHASEWISE_ISA": wanted}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", isa.usable())
def test_the_environment_forces_a_set(name: str) -> None:
    assert run_with(name).stdout.strip() == name


def test_no_wish_means_the_highest() -> None:
    assert run_with("").stdout.strip() == isa.usable()[-1]


@pytest.mark.many
@pytest.mark.parametrize("name", ["sse9", "AVX2", *sorted({*_native.isa_ladder()} - {*isa.usable()})])
def test_a_set_that_does_not_run_here_is_a_clear_error(name: str) -> None:
    got = run_with(name)

    assert got.returncode != 0
    last = got.stderr.strip().splitlines()[-1]
    assert "PHASEWISE_ISA" in last
    assert name in last
    assert isa.usable()[-1] in last


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

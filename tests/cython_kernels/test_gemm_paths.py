"""Every compute path of a weight keeps its bound and depends on no schedule; tables say what exists."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa
from phasewise.cython_kernels.packing import Kind
from tests.support import ROOT
from tests.support.kernels.gemm_reference import FORMATS, PLAIN_KINDS, assert_bound_and_bits, make_weight
from tests.support.tiers import examples, first_is_smoke

WAYS = [(name, kind) for name in isa.usable() for kind in PLAIN_KINDS]
SIZES = (-5, 0, 1, 2, 3, 4, 5, 8, 9, 14, 15, 30, 31, 1000)


def paths_on(name: str, kind: Kind) -> tuple[str, ...]:
    with isa.using(name):
        return _native.compute_paths(kind)


PATHS = [(name, kind, path) for name, kind in WAYS for path in paths_on(name, kind)]
FORMAT_PATHS = [(name, fmt, path) for name, kind, path in PATHS for fmt in FORMATS if fmt.split()[0] == kind]


@pytest.mark.many
@pytest.mark.parametrize(("name", "fmt", "path"), FORMAT_PATHS)
@examples(25)
@given(
    n=st.integers(1, 150),
    k=st.integers(1, 300),
    m=st.integers(1, 80),
    fields=st.fixed_dictionaries(
        {
            "mr": st.sampled_from(SIZES),
            "panels": st.sampled_from(SIZES),
            "block_k": st.sampled_from((1, 32, 64, 1000)),
            "prefetch_bytes": st.sampled_from((-1, 0, 2048, 16384, 2**30)),
        }
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_path_keeps_its_bound_and_its_bits(
    name: str, fmt: str, path: str, n: int, k: int, m: int, fields: dict[str, int], seed: int
) -> None:
    """Rows one by one (widened or dotted as they come) against many at once (staged), by any micro-kernel."""
    rng = np.random.default_rng(seed)
    w, x = make_weight(fmt, n, k, rng), rng.standard_normal((m, k), dtype=np.float32)
    assert_bound_and_bits(name, w, x, path, **fields)


@pytest.mark.parametrize(("name", "kind"), WAYS)
def test_the_default_path_comes_first_and_stands_in_for_those_that_are_not_there(
    name: str, kind: Kind
) -> None:
    rng = np.random.default_rng(1)
    w, x = make_weight(kind, 40, 64, rng), rng.standard_normal((3, 64), dtype=np.float32)
    with isa.using(name):
        default, own = _native.gemm(x, w), _native.compute_paths(kind)
        missing = set(_native.path_names()) - set(own)

        assert all(np.array_equal(_native.gemm(x, w, path=path), default) for path in (own[0], *missing))


@pytest.mark.slow
@pytest.mark.parametrize("side", first_is_smoke(["after", "before"]))
@pytest.mark.parametrize("name", isa.usable())
def test_operands_may_touch_unreadable_pages(name: str, side: str) -> None:
    got = subprocess.run(
        [sys.executable, "-m", "tests.support.kernels.gemm_at_guard_pages", name, side],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert got.returncode == 0, f"exit status {got.returncode}: {got.stderr[-2000:]}"
    assert got.stdout.strip() == "ok"

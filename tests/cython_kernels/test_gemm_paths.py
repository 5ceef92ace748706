"""Every compute path keeps its bound and depends on no schedule; a product's bits depend on no thread."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native, isa, packing
from phasewise.cython_kernels._native import Team, TeamProduct, compute_paths
from phasewise.cython_kernels.packing import Kind
from tests.support import ROOT
from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS
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


sizes = st.one_of(st.integers(-(2**31), 2**31 - 1), st.integers(0, 70))
schedules = st.fixed_dictionaries(
    {
        "mr": sizes, "panels": sizes, "block_m": sizes, "block_k": sizes,
        "block_n": sizes | st.integers(1, 70).map(lambda panels: 16 * panels),
        "prefetch_bytes": sizes, "threads_m": sizes, "threads_n": sizes, "threads_k": sizes,
        "loop_order": st.sampled_from(("nm", "mn")),
    }
)  # fmt: skip


def weight(n: int, k: int, fmt: str, seed: int = 0) -> packing.PackedWeight:
    return make_weight(fmt, n, k, np.random.default_rng(seed))


@examples(150)
@given(
    fmt=st.sampled_from(FORMATS),
    n=st.sampled_from((1, 16, 90, 200)),
    k=st.sampled_from((32, 100, 320)),
    m=st.sampled_from((1, 7, 9, 70)),
    threads=st.integers(1, 4),
    k_parts=st.sampled_from((1, 2, 3, 11)),
    way=st.integers(0, 4),
    schedule=schedules,
)
def test_any_schedule_on_any_team_gives_the_same_bits(
    fmt: str, n: int, k: int, m: int, threads: int, k_parts: int, way: int, schedule: dict[str, Any]
) -> None:
    """On every compute path, with k summed whole or in parts."""
    pack = weight(n, k, fmt)
    paths = compute_paths(pack.kind)
    path = paths[way % len(paths)]
    alone = TeamProduct(Team(None, members=1), [pack], m, path, k_parts)
    together = TeamProduct(Team(None, members=threads), [pack], m, path, k_parts)

    alone.time(None, 1)
    together.time(schedule, 3)

    assert (together.result() == alone.result()).all()


def test_every_call_is_timed_and_weights_are_taken_in_turn() -> None:
    packs = [weight(32, 64, "f32", seed) for seed in range(3)]
    product = TeamProduct(Team(None, members=2), packs, 5)
    wanted = TeamProduct(Team(None, members=1), packs[1:2], 5)

    assert product.time(None, 5, prepare=True).shape == (5,)
    wanted.time(None, 1)

    assert (product.result() == wanted.result()).all()


def test_weights_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="one kind and shape"):
        TeamProduct(Team(None, members=1), [weight(32, 64, "f32"), weight(32, 96, "f32")], 5)
    with pytest.raises(ValueError, match="takes rows"):
        TeamProduct(Team(None, members=1), [weight(32, 64, "f32")], 0)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc to compile with")
def test_no_piece_of_a_region_is_what_is_left_of_whole_tiles(tmp_path: Path) -> None:
    """It would read its weights anew for a row or two."""
    program = tmp_path / "cut_regions"
    subprocess.run(["gcc", *COMMON_FLAGS, "-I", KERNELS, HERE / "cut_regions.c", "-o", program], check=True)

    got = subprocess.run([program], capture_output=True, text=True)

    assert (got.returncode, got.stdout) == (0, "")

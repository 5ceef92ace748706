"""A product on a team: whatever the schedule and the number of threads, the bits are those of one thread."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import packing
from phasewise.cython_kernels._native import Team, TeamProduct, compute_paths
from tests.support.kernels.cross import COMMON_FLAGS, HERE, KERNELS
from tests.support.kernels.gemm_reference import FORMATS, make_weight
from tests.support.tiers import examples

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

"""Duels between storages choose by the sequences that are expected, and by proven losses alone."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from phasewise.cython_kernels import sparse
from phasewise.kerneldb.records import Comparison, Problem, StorageDuel
from phasewise.kerneldb.store import open_store
from phasewise.tuner.errors import TunerError
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.native import NativeEvaluator, arithmetics, default_schedule
from phasewise.tuner.search.space import Arithmetic
from phasewise.tuner.storage import StorageTable, read_storage_table
from phasewise.tuner.weights import (
    blank_weight,
    dense_format,
    format_name,
    random_weight,
    sparse_format,
    split_format,
)
from tests.support.machines.kerneldb_examples import MACHINE, OTHER_MACHINE, STORAGE_DUEL

WIN, TIE, BUSY, LOSS = (
    Comparison(gain, low, high, 0.99, 15)
    for gain, low, high in ((1.42, 1.4, 1.45), (0.99, 0.9, 1.1), (0.88, 0.19, 6.1), (0.88, 0.86, 0.9))
)


def duel(m: int, comparison: Comparison, weight_format: str = "bf16s8") -> StorageDuel:
    return replace(STORAGE_DUEL, problem=Problem("gemm", weight_format, 64, 96, m), comparison=comparison)


@pytest.mark.parametrize(
    ("comparisons", "sequences", "is_sparse"),
    [
        ({1: WIN}, 1, True),
        ({1: WIN}, 8, False),
        ({1: WIN, 8: TIE, 512: TIE}, 8, True),
        ({1: WIN, 8: BUSY, 512: BUSY}, 8, True),
        ({1: WIN, 8: LOSS, 512: LOSS}, 1, True),
        ({1: WIN, 8: LOSS, 512: TIE}, 8, False),
        ({1: WIN, 8: TIE, 16: TIE, 32: LOSS}, 16, True),
        ({1: WIN, 8: TIE, 16: TIE, 32: LOSS}, 32, False),
        ({1: WIN, 8: WIN, 512: LOSS}, 8, False),
        ({1: TIE}, 1, False),
        ({1: LOSS, 8: WIN}, 8, False),
    ],
)
def test_the_expected_rows_and_proven_losses_choose(
    comparisons: dict[int, Comparison], sequences: int, is_sparse: bool
) -> None:
    """One sequence keeps what it gains, a server is slower for no number of its sequences."""
    verdict = StorageTable(duel(m, comparison) for m, comparison in comparisons.items()).verdict(
        "bf16", 64, 96, 0.5, sequences
    )

    assert verdict is not None
    assert verdict.is_sparse == is_sparse
    assert all(f"m={m}" in verdict.why for m in comparisons)
    assert "0.19" not in verdict.why


def test_only_the_shape_and_sixteenth_that_was_compared_is_known() -> None:
    table = StorageTable([duel(1, WIN)])

    assert table.verdict("bf16", 64, 96, 0.51, 1)
    assert table.verdict("bf16", 64, 96, 0.56, 1) is None
    assert table.verdict("bf16", 64, 64, 0.5, 1) is None
    assert table.verdict("int8", 64, 96, 0.5, 1) is None
    assert table.verdict("int4", 64, 96, 0.5, 1) is None
    assert not StorageTable()


def test_the_newest_duel_of_these_cores_counts() -> None:
    with open_store(":memory:") as store:
        store.add_storage_duels([duel(1, WIN), duel(1, LOSS)])
        here = read_storage_table(store, [MACHINE, MACHINE], STORAGE_DUEL.kernel_abi)
        elsewhere = read_storage_table(store, [OTHER_MACHINE], STORAGE_DUEL.kernel_abi)

    verdict = here.verdict("bf16", 64, 96, 0.5, 1)
    assert verdict is not None
    assert not verdict.is_sparse
    assert not elsewhere


@pytest.mark.parametrize("weight_format", ["bf16s8", "int8s3", "int8cs12"])
def test_a_blank_sparse_weight_is_as_large_as_a_real_one(weight_format: str) -> None:
    """So its limits and its default schedule are those of the real one."""
    blank, real = blank_weight(weight_format, 256, 512), random_weight(weight_format, 256, 512)

    assert format_name(blank) == weight_format
    assert blank.nbytes == pytest.approx(real.nbytes, rel=0.02)
    way = Arithmetic("fma" if weight_format.startswith("bf16") else "int8_dot")
    assert default_schedule(blank, 1, 1, way) == default_schedule(real, 1, 1, way)


def test_a_duel_between_storages_times_both() -> None:
    cores = sorted(os.sched_getaffinity(0))[:1]
    evaluator = NativeEvaluator(cores, total_bytes=1 << 18)
    problem = Problem("gemm", "bf16s8", 64, 96, 1)
    own = {
        name: default_schedule(blank_weight(name, 64, 96), 1, 1, Arithmetic("fma"))
        for name in ("bf16", "bf16s8")
    }
    try:
        fought = evaluator.duel_storages(problem, own["bf16s8"], own["bf16"])
    finally:
        evaluator.close()

    assert fought.candidate.schedule == own["bf16s8"]
    assert fought.incumbent.schedule == own["bf16"]
    assert fought.comparison.gain > 0


@pytest.mark.parametrize("name", ["bf16", "int8", "int8g16", "int8c"])
@pytest.mark.parametrize("density", [1 / 16, 0.5, 15 / 16])
def test_a_sparse_weight_is_named_after_what_it_keeps(name: str, density: float) -> None:
    weight = random_weight(sparse_format(name, density), 256, 512)

    assert weight.is_sparse
    assert format_name(weight) == sparse_format(name, density)
    assert dense_format(weight) == name
    assert split_format(format_name(weight)) == (name, density)
    assert sparse.kept_share(weight) == pytest.approx(sparse.density(weight), abs=0.005)


def test_names_that_mean_nothing_are_refused() -> None:
    with pytest.raises(TunerError):
        sparse_format("int4", 0.5)
    with pytest.raises(TunerError):
        sparse_format("bf16", 1.5)
    with pytest.raises(TunerError):
        split_format("bf16s17")
    assert split_format("iq4_xs") == ("iq4_xs", None)


def test_both_storages_have_one_arithmetic() -> None:
    """A database's word on a dense weight is that on the sparse one; searches do not look for another."""
    schedules = ScheduleTable([])

    assert schedules.arithmetic(random_weight("bf16s8", 64, 64)) == schedules.arithmetic(
        random_weight("bf16", 64, 64)
    )
    assert arithmetics("bf16s8", 64, 64, 2) == arithmetics("bf16", 64, 64, 2)[:1]

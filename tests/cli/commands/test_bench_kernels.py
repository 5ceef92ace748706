"""`phasewise bench kernels`: rows that agree with themselves, in every form."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.tuner.weights import blank_weight
from phasewise.workflows.bench import kernels as bench_kernels
from phasewise.workflows.bench.kernels import BITS, Point
from tests.cli import command
from tests.support.tuned_here import here, keep_in_use, timed

SMALL = ("bench", "kernels", "--threads", "1", "--shape", "48,64", "-r", "2")
ISSUED = (
    "format", "n", "k", "m", "threads", "median_ns", "gflops", "gbps", "peak_fraction", "bandwidth_fraction",
    "schedule",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("own_places")


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not about speed."""
    monkeypatch.setattr("phasewise.tuner.machine_limits.REPEAT_S", 0.001)
    monkeypatch.setattr("phasewise.tuner.machine_limits.LEAST_READ_BYTES", 1 << 20)
    monkeypatch.setattr("phasewise.tuner.weights.cold_bytes", lambda _machine: 1 << 20)
    monkeypatch.setattr("phasewise.workflows.bench.kernels.TURN_NS", 100_000)


bench = partial(command.text_of, *SMALL)


def test_json_rows_hold_what_was_asked_and_agree_with_themselves() -> None:
    rows = json.loads(bench("--format", "f32,int8,bf16s8", "--m", "1,5", "-o", "json"))

    assert [(r["format"], r["n"], r["k"], r["m"]) for r in rows] == [
        (name, 48, 64, m) for name in ("f32", "int8", "bf16s8") for m in (1, 5)
    ]
    for r in rows:
        assert set(ISSUED) <= set(r)
        assert r["threads"] == 1
        assert len(r["samples_ns"]) == 2
        assert r["gflops"] == pytest.approx(2 * r["m"] * 48 * 64 / r["median_ns"], rel=0.01)
        assert r["gbps"] == pytest.approx(r["weight_bytes"] / r["median_ns"], rel=0.01)
        assert r["peak_fraction"] == pytest.approx(r["gflops"] * 1e9 / r["peak_flops_per_s"])


def test_every_form_has_every_row() -> None:
    """And every point its row: in a table with its schedule too."""
    as_csv = list(csv.DictReader(io.StringIO(bench("--format", "f32,int8", "--m", "1,5", "-o", "csv"))))
    as_table = bench("--format", "f32,int8", "--m", "1,5", "--wide")

    assert [(r["format"], r["m"]) for r in as_csv] == [(f, m) for f in ("f32", "int8") for m in ("1", "5")]
    assert as_table.count("| default: ") == 4


def test_a_product_runs_by_what_was_tuned_for_it(db: Path) -> None:
    """And says so; a number of rows that nothing was tuned near runs by the default."""
    schedule = Schedule(1, 1, 3, 16, 32, 1, 1, 1, _native.compute_paths("f32")[0], 1, 640, "mn")
    keep_in_use(db, [timed(Problem("gemm", "f32", 48, 64, 4), schedule, machine=here(1))])

    rows = json.loads(bench("--format", "f32", "--m", "4,64", "-o", "json"))

    assert [r["schedule_source"] for r in rows] == ["exact", "default"]
    assert rows[0]["schedule"] == asdict(schedule)


@pytest.mark.parametrize(
    "arguments",
    [["--format", "f31"], ["--shape", "48"], ["--shape", "0,64"], ["--shape", "9999999999,1"],
     ["--m", "0"], ["--m", ""]],
)  # fmt: skip
def test_impossible_grids_are_wrong_usage(arguments: list[str]) -> None:
    assert command.run(*SMALL, *arguments).usage_error


@given(st.integers(1, 4096), st.sampled_from(["f32", "bf16", "int8"]), st.integers(1, 1 << 29))
def test_as_many_weights_as_a_turn_takes_or_as_no_cache_holds(
    m: int, weight_format: str, cold_bytes: int
) -> None:
    packs = [blank_weight(weight_format, 64, 96)] * 10_000
    point = Point(weight_format, 64, 96, m, packs, 2e11)

    copies = point.copies(cold_bytes)

    weight_bytes = 64 * 96 * BITS[weight_format] // 8
    turn = bench_kernels.TURN_NS / (2e9 * m * 64 * 96 / 2e11)
    assert 1 <= copies <= len(packs)
    assert copies >= min(turn, cold_bytes / weight_bytes, len(packs)) or copies == len(packs)
    assert (copies - 1) * weight_bytes < cold_bytes
    assert copies <= max(2, math.ceil(turn))

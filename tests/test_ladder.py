"""The ladder of Table 1: every rung runs, and what it leaves out is left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.papers.ladder import WholeSums, core_by_core, ladder
from phasewise.cython_kernels.packing import PackedWeight, pack_dense
from phasewise.cython_kernels.schedules import RowRange, ScheduleLookup
from phasewise.topology import read_machine
from phasewise.tuner.plans import PHASES, default_plan
from tests.support.models.tiny_models import write_tiny_gguf

WHOLE = {"threads_m": 1, "threads_n": 2, "threads_k": 1}
DIVIDED = {"threads_m": 1, "threads_n": 1, "threads_k": 2}


class Tuned(ScheduleLookup):
    """Schedules of three ranges: one that divides sums, one that does not, and the default."""

    def __init__(self, k_parts: int) -> None:
        self.k_parts = k_parts

    def arithmetic(self, weight: PackedWeight) -> tuple[str | None, int]:
        return "fma", self.k_parts

    def products(self, weight: PackedWeight, max_m: int) -> Sequence[RowRange]:
        return [RowRange(1, DIVIDED, "tuned"), RowRange(8, WHOLE, "tuned"), RowRange(max_m, None, "default")]


@pytest.mark.parametrize(
    ("k_parts", "schedules", "n_left_out"), [(1, [None, WHOLE, None], 1), (2, [None, None, None], 3)]
)
def test_without_split_k_no_schedule_divides_sums(
    k_parts: int, schedules: list[object], n_left_out: int
) -> None:
    """No schedule is left of an arithmetic that has parts itself."""
    weight = pack_dense(np.ones((16, 32), dtype=np.float32), "f32")
    lookup = WholeSums(Tuned(k_parts))

    ranges = lookup.products(weight, 512)

    assert [rows.schedule for rows in ranges] == schedules
    assert [rows.last_m for rows in ranges] == [1, 8, 512]
    assert lookup.arithmetic(weight) == ("fma", 1)
    assert lookup.n_left_out == n_left_out


@pytest.mark.parametrize("phase", PHASES)
def test_core_by_core_the_same_cores_are_ranks(phase: str) -> None:
    machine = read_machine()
    plan = default_plan(machine, phase)  # type: ignore[arg-type]

    apart = core_by_core(plan, machine)

    assert apart.cores == plan.cores
    assert {len(rank.cores) for rank in apart.ranks} == {1}


def test_every_rung_runs_and_the_first_is_the_measure(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model)

    said = list(ladder(str(model), "native", "1,2", 8, 4, 1, str(tmp_path / "absent.db")))

    rows = [part for part in said if not isinstance(part, str)]
    remarks = [part for part in said if isinstance(part, str)]
    assert [row["rung"] for row in rows][:4] == [
        "all that is tuned",
        "without split-k",
        "without tuned kernels",
        "without a tuned configuration",
    ]
    assert {"decode x1, ratio", "decode x2, ratio", "prefill, ratio"} < set(rows[0])
    assert str(rows[0]["decode x1, ratio"]) == "1 (1 to 1)"
    assert sum("changes nothing" in remark or "change nothing" in remark for remark in remarks) == 3

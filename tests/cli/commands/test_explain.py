"""`--explain`: which schedule each weight runs by, from a database that holds one for a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cli import command

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)

from phasewise.cython_kernels._native import compute_paths, kernel_abi
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.serving.loaders import load_model
from phasewise.tuner.weights import format_name
from tests.support.tuned_here import keep_in_use, timed

pytestmark = pytest.mark.usefixtures("own_places")

ASKED = ("-p", "hello", "-n", 3, "--ignore-eos", "--explain")


def promote(db: Path, model: Path, m: int, kernel_abi: str) -> Schedule:
    """A schedule for `m` rows of the first layer's output projection is timed and promoted."""
    weight = load_model(str(model), "native").weights["layers.0.o"]
    schedule = Schedule(1, 1, 3, 16, 32, 1, 1, 1, compute_paths(weight.kind)[0], 1, 640, "mn")
    problem = Problem("gemm", format_name(weight), weight.n, weight.k, m)
    keep_in_use(db, [timed(problem, schedule, abi=kernel_abi)])
    return schedule


def explained(model: Path, phase: str) -> dict[str, list[dict[str, Any]]]:
    fields = command.fields_of("generate", model, *ASKED)
    uses: dict[str, list[dict[str, Any]]] = {}
    for use in fields["schedules"]:
        if use["phase"] == phase:
            uses.setdefault(use["used_for"], []).append(use)
    return uses


def test_without_a_database_every_weight_runs_by_the_default(tiny: Path) -> None:
    uses = explained(tiny, "prefill")

    assert {use["why"] for weight_uses in uses.values() for use in weight_uses} == {"default: nothing tuned"}
    assert all(
        weight_uses[0]["first_m"] == 1 and weight_uses[-1]["last_m"] == 5 for weight_uses in uses.values()
    )


def test_a_promoted_schedule_is_named_with_its_numbers(tiny: Path, db: Path) -> None:
    schedule = promote(db, tiny, 1, kernel_abi("gemm"))

    (use,) = next(
        weight_uses for names, weight_uses in explained(tiny, "decode").items() if "layers.*.o" in names
    )

    assert use["why"].startswith("exact")
    assert (use["schedule"]["block_m"], use["schedule"]["prefetch_bytes"]) == (3, 640)
    assert (use["schedule"]["loop_order"], use["compute_path"]) == ("mn", schedule.compute_path)
    assert "exact" in command.run("generate", tiny, *ASKED).stderr


def test_schedules_of_another_build_are_left_alone(tiny: Path, db: Path) -> None:
    promote(db, tiny, 1, "gemm-other-000000000000")

    uses = explained(tiny, "decode")

    assert {use["why"] for weight_uses in uses.values() for use in weight_uses} == {"default: nothing tuned"}


def test_tuned_schedules_change_no_token(tiny: Path, db: Path) -> None:
    before = command.fields_of("generate", tiny, *ASKED)["token_ids"]
    promote(db, tiny, 5, kernel_abi("gemm"))

    assert command.fields_of("generate", tiny, *ASKED)["token_ids"] == before

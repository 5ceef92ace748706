"""`--explain`: which schedule each weight runs by, from a database that holds one for a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from tests.support.tiny_models import tiny_gguf

pytest.importorskip("phasewise.serving.open_engine", reason="the kernels are not built", exc_type=ImportError)

from phasewise.cli.main import app
from phasewise.cython_kernels._native import compute_paths, kernel_abi
from phasewise.kerneldb.records import (
    Comparison,
    Measurement,
    Origin,
    Problem,
    Promotion,
    Sample,
    Schedule,
)
from phasewise.kerneldb.store import open_store
from phasewise.serving.loaders import load_model
from phasewise.topology import read_machine
from phasewise.tuner.plans import default_plan, machine_key
from phasewise.tuner.weights import format_name


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PHASEWISE_DB", str(tmp_path / "tuned.db"))
    monkeypatch.setenv("PHASEWISE_CONFIG", "/dev/null")
    path = tmp_path / "tiny.gguf"
    path.write_bytes(tiny_gguf().to_bytes())
    return path


def promote(db: Path, model: Path, m: int, kernel_abi: str) -> Schedule:
    """A schedule for `m` rows of the first layer's output projection is timed and promoted."""
    machine = read_machine()
    weight = load_model(str(model), "native").weights["layers.0.o"]
    schedule = Schedule(1, 1, 3, 16, 32, 1, 1, 1, compute_paths(weight.kind)[0], 1, 640, "mn")
    problem = Problem("gemm", format_name(weight), weight.n, weight.k, m)
    origin = Origin(
        machine_key(machine, default_plan(machine, "decode").ranks[0].cores), "0.1.0", 1_795_000_000_000
    )
    origin = Origin(machine_key(machine, default_plan(machine, "decode").cores), "0.1.0", 1_795_000_000_000)
    won = Comparison(1.5, 1.25, 2.0, 0.95, 40)
    with open_store(db) as store:
        sample = Sample(schedule, (900,), 900, None, 1000)
        store.add_measurements([Measurement(problem, sample, kernel_abi, origin)])
        store.add_promotions([Promotion(problem, schedule, None, won, kernel_abi, origin)])
    return schedule


def generate(model: Path, *arguments: str) -> Result:
    command = ["generate", str(model), "-p", "hello", "-n", "3", "--ignore-eos", "--explain", *arguments]
    result = CliRunner().invoke(app, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


def explained(model: Path, phase: str) -> dict[str, list[dict[str, Any]]]:
    fields = json.loads(generate(model, "--json").stdout)
    uses: dict[str, list[dict[str, Any]]] = {}
    for use in fields["schedules"]:
        if use["phase"] == phase:
            uses.setdefault(use["used_for"], []).append(use)
    return uses


def test_without_a_database_every_weight_runs_by_the_default(model: Path) -> None:
    uses = explained(model, "prefill")

    assert {use["why"] for found in uses.values() for use in found} == {"default: nothing tuned"}
    assert all(found[0]["first_m"] == 1 and found[-1]["last_m"] == 5 for found in uses.values())


def test_a_promoted_schedule_is_named_with_its_numbers(model: Path, tmp_path: Path) -> None:
    schedule = promote(tmp_path / "tuned.db", model, 1, kernel_abi("gemm"))

    (use,) = next(found for names, found in explained(model, "decode").items() if "layers.*.o" in names)

    assert use["why"].startswith("exact")
    assert (use["schedule"]["block_m"], use["schedule"]["prefetch_bytes"]) == (3, 640)
    assert (use["schedule"]["rows_outside"], use["compute_path"]) == (1, schedule.compute_path)
    assert "exact" in generate(model).stderr


def test_schedules_of_another_build_are_left_alone(model: Path, tmp_path: Path) -> None:
    promote(tmp_path / "tuned.db", model, 1, "gemm-other-000000000000")

    uses = explained(model, "decode")

    assert {use["why"] for found in uses.values() for use in found} == {"default: nothing tuned"}


def test_tuned_schedules_change_no_token(model: Path, tmp_path: Path) -> None:
    before = json.loads(generate(model, "--json").stdout)["token_ids"]
    promote(tmp_path / "tuned.db", model, 5, kernel_abi("gemm"))

    assert json.loads(generate(model, "--json").stdout)["token_ids"] == before

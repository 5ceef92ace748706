"""The energy of `phasewise bench run`, by counters of powercap's form: what `power_w` asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phasewise.topology.energy import EnergyCounters
from phasewise.workflows.bench import model_speed
from tests.cli import command
from tests.support.models.tiny_models import write_tiny_gguf

RUNS = 2
JOULES = 3
"""Spent between two readings of the counters."""


@pytest.fixture
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that spends as much between any two readings."""
    zone = tmp_path / "intel-rapl:0"
    zone.mkdir()
    for file, text in (("name", "package-0"), ("max_energy_range_uj", 1 << 40), ("energy_uj", 0)):
        (zone / file).write_text(f"{text}\n")

    class Spending(EnergyCounters):
        def __init__(self) -> None:
            super().__init__(tmp_path)

        def total_joules(self) -> float:
            counter = zone / "energy_uj"
            counter.write_text(f"{int(counter.read_text()) + JOULES * 1_000_000}\n")
            return super().total_joules()

    monkeypatch.setattr(model_speed, "EnergyCounters", Spending)
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))


def bench(tmp_path: Path, *arguments: str) -> str:
    write_tiny_gguf(tmp_path / "tiny.gguf")
    words = ("-p", "8", "-n", "4", "-r", str(RUNS), *arguments)
    done = command.run("bench", "run", tmp_path / "tiny.gguf", *words)
    assert done.exit_code == 0, done
    return done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("counters")
def test_watts_and_joules_per_token_are_of_each_phase(tmp_path: Path) -> None:
    """A row of each; the warm-up costs energy too."""
    rows: list[dict[str, Any]] = json.loads(bench(tmp_path, "-o", "json"))
    table = bench(tmp_path)

    assert [(row["n_prompt"], row["n_gen"]) for row in rows] == [(8, 0), (0, 4)]
    for row in rows:
        n_tokens = (row["n_prompt"] + row["n_gen"]) * (RUNS + 1)
        assert row["joules_per_token"] == pytest.approx(JOULES / n_tokens)
    assert "J/token" in table
    assert "W" in table.replace("|", " ").split()

"""A tuning run spends its time where the model does, and tells the change of the whole model."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest

from phasewise.cli.commands.tune_kernels.text import changes_text
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.ledger import Scope
from phasewise.tuner.plans import machine_key
from phasewise.workflows.machine_report.worth import worth_of
from phasewise.workflows.opening.open_model import open_model
from phasewise.workflows.tune_kernels.rounds import LEAST_WORTH, Shape, plan_rounds
from phasewise.workflows.tune_kernels.speed_change import LEAST_PAIRS, keep_changes, measured_change
from tests.support.models.tiny_models import write_tiny_gguf


def test_a_prompt_and_few_and_many_answers_are_timed_in_pairs_whatever_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    opened = open_model(str(path), threads=1, db=str(tmp_path / "none.db"))

    changes = measured_change(opened, opened.schedules, 0.0)

    assert [(change.phase, change.n_sequences) for change in changes] == [
        ("prefill", 1),
        *(("decode", count) for count in (1, 4, 8, 16)),
    ]
    for change in changes:
        assert change.comparison.pairs == LEAST_PAIRS
        assert change.before_tokens_per_s > 0
        assert change.after_tokens_per_s > 0
        assert change.phase == "prefill" or change.n_tokens >= 4
    text = changes_text(changes)
    assert max(map(len, text.splitlines())) <= 80
    assert f"no interval: {LEAST_PAIRS} pairs only" in text
    assert "%" not in text
    for line in ("prefill of ", "decode of 1 sequence: ", "decode of 16 sequences: "):
        assert f"\n  {line}" in text


def test_changes_are_kept_as_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    path, machine = write_tiny_gguf(tmp_path / "tiny.gguf"), read_machine()
    opened = open_model(str(path), threads=1, db=str(tmp_path / "none.db"))
    ticks = count(0.0, 0.1)

    changes = measured_change(opened, opened.schedules, 60.0, clock=lambda: next(ticks))

    assert [change.n_sequences for change in changes] == [1, 1, 4, 8, 16]
    with open_store(tmp_path / "kept.db") as store:
        keep_changes(store, Scope(machine_key(machine), "gemm-x-1", "0.1.0"), machine, opened, changes)
        worth = worth_of(store)
    assert [model.step.sequences for model in worth.models] == [1, 1, 4, 8, 16]
    for change, kept in zip(changes, worth.models, strict=True):
        assert kept.comparison is not None
        assert kept.comparison.pairs == change.comparison.pairs
        assert kept.comparison.gain == pytest.approx(change.comparison.gain, rel=1e-3)
        assert kept.before_tokens_per_s == pytest.approx(change.before_tokens_per_s, rel=1e-2)
    assert not worth.unmeasured


def test_the_budget_goes_where_a_step_spends_its_time() -> None:
    machine = read_machine()
    core = min(os.sched_getaffinity(0))
    shapes = [Shape("int8", 256, 64, uses=8), Shape("int8", 64, 64, uses=8), Shape("int8", 64, 32, uses=1)]
    (tuning_round,) = plan_rounds(machine, {"prefill": (core,), "decode": (core,)}, shapes, 64)

    large, small, rare = tuning_round.worths(lambda problem: float(problem.n * problem.k * problem.m))

    assert large == pytest.approx(4 * small)
    assert rare == pytest.approx(LEAST_WORTH / 3)

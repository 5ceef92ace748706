"""A tuning run spends its time where the model does, and tells the change of the whole model."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cli.commands.tune_kernels.text import changes_text
from phasewise.kerneldb.records import StepTime
from phasewise.kerneldb.store import open_store
from phasewise.topology import read_machine
from phasewise.tuner.ledger import Scope
from phasewise.tuner.plans import machine_key
from phasewise.workflows.opening.open_model import OpenModel, open_model
from phasewise.workflows.tune_kernels.rounds import LEAST_WORTH, Shape, TuningBench, plan_rounds
from phasewise.workflows.tune_kernels.speed_change import keep_changes, measured_change
from tests.support.models.tiny_models import write_tiny_gguf
from tests.support.tiers import examples


class Planted:
    """A clock that turns of a fixed length move; each turn is a little faster than the one before."""

    def __init__(self, turn_s: float) -> None:
        self.now_s = 0.0
        self.turn_s = turn_s
        self.n_turns = 0

    def clock(self) -> float:
        return self.now_s

    def turn(self, *_: object) -> tuple[int]:
        self.now_s += self.turn_s
        self.n_turns += 1
        return (round(self.turn_s * 1e9) - self.n_turns,)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    folder = tmp_path_factory.mktemp("model")
    path = write_tiny_gguf(folder / "tiny.gguf")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASEWISE_CACHE", str(folder / "cache"))
        return open_model(str(path), threads=1, db=str(folder / "none.db"))


@examples(40)
@given(budget_s=st.floats(0, 60), turn_s=st.floats(0.001, 3))
def test_the_whole_model_is_compared_within_what_is_left_of_the_budget(
    opened: OpenModel, budget_s: float, turn_s: float
) -> None:
    """But for a turn that had begun: nothing is timed whatever the budget."""
    planted = Planted(turn_s)
    bench = TuningBench(planted.clock, model_turn=planted.turn)
    changes = measured_change(opened, opened.schedules, budget_s, bench=bench)

    assert planted.now_s <= budget_s + turn_s
    assert len(changes) == 5 or budget_s < 5 * 5 * turn_s, (
        "there was time for two warm-ups and a pair of each"
    )


def test_no_time_is_told(opened: OpenModel) -> None:
    said: list[str] = []

    assert measured_change(opened, opened.schedules, -1.0, said.append) == []
    assert "no time" in said[0]


def test_a_prompt_and_few_and_many_answers_are_timed_in_pairs(opened: OpenModel) -> None:
    ticks = count(0.0, 0.1)

    changes = measured_change(opened, opened.schedules, 20.0, bench=TuningBench(lambda: next(ticks)))

    assert [(change.phase, change.n_sequences) for change in changes] == [
        ("prefill", 1),
        *(("decode", count) for count in (1, 4, 8, 16)),
    ]
    for change in changes:
        assert change.comparison.pairs >= 1
        assert change.before_tokens_per_s > 0
        assert change.after_tokens_per_s > 0
        assert change.phase == "prefill" or change.n_tokens >= 4
    text = changes_text(changes)
    assert max(map(len, text.splitlines())) <= 80
    assert all(change.comparison.gain_low > 0 for change in changes) or "no verdict (" in text
    for line in ("prefill of ", "decode of 1 sequence: ", "decode of 16 sequences: "):
        assert f"\n  {line}" in text


def test_changes_are_kept_as_pairs(opened: OpenModel, tmp_path: Path) -> None:
    machine, ticks = read_machine(), count(0.0, 0.1)

    changes = measured_change(opened, opened.schedules, 60.0, bench=TuningBench(lambda: next(ticks)))

    assert [change.n_sequences for change in changes] == [1, 1, 4, 8, 16]
    with open_store(tmp_path / "kept.db") as store:
        keep_changes(store, Scope(machine_key(machine), "gemm-x-1", "0.1.0"), machine, opened, changes)
        rows = [*store.stream(StepTime)]
    for change in changes:
        sides = [
            row for row in rows if (row.step.phase, row.step.sequences) == (change.phase, change.n_sequences)
        ]
        assert [row.kernels for row in sides] == ["default", "tuned"]
        for row, rate in zip(sides, (change.before_tokens_per_s, change.after_tokens_per_s), strict=True):
            assert len(row.samples_ns) == change.comparison.pairs
            n_tokens = row.step.tokens * row.step.sequences
            assert n_tokens * 1e9 / row.estimate_ns == pytest.approx(rate, rel=1e-2)


def test_the_budget_goes_where_a_step_spends_its_time() -> None:
    machine = read_machine()
    core = min(os.sched_getaffinity(0))
    shapes = [Shape("int8", 256, 64, uses=8), Shape("int8", 64, 64, uses=8), Shape("int8", 64, 32, uses=1)]
    (tuning_round,) = plan_rounds(machine, {"prefill": (core,), "decode": (core,)}, shapes, 64)

    large, small, rare = tuning_round.worths(lambda problem: float(problem.n * problem.k * problem.m))

    assert large == pytest.approx(4 * small)
    assert rare == pytest.approx(LEAST_WORTH / 3)

"""`phasewise tune-kernels`, as people and scripts see it. A formula plays the kernels where time matters."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from phasewise._options import parse_budget
from phasewise._words import LOW_LIMIT
from phasewise.kerneldb.records import Problem, Sample, Schedule
from phasewise.serving.ranks.rank_teams import weighed_team
from phasewise.topology import read_machine
from phasewise.tuner import timing
from phasewise.tuner.machine_limits import Roofline
from phasewise.tuner.plans import Phase
from phasewise.tuner.timing import Duel
from phasewise.workflows.tune_kernels import rounds
from phasewise.workflows.tune_kernels.rounds import Shape, plan_rounds
from tests.cli import command

SMALL = ("--shapes", "160,96;64,32", "--format", "int8", "--max-m", "4")

invoke = partial(command.run, "tune-kernels")
tune = partial(command.text_of, "tune-kernels")
tune_json = partial(command.fields_of, "tune-kernels")


class FormulaEvaluator:
    """Smaller blocks are faster, unless all are alike; counts what it timed."""

    timed = 0
    alike = False
    interrupt_after: int | None = None

    def __init__(self, cores: Sequence[int], total_bytes: int, open_team: object) -> None:
        assert cores
        assert total_bytes >= 64 << 20
        assert open_team is weighed_team

    def prepare(self, problem: Problem, schedules: Sequence[Schedule]) -> None:
        pass

    def measure(self, problem: Problem, schedules: Sequence[Schedule]) -> list[Sample]:
        kind = type(self)
        kind.timed += len(schedules)
        if kind.interrupt_after is not None and kind.timed > kind.interrupt_after:
            raise KeyboardInterrupt
        return [self._sample(problem, schedule) for schedule in schedules]

    def duel(self, problem: Problem, incumbent: Schedule, candidate: Schedule) -> Duel:
        old, new = self._sample(problem, incumbent), self._sample(problem, candidate)
        taken = [(old.samples_ns, new.samples_ns)] * timing.PAIRS
        return Duel(timing.compare(taken), old, new)

    def close(self) -> None:
        pass

    def _sample(self, problem: Problem, schedule: Schedule) -> Sample:
        cost_ns = 10**6 * problem.m + (0 if self.alike else 1000 * (schedule.block_n + schedule.block_k))
        return Sample(schedule, (cost_ns,), cost_ns, 0.0, cost_ns, {"steal": 0.2, "others": 0.05})


@pytest.fixture
def evaluator(monkeypatch: pytest.MonkeyPatch) -> type[FormulaEvaluator]:
    class Evaluator(FormulaEvaluator):
        pass

    def roofline(cores: Sequence[int], formats: Sequence[str], read_bytes: int) -> Roofline:
        return Roofline({"f32": 1e11, "bf16": 1e11, "int8": 1e12}, 1e10)

    monkeypatch.setattr(rounds, "NativeEvaluator", Evaluator)
    monkeypatch.setattr(rounds, "measure_roofline", roofline)
    return Evaluator


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_budgets_are_times(text: str, seconds: float) -> None:
    assert parse_budget(text) == seconds


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--budget", "soon", *SMALL), "90s, 10m or 1h"),
        (("--budget", "0", *SMALL), "90s, 10m or 1h"),
        ((), "either a MODEL or --shapes"),
        (("model.gguf", *SMALL), "either a MODEL or --shapes"),
        (("--shapes", "160,96"), "--format"),
        (("--shapes", "160x96", "--format", "int8"), "3072,576"),
        (("--shapes", "0,96", "--format", "int8"), "3072,576"),
        (("model.gguf", "--format", "int5"), "one of"),
    ],
)
def test_wrong_usage_is_exit_code_two_and_creates_nothing(
    db: Path, arguments: tuple[str, ...], reason: str
) -> None:
    assert reason in invoke(*arguments).usage_error
    assert not db.exists()


def test_a_phase_chooses_the_rows_and_the_head_has_few() -> None:
    """However many a prompt has; alike weights are one."""
    machine, cores = read_machine(), (min(os.sched_getaffinity(0)),)
    shapes = [Shape("int8", 64, 64, uses=2), Shape("int8", 96, 64, uses=1, most_rows=64)]

    def most_rows(*phases: Phase) -> list[int]:
        (tuned_round,) = plan_rounds(machine, dict.fromkeys(phases, cores), shapes, 200)
        return [task.ms[-1] for task in tuned_round.tasks]

    assert most_rows("decode") == [64, 64]
    assert most_rows("prefill") == most_rows("prefill", "decode") == [200, 64]


@pytest.mark.slow
def test_the_tables_fit_eighty_columns_and_hold_every_product(
    db: Path, evaluator: type[FormulaEvaluator]
) -> None:
    """The largest sizes, and the remark about a busy machine."""
    text = tune("--shapes", "128256,4096;64,32", "--format", "int8", "--max-m", "20")

    assert max(map(len, text.splitlines())) <= 80
    assert "int8 128256x4096" in text
    assert "The machine was busy: 20% went to other guests, 5% to" in text
    assert re.search(r"Faster than by default: \d+ of \d+ products; geometric mean of all", text)
    assert sum(line.split()[:1] == ["20"] for line in text.splitlines()) == 2


def test_json_holds_what_was_gained_and_a_second_run_times_nothing(
    db: Path, evaluator: type[FormulaEvaluator]
) -> None:
    first, second = tune_json(*SMALL), tune_json(*SMALL)
    first_round = first["rounds"][0]

    assert first_round["end"] == "complete"
    assert first_round["timed"] == evaluator.timed > 0
    assert (second["rounds"][0]["timed"], second["rounds"][0]["duels"]) == (0, 0)
    assert second["rounds"][0]["gains"] == first_round["gains"]
    assert len(first_round["gains"]) == first_round["products"] == 8
    for gain in first_round["gains"]:
        assert gain["gain_low"] <= gain["gain"] <= gain["gain_high"]
        assert gain["is_default"] or gain["last_duel"]["gain_low"] > 1
        bound_ns = max(
            2 * gain["m"] * gain["n"] * gain["k"] / 1e12, (gain["roofline_fraction"] * gain["tuned_ns"]) / 1e9
        )
        assert 0 < bound_ns * 1e9 == pytest.approx(gain["roofline_fraction"] * gain["tuned_ns"])


def test_a_limit_that_was_measured_too_low_gives_no_share(
    db: Path, evaluator: type[FormulaEvaluator], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine's limit is a hundred times too low: no product reached 434 % of it."""
    monkeypatch.setattr(
        rounds, "measure_roofline", lambda *arguments: Roofline({"f32": 1e4, "bf16": 1e4, "int8": 1e4}, 1e4)
    )
    text, fields = tune(*SMALL), tune_json(*SMALL)

    assert {gain["roofline_fraction"] for gain in fields["rounds"][0]["gains"]} == {None}
    assert LOW_LIMIT in text.splitlines()
    assert not re.search(r"[0-9]{3,}%", text)


def test_nothing_gained_is_said_plainly(db: Path, evaluator: type[FormulaEvaluator]) -> None:
    evaluator.alike = True

    assert "Tuning gained nothing: of 8 products, none was proven faster" in tune(*SMALL)


def test_interrupted_it_ends_with_130_and_the_next_run_goes_on(
    db: Path, evaluator: type[FormulaEvaluator]
) -> None:
    evaluator.interrupt_after = 40
    result = invoke(*SMALL)
    evaluator.interrupt_after, timed = None, evaluator.timed
    rest = tune_json(*SMALL)["rounds"][0]

    assert result.exit_code == 130
    assert "Interrupted:" in result.stdout
    assert "goes on from here" in result.stdout
    assert rest["end"] == "complete"
    assert rest["replayed"] >= timed - 20


def test_interrupted_without_resuming_it_says_how_to_go_on(
    db: Path, evaluator: type[FormulaEvaluator]
) -> None:
    """The same command would begin anew, and the one without the option has what was timed."""
    evaluator.interrupt_after = 40
    result = invoke(*SMALL, "--no-resume")
    evaluator.interrupt_after, timed = None, evaluator.timed

    assert "Without --no-resume the command goes on from here" in result.stdout
    assert "The same command" not in result.stdout
    assert tune_json(*SMALL)["rounds"][0]["replayed"] >= timed - 20


def test_not_resuming_times_everything_anew(db: Path, evaluator: type[FormulaEvaluator]) -> None:
    first = tune_json(*SMALL)["rounds"][0]
    again = tune_json(*SMALL, "--no-resume")["rounds"][0]

    assert again["timed"] > 0.5 * first["timed"]


@pytest.mark.slow
def test_on_the_real_kernels_ctrl_c_keeps_what_was_learned(db: Path) -> None:
    """And the interrupted command says so in one line, without a traceback."""
    small = ("--shapes", "64,64", "--format", "f32", "--max-m", 64)
    process = command.start("tune-kernels", *small, "--budget", "60s")
    assert process.stderr is not None
    assert "limits" in process.stderr.readline()
    assert " timed in " in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)

    assert process.returncode == 130, err
    assert "The same command goes on from here." in out
    assert err.splitlines()[-1] == "phasewise: interrupted"
    assert "Traceback" not in err


def test_an_unknown_kernel_format_is_one_line_and_exit_code_one(db: Path) -> None:
    assert invoke("--shapes", "64,64", "--format", "int5").refusal == (
        "phasewise: there are no kernels for weights of format 'int5', "
        "only f32, bf16, f16, int8, int8m, int8g16, int8c, int4, int4m, "
        "q2_k, q3_k, q4_k, q5_k, q6_k, iq4_xs, iq4_nl, mxfp4, nvfp4, fp8, q5_0, q5_1"
    )

"""Plans for loads: a band for each further number of sequences, beside the plan for fewer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from phasewise.kerneldb.records import PlanRecord
from phasewise.kerneldb.store import Store, open_store
from phasewise.topology import Machine
from phasewise.tuner.config.modelled import ModelledEvaluator
from phasewise.tuner.config.references import FEWER, PER_NODE
from phasewise.tuner.config.simulate import Objective
from phasewise.tuner.config.trace import RequestLengths
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.plans import RankCores, ServicePlan, machine_key, nodes_of, plans_for, rank_on
from phasewise.tuner.topotree import OperatorLimits
from phasewise.workflows.errors import UsageError
from phasewise.workflows.tune_config import loads
from phasewise.workflows.tune_config.loads import tune_loads
from phasewise.workflows.tune_config.run import Found, Run, judge, judge_again, plan_to_keep
from phasewise.workflows.tune_config.settings import TuneConfigSettings
from phasewise.workflows.tune_config.subject import Subject
from phasewise.workflows.tune_config.verdict import habits_of
from tests.support.machines import paper_machines, planted
from tests.workflows.test_tune_config_run import CountingJury, QuietShow, a_run, searched

BUDGET_S = 600.0


class Heard(QuietShow):
    """Notes what stays."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        super().__init__(self.lines.append)

    def searching(self, phase: str) -> Callable[[object], None]:  # type: ignore[override]
        return lambda event: None


def subject_on(machine: Machine) -> Subject:
    shape = paper_machines.llama_2_7b()
    return Subject(
        machine=machine,
        key=machine_key(machine),
        shape=shape,
        model_key="llama@int8",
        limits=OperatorLimits(shape.n_heads, shape.n_kv_heads, shape.head_dim, shape.ffn),
        ranks=None,
        trace=(RequestLengths(512, 2),),
        objective=Objective("tpot"),
    )


def wish_for(*bands: int, budget_s: float = BUDGET_S, phase: str = "decode") -> TuneConfigSettings:
    return TuneConfigSettings(
        model="llama",
        weight_format="int8",
        phase=phase,
        objective="tpot",
        concurrency=(1, *bands),
        budget_s=budget_s,
        evaluator="modelled",
        hidden=Path("x"),
    )


@pytest.fixture
def saturated(monkeypatch: pytest.MonkeyPatch) -> planted.Planted:
    """The machine whose L3s twelve cores saturate, and the words of `--hidden` about it."""
    case = planted.saturated()
    opened = ModelledEvaluator.__init__

    def with_its_rates(self: Any, machine: Machine, shape: Any, rates: Any = None, hidden: Any = ()) -> None:
        opened(self, machine, shape, case.rates, hidden)

    monkeypatch.setattr(ModelledEvaluator, "__init__", with_its_rates)
    monkeypatch.setattr("phasewise.tuner.config.sharing.read_hidden", lambda *_: case.hidden)
    monkeypatch.setattr("phasewise.workflows.tune_config.subject._answers_digest", lambda *_: "planted")
    return case


@pytest.mark.slow
def test_each_load_gets_the_cores_that_were_planted_for_it(saturated: planted.Planted) -> None:
    """More sequences more cores, in ranks on the nodes of the first plan's."""
    show = Heard()
    told = tune_loads(
        wish_for(8, 32), subject_on(saturated.machine), time.monotonic(), show, MeasurementLock()
    )

    plan = told.bands[-1].decode_plan
    assert plan is not None
    assert [band.sequences for band in told.bands] == [8, 32]
    assert plan.starts == (8, 32)
    sizes = [len(own.cores) for own in plan.each]
    assert sizes[0] < sizes[1] < sizes[2]
    assert len({nodes_of(own.ranks) for own in plan.each}) == 1
    assert told.end == "complete"
    assert [line.split(",")[0] for line in show.lines] == [
        "decode of 8 sequences at once",
        "decode of 32 sequences at once",
    ]
    oracle = planted.step_cost(saturated.evaluator(), "decode", 32)
    assert told.bands[1].verdicts["decode"].latency_ms <= 1.01 * min(
        oracle(saturated.space.configuration(partition)) for partition in saturated.space.partitions()
    )


def test_a_band_has_to_beat_the_cores_for_fewer(saturated: planted.Planted) -> None:
    """They are among what it is held against; where they are best there is no band."""
    told = tune_loads(
        wish_for(2), subject_on(saturated.machine), time.monotonic(), Heard(), MeasurementLock()
    )

    (band,) = told.bands
    assert band.subject.below == told.decode_plan
    names = [versus.reference.name for versus in band.verdicts["decode"].against]
    assert names[-1] == FEWER
    below, plan = told.decode_plan, band.decode_plan
    assert below is not None
    assert plan is not None
    if plan.bands:
        assert band.verdicts["decode"].standing != "reference"
    else:
        assert plan == below


def test_a_hidden_resource_that_nothing_saturates_leaves_one_plan_for_all() -> None:
    """All cores are best for every load."""
    machine = paper_machines.xeon()
    wish = replace(wish_for(8, 32), hidden=None)

    told = tune_loads(wish, subject_on(machine), time.monotonic(), Heard(), MeasurementLock())

    plans = [told.decode_plan, *(band.decode_plan for band in told.bands)]
    assert plans[0] is not None
    assert [len(plan.cores) for plan in plans if plan] == [len(plans[0].cores)] * 3


def test_references_with_other_ranks_or_nodes_are_left_out_of_a_band() -> None:
    machine = paper_machines.xeon()
    subject = replace(subject_on(machine), below=ServicePlan("decode", (rank_on(machine, (0, 1)),)))

    habits = {habit.name: habit for habit in habits_of(subject, "decode")}

    assert habits[PER_NODE].plan is None
    assert habits[PER_NODE].reason == "its ranks, or their NUMA nodes, are others than for fewer sequences"
    assert habits[FEWER].plan == subject.below


@pytest.mark.parametrize(
    ("has_plan", "shares", "end"),
    [(True, [200, 200, 400], "complete"), (False, [200], "complete")],
    ids=["plan", "no plan"],
)
def test_the_budget_is_divided_and_its_end_is_told(
    monkeypatch: pytest.MonkeyPatch, has_plan: bool, shares: list[float], end: str
) -> None:
    """Two phases and two bands: half for the phases, then what is left by halves; no plan, no bands."""
    budgets, machine = list[float](), paper_machines.xeon()
    plan = ServicePlan("decode", (rank_on(machine, (0, 1)),))

    def tune(wish: TuneConfigSettings, subject: Subject, started_s: float, *_: Any) -> Found:
        budgets.append(wish.budget_s)
        empty = replace(subject, below=plan if has_plan else None)
        return Found(wish, empty, elapsed_s=1.0)

    monkeypatch.setattr(loads, "tune", tune)
    wish = wish_for(8, 32, budget_s=400.0, phase="both")
    told = tune_loads(wish, subject_on(machine), time.monotonic(), Heard(), MeasurementLock())

    assert budgets == [pytest.approx(share, abs=5) for share in shares]
    assert told.end == end


@pytest.mark.parametrize(
    ("interrupted_at", "late_s", "expected"),
    [(2, 0.0, (2, "interrupted", 1)), (None, 2 * BUDGET_S, (1, "budget", 0))],
    ids=["interrupted", "no budget is left"],
)
def test_a_run_that_has_ended_has_no_further_bands(
    monkeypatch: pytest.MonkeyPatch, interrupted_at: int | None, late_s: float, expected: tuple[int, str, int]
) -> None:
    machine = paper_machines.xeon()
    plan, n_runs = ServicePlan("decode", (rank_on(machine, (0, 1)),)), 0

    def tune(wish: TuneConfigSettings, subject: Subject, started_s: float, *_: Any) -> Found:
        nonlocal n_runs
        n_runs += 1
        end: Any = "interrupted" if n_runs == interrupted_at else "complete"
        return Found(wish, replace(subject, below=plan), end=end, elapsed_s=1.0)

    monkeypatch.setattr(loads, "tune", tune)
    began_s = time.monotonic() - late_s
    told = tune_loads(wish_for(8, 32), subject_on(machine), began_s, Heard(), MeasurementLock())

    assert (n_runs, told.end, len(told.bands)) == expected


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with open_store(tmp_path / "tuning.db") as opened:
        yield opened


def kept(store: Store, run: Run, phase: Any = "decode") -> None:
    """As the last run of a phase ends."""
    search = replace(searched(), phase=phase)
    judge(run, search, CountingJury(has_time=False), run.deadline_s())
    judge_again(run, search, CountingJury(has_time=True), store)


def test_a_band_is_stored_with_the_plan_below_it_and_its_figures(store: Store, tmp_path: Path) -> None:
    """The search of `searched` has two cores of node 0 for a winner."""
    run, machine = a_run(time.monotonic()), paper_machines.xeon()
    below = ServicePlan("decode", (RankCores((0, 1, 2), 0),))
    objective = Objective("e2e", concurrency=8)
    run.subject = replace(
        run.subject, below=below, objective=objective, objectives_below={"e2e_ms": 7.0}, whole=machine
    )

    kept(store, run)

    (record,) = store.rows(PlanRecord)
    assert record.objectives == {"e2e_ms": 7.0, "e2e_8_ms": 2.0}
    plan = plans_for(tmp_path / "tuning.db", machine, "toy@f32")["decode"]
    assert [own.cores for own in plan.each] == [(0, 1, 2), (0, 1)]
    assert plan.starts == (8,)


def test_a_plan_found_on_some_cores_is_found_again_on_all(store: Store, tmp_path: Path) -> None:
    """Its places are those of the whole machine, under whose key it is kept."""
    run, machine = a_run(time.monotonic()), paper_machines.xeon()
    few = replace(machine, allowed_pus=machine.allowed_pus[:4])
    run.subject = replace(run.subject, machine=few, whole=machine)

    kept(store, run)

    assert plans_for(tmp_path / "tuning.db", machine, "toy@f32")["decode"].cores == (0, 1)


def test_without_a_verdict_the_plan_below_stays() -> None:
    subject = subject_on(paper_machines.xeon())
    below = ServicePlan("decode", (RankCores((0,), 0),))

    assert plan_to_keep(subject, None) is None
    assert plan_to_keep(replace(subject, below=below), None) is below


@pytest.mark.parametrize(
    ("numbers", "phase", "says"),
    [
        ((8, 1), "both", "--concurrency 8,1: each number must be more than the one before"),
        ((8, 8), "both", "each number must be more"),
        ((0,), "both", "numbers from 1 to 4096"),
        ((1, 4097), "both", "numbers from 1 to 4096"),
        ((1, 2, 3, 4, 5), "both", "takes 1 to 4 numbers, not 5"),
        ((1, 8), "prefill", "bands are decode's, leave --phase prefill out"),
    ],
)
def test_numbers_that_are_no_bands_are_refused(numbers: tuple[int, ...], phase: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        TuneConfigSettings(concurrency=numbers, phase=phase).check()


def test_the_first_number_is_the_plan_s_and_others_are_bands() -> None:
    wish = TuneConfigSettings(concurrency=(4, 16, 64))
    wish.check()

    assert (wish.goal.concurrency, wish.bands) == (4, (16, 64))

"""A search kept as a study: what any process timed is not timed again, even after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import optuna
import pytest

from phasewise.kerneldb.location import locate
from phasewise.kerneldb.store import open_store
from phasewise.tuner.config.steps import EvaluatorKind
from phasewise.tuner.config.storage import open_storage
from phasewise.tuner.config.study import SearchOutcome, SearchSettings, Tried
from phasewise.tuner.topotree import Configuration
from tests.support import ROOT
from tests.support.ablation import walked
from tests.support.machines import search_child
from tests.support.machines.search_child import KEY, N_SLICES, UNPRUNED, FakeEvaluator, run_on, small_space

KINDS = ["measured", "modelled"]
"""A trial that takes time is stored as running; one that is calculated, when it is finished."""


@pytest.fixture
def database(tmp_path: Path) -> str:
    return str(tmp_path / "tuning.db")


def trials_of(database: str) -> list[optuna.trial.FrozenTrial]:
    study = optuna.load_study(study_name=KEY.name, storage=open_storage(locate(database)))
    return study.get_trials(deepcopy=False)


def _assert_each_evaluated_once(trials: Sequence[optuna.trial.FrozenTrial]) -> None:
    keys = [
        trial.user_attrs["configuration"] for trial in trials if trial.state.name in ("COMPLETE", "PRUNED")
    ]
    assert len(keys) == len(set(keys))


def into(events: list[Tried]) -> Callable[[object], None]:
    """A report that keeps what was tried."""
    return lambda event: events.append(event) if isinstance(event, Tried) else None


def start_child(database: str, pause_s: float, kind: str = "measured") -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, search_child.__file__, database, str(pause_s), kind]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def outcome_of(child: subprocess.Popen[str]) -> tuple[list[str], dict[str, object]]:
    """The configurations that a child evaluated, and how it ended."""
    output, errors = child.communicate(timeout=120)
    assert child.returncode == 0, errors
    assert errors == ""
    *keys, summary = output.splitlines()
    return keys, json.loads(summary)


@cache
def unpruned() -> SearchOutcome:
    """Of a search that nobody interrupts or shares."""
    return run_on(":memory:", FakeEvaluator(), UNPRUNED)


@pytest.mark.parametrize("kept", [True, False], ids=["file", "memory"])
def test_a_study_finds_what_the_walk_finds(kept: bool, database: str) -> None:
    evaluator = FakeEvaluator()
    outcome = run_on(database if kept else ":memory:", evaluator, UNPRUNED)

    def cost_ms(configuration: Configuration) -> float:
        return search_child.scattered(configuration) * (1 + 2 + 3) / 3 / 1e6

    expected = walked(small_space(), cost_ms, UNPRUNED.rules)
    assert outcome.best is not None
    assert outcome.best[0].key == expected.best.key
    assert outcome.best[1] == pytest.approx(expected.best_ms)
    assert [configuration.key for configuration, _ in outcome.top] == [
        configuration.key for configuration in expected.top(10)
    ]
    assert outcome.tried == outcome.evaluations == expected.evaluations == len(evaluator.opened)


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS)
def test_a_second_run_evaluates_nothing(database: str, kind: EvaluatorKind) -> None:
    first = run_on(database, FakeEvaluator(kind=kind))
    evaluator = FakeEvaluator(kind=kind)
    second = run_on(database, evaluator)

    assert evaluator.opened == []
    assert (second.best, second.top, second.tried) == (first.best, first.top, first.tried)
    assert second.replayed == first.evaluations


@pytest.mark.slow
def test_without_resume_a_study_begins_beside_the_old_one(database: str) -> None:
    first = run_on(database, FakeEvaluator())
    second = run_on(database, FakeEvaluator(), SearchSettings(resume=False))
    third = run_on(database, FakeEvaluator())

    assert second.evaluations == first.evaluations
    assert third.evaluations == 0


def test_what_the_caller_stops_goes_on_where_it_was(database: str) -> None:
    events: list[Tried] = []
    first = run_on(database, FakeEvaluator(), stop=lambda: len(events) >= 5, report=into(events))
    second = run_on(database, FakeEvaluator())
    whole = run_on(":memory:", FakeEvaluator())

    assert first.end == "budget"
    assert first.tried == 5
    assert first.best is not None
    assert second.end == "complete"
    assert second.evaluations == whole.evaluations - 5
    assert second.best == whole.best


def test_ctrl_c_returns_the_best_so_far_and_the_trial_is_taken_up_again(database: str) -> None:
    evaluator = FakeEvaluator()

    def interrupt(configuration: Configuration) -> None:
        if len(evaluator.opened) == 4:
            raise KeyboardInterrupt

    evaluator.happens = interrupt
    first = run_on(database, evaluator)
    resumed = FakeEvaluator()
    second = run_on(database, resumed)

    assert first.end == "interrupted"
    assert first.tried == 3
    assert first.best is not None
    assert evaluator.opened[3] in resumed.opened
    assert second.best == run_on(":memory:", FakeEvaluator()).best


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS)
def test_a_configuration_that_cannot_run_is_reported_and_passed_over(
    database: str, kind: EvaluatorKind
) -> None:
    events: list[Tried] = []
    evaluator = FakeEvaluator(refuses=lambda configuration: len(configuration.ranks) > 1, kind=kind)
    outcome = run_on(database, evaluator, report=into(events))
    failures = [event for event in events if event.state == "failed"]

    assert outcome.best is not None
    assert len(outcome.best[0].ranks) == 1
    assert outcome.failed == len(failures) > 0
    assert {event.reason for event in failures} == {"no room here: make some"}
    assert all(len(configuration.ranks) == 1 for configuration, _ in outcome.top)


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS)
def test_failures_of_an_older_run_are_tried_again(database: str, kind: EvaluatorKind) -> None:
    run_on(database, FakeEvaluator(refuses=lambda configuration: True, kind=kind))
    second = run_on(database, FakeEvaluator(kind=kind), UNPRUNED)

    assert second.failed == 0
    assert second.best is not None
    assert second.best == run_on(":memory:", FakeEvaluator(), UNPRUNED).best


@pytest.mark.many
@pytest.mark.parametrize("kind", KINDS)
def test_hopeless_configurations_are_not_timed_to_the_end(database: str, kind: EvaluatorKind) -> None:
    evaluator = FakeEvaluator(kind=kind)
    outcome = run_on(database, evaluator)
    steps_of = {key: len([1 for timed, _ in evaluator.steps if timed == key]) for key in evaluator.opened}
    pruned = [trial for trial in trials_of(database) if trial.state.name == "PRUNED"]

    assert outcome.pruned == len(pruned) > 0
    assert all(steps_of[trial.user_attrs["configuration"]] < N_SLICES for trial in pruned)
    assert not {trial.user_attrs["configuration"] for trial in pruned} & {
        configuration.key for configuration, _ in outcome.top
    }


def test_the_cost_of_a_pruned_one_is_comparable(database: str) -> None:
    """Its slices were the cheap ones; it must not look better for that."""
    events: list[Tried] = []
    run_on(database, FakeEvaluator(), report=into(events))

    assert {event.state for event in events} == {"complete", "pruned"}
    for event in events:
        whole_ms = search_child.scattered(event.candidate.configuration) * (1 + 2 + 3) / 3 / 1e6
        assert event.cost_ms == pytest.approx(whole_ms)


def test_the_tuning_database_works_as_before_beside_a_study(database: str) -> None:
    with open_store(database) as store:
        before = store.stats()
    run_on(database, FakeEvaluator())

    with open_store(database) as store:
        after = store.stats()
        removed = store.delete_builds([], dry_run=False)
    assert (after.revision, after.rows) == (before.revision, before.rows)
    assert sum(removed.values()) == 0
    assert run_on(database, FakeEvaluator()).evaluations == 0


@pytest.mark.slow
def test_a_search_that_is_killed_loses_one_evaluation_at_most(database: str) -> None:
    child = start_child(database, 0.15)
    assert child.stdout is not None
    seen = [child.stdout.readline().strip() for _ in range(5)]
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=60)

    evaluator = FakeEvaluator()
    outcome = run_on(database, evaluator, UNPRUNED)

    assert outcome.best == unpruned().best
    assert not set(evaluator.opened) & set(seen[:-1])
    assert outcome.evaluations <= unpruned().evaluations - 4
    assert not [trial for trial in trials_of(database) if not trial.state.is_finished()]
    _assert_each_evaluated_once(trials_of(database))


@pytest.mark.slow
def test_two_processes_divide_a_study(database: str) -> None:
    """As two machines do that share a database."""
    children = [start_child(database, 0.1) for _ in range(2)]
    (evaluated, first), (other, second) = map(outcome_of, children)

    whole = unpruned()
    assert whole.best is not None
    assert first["best"] == second["best"] == whole.best[0].key
    assert evaluated
    assert other
    assert not set(evaluated) & set(other)
    assert len(evaluated) + len(other) == whole.tried
    _assert_each_evaluated_once(trials_of(database))


def test_optuna_is_loaded_by_a_search_alone() -> None:
    """It takes a quarter of a second, which no other command should pay."""
    script = "import sys, phasewise.tuner.config.study; sys.exit('optuna' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0

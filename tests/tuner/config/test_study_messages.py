"""A process hears what another one with the same study says of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from phasewise.kerneldb.location import Location, locate
from phasewise.tuner.config.storage import StudyMessages
from tests.support.machines.search_child import FakeEvaluator, run_on

FIELDS = {"plan": [1, 2], "reason": None}


@pytest.fixture
def database(tmp_path: Path) -> Location:
    return locate(tmp_path / "tuning.db")


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.mark.slow
def test_what_is_said_is_heard_by_others_and_the_last_word_counts(database: Location) -> None:
    began_ms = now_ms()
    study = run_on(database.name, FakeEvaluator()).study
    assert StudyMessages(database, study).hear("verdict", began_ms) is None

    StudyMessages(database, study).say("verdict", {"plan": []})
    StudyMessages(database, study).say("verdict", FIELDS)
    heard = StudyMessages(database, study).hear("verdict", began_ms)

    assert heard is not None
    assert FIELDS.items() <= heard.items()
    assert StudyMessages(database, study).hear("another", began_ms) is None


def test_what_was_said_before_is_not_heard(database: Location) -> None:
    study = run_on(database.name, FakeEvaluator()).study
    StudyMessages(database, study).say("verdict", FIELDS)

    assert StudyMessages(database, study).hear("verdict", now_ms() + 1) is None


def test_a_study_goes_on_after_words(database: Location) -> None:
    first = run_on(database.name, FakeEvaluator())
    StudyMessages(database, first.study).say("verdict", FIELDS)

    assert run_on(database.name, FakeEvaluator()).evaluations == 0


def test_in_memory_nobody_hears() -> None:
    words = StudyMessages(locate(":memory:"), "toy")
    words.say("verdict", FIELDS)

    assert words.hear("verdict", 0) is None

"""The plan of every query that a start, a tuning run or a listing makes: own rows are found by an index."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event

from phasewise.kerneldb.records import Measurement, Promotion, StepTime, StorageDuel, UserTiming
from phasewise.kerneldb.store import Store, open_store
from phasewise.kerneldb.upkeep import standings
from tests.support.machines.grown_database import Fleet, build_of, fill, machine_of
from tests.support.machines.kerneldb_examples import PLAN, PROBLEM, STEP_TIME, USER_PROBLEM

SMALL = Fleet(cores=3, problems=4, timings=5)
OWN, ABI = machine_of(1), build_of(1)
LARGE = ("measurement", "promotion", "storage_duel", "service_plan", "step_time", "user_kernel_timing")
"""Tables that grow with the fleet."""

OF_OWN_ROWS: dict[str, Callable[[Store], Any]] = {
    "plan of a start": lambda store: store.newest_plan(OWN, PLAN.model_key, "decode"),
    "schedules of a start": lambda store: store.promoted_measurements(OWN),
    "storages of a start": lambda store: store.rows(StorageDuel, machine=OWN, kernel_abi=ABI, verified=True),
    "step times of a start": lambda store: store.rows(
        StepTime, machine=OWN, model_key=STEP_TIME.model_key, phase="decode"
    ),
    "one schedule in use": lambda store: store.promoted_measurement(PROBLEM, OWN, ABI),
    "the best of a key": lambda store: store.best_measurement(PROBLEM, OWN, ABI),
    "timings of a key": lambda store: store.measurements(PROBLEM, OWN, ABI),
    "timings of a weight": lambda store: store.measurements_of_every_m(PROBLEM, OWN, ABI),
    "timings of a machine": lambda store: [*store.stream(Measurement, machine=OWN)],
    "count of a key": lambda store: store.measurement_count(PROBLEM, OWN, ABI),
    "count of a machine": lambda store: store.key_counts(machine=OWN),
    "count of a core": lambda store: store.key_counts(core_sig=OWN.core_sig),
    "beginning of a weight": lambda store: store.begun_ms([PROBLEM], OWN, ABI),
    "promotions of a key": lambda store: store.rows(Promotion, problem=PROBLEM, machine=OWN, kernel_abi=ABI),
    "timings of a user's kernel": lambda store: store.rows(
        UserTiming, problem=USER_PROBLEM, core_sig=OWN.core_sig, verified=True
    ),
    "losers of a machine": lambda store: store.summarise_losers(1, OWN, dry_run=True),
}
"""Questions about one machine, or one key of it."""

OF_ALL: dict[str, Callable[[Store], Any]] = {
    "db stats": lambda store: store.stats(),
    "db show": standings,
    "count of keys": lambda store: store.key_counts(),
}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "fleet.db") as opened:
        fill(opened, SMALL)
        yield opened


def plans_of(store: Store, question: Callable[[Store], Any]) -> list[str]:
    """The lines of EXPLAIN QUERY PLAN of every statement that a question makes."""
    statements: list[tuple[str, Any]] = []

    def note(_connection: Any, _cursor: Any, statement: str, parameters: Any, *_: Any) -> None:
        if statement.lstrip().upper().startswith(("SELECT", "WITH")):
            statements.append((statement, parameters))

    event.listen(store._engine, "before_cursor_execute", note)
    question(store)
    event.remove(store._engine, "before_cursor_execute", note)
    assert statements
    with store._engine.connect() as connection:
        return [
            str(row[3])
            for statement, parameters in statements
            for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters)
        ]


def scanned(lines: list[str]) -> list[str]:
    """The lines that read a large table whole."""
    return [line for line in lines if re.match(rf"SCAN ({'|'.join(LARGE)})(_[0-9]+)?\b", line)]


@pytest.mark.parametrize("name", OF_OWN_ROWS)
def test_own_rows_are_searched_by_an_index(store: Store, name: str) -> None:
    lines = plans_of(store, OF_OWN_ROWS[name])

    assert scanned(lines) == []
    assert not any("ix_measurement_schedule" in line for line in lines), (
        "every kind of machine has its schedules"
    )
    assert any(re.match(r"SEARCH .* USING .*INDEX", line) for line in lines)


@pytest.mark.parametrize("name", OF_ALL)
def test_what_counts_all_reads_an_index_and_no_row(store: Store, name: str) -> None:
    """Timings are the table that grows; a listing of all reads their narrowest covering index."""
    lines = plans_of(store, OF_ALL[name])

    assert all("COVERING INDEX" in line for line in scanned(lines) if line.startswith("SCAN measurement"))
    assert not any("TEMP B-TREE" in line for line in plans_of(store, lambda store: store.key_counts()))


def test_a_scan_would_be_noticed(store: Store) -> None:
    """The same reading of plans, of a question that reads every row."""
    assert scanned(plans_of(store, lambda store: [*store.stream(Measurement)]))

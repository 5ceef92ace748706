"""A start reads the database where it can, else what it read last; every query finds its rows by an index."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import event

from phasewise.kerneldb import start_reads
from phasewise.kerneldb.errors import DatabaseNameError
from phasewise.kerneldb.records import Measurement, Promotion, StepTime, StorageDuel, UserTiming
from phasewise.kerneldb.start_reads import StartReads, n_without_database, open_start_reads
from phasewise.kerneldb.store import Store, open_store
from phasewise.kerneldb.upkeep import standings
from tests.kerneldb.test_schema import FIXTURES
from tests.support.machines.grown_database import Fleet, build_of, fill, machine_of
from tests.support.machines.kerneldb_examples import (
    MACHINE,
    MEASUREMENT,
    PLAN,
    PROBLEM,
    PROMOTION,
    STEP_TIME,
    STORAGE_DUEL,
    USER_PROBLEM,
)
from tests.support.machines.kerneldb_server import new_database_url, postgres_socket
from tests.support.tiers import examples

DUEL_ABI = STORAGE_DUEL.kernel_abi
IMPORTED = replace(STEP_TIME, origin=replace(STEP_TIME.origin, verified=False))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(start_reads, "_missed_s", {})


def _fill(db: str | Path) -> None:
    with open_store(db) as store:
        store.add([PLAN, MEASUREMENT, PROMOTION, STORAGE_DUEL, STEP_TIME, IMPORTED])


def _all_of(reads: StartReads) -> tuple[object, ...]:
    return (
        reads.newest_plan(PLAN.origin.machine, PLAN.model_key, PLAN.phase),
        reads.promoted_measurements(MACHINE),
        reads.rows(StorageDuel, machine=STORAGE_DUEL.origin.machine, kernel_abi=DUEL_ABI, verified=True),
        reads.rows(
            StepTime,
            machine=STEP_TIME.origin.machine,
            model_key=STEP_TIME.model_key,
            phase=STEP_TIME.step.phase,
        ),
    )


NOTHING = (None, [], [], [])


def _read(db: str | Path, said: list[str]) -> tuple[object, ...]:
    with open_start_reads(db, said.append) as reads:
        return _all_of(reads)


def _garbage(file: Path) -> None:
    file.write_bytes(b"no database at all" * 100)


def _of_a_future_program(file: Path) -> None:
    import sqlite3

    with sqlite3.connect(file) as raw:
        raw.execute("UPDATE phasewise_schema SET version_num = '9999'")
    raw.close()


SPOILS: dict[str, Callable[[Path], object]] = {
    "garbage": _garbage,
    "torn": lambda file: file.write_bytes(file.read_bytes()[:5000]),
    "a directory": lambda file: (file.unlink(), file.mkdir()),
    "a pipe": lambda file: (file.unlink(), os.mkfifo(file)),
    "a pipe for a journal": lambda file: os.mkfifo(f"{file}-journal"),
    "a pipe for a log": lambda file: os.mkfifo(f"{file}-wal"),
    "a pipe for a log's index": lambda file: os.mkfifo(f"{file}-shm"),
    "of a future program": _of_a_future_program,
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_a_file_that_cannot_be_read_costs_a_line_and_the_last_reads_hold(spoil: str, tmp_path: Path) -> None:
    db, other, said = tmp_path / "x.db", tmp_path / "other.db", list[str]()
    for file in (db, other):
        _fill(file)
    wanted = _read(db, said)
    assert wanted != NOTHING
    assert said == []
    for file in (db, other):
        SPOILS[spoil](file)
    before = n_without_database()

    assert _read(db, said) == wanted
    assert _read(db, said) == wanted  # and it is not waited for again
    assert len(said) == 1
    assert "what was last read of it here" in said[0]
    assert n_without_database() == before + 1
    assert _read(other, said) == NOTHING
    assert len(said) == 2
    assert "default plans and schedules" in said[1]
    assert all("\n" not in line for line in said)


def test_a_server_that_is_stopped_between_two_starts_or_within_one(tmp_path: Path) -> None:
    said: list[str] = []
    with ExitStack() as server:
        url = new_database_url(server.enter_context(postgres_socket()))
        _fill(url)
        wanted = _read(url, said)
        with open_start_reads(url, said.append) as reads:
            plan = reads.newest_plan(PLAN.origin.machine, PLAN.model_key, PLAN.phase)
            assert said == []
            server.close()
            assert (plan, *_all_of(reads)[1:]) == wanted
    assert len(said) == 1
    start_reads._missed_s.clear()  # as in a new process

    assert _read(url, said) == wanted
    assert _read(url, said) == wanted
    assert len(said) == 2
    assert _read(f"{url}&dbname=other", said) == NOTHING


def test_what_names_no_database_is_refused(tmp_path: Path) -> None:
    for name in ("", "nosuch://host/name", "sqlite:///x.db?mode=ro", "http:// not a url"):
        with pytest.raises(DatabaseNameError), open_start_reads(name):
            pass


def test_a_database_that_is_empty_again_is_read_as_such(tmp_path: Path) -> None:
    db, said = tmp_path / "x.db", list[str]()
    _fill(db)
    _read(db, said)
    db.unlink()
    shutil.copy(FIXTURES / "0007.db", db)
    of_another_build = {"machine": MACHINE, "kernel_abi": "another build", "verified": True}
    for _ in range(2):
        with open_start_reads(db, said.append) as reads:
            assert reads.rows(StorageDuel, **of_another_build) == []
        start_reads._missed_s.clear()
        _garbage(db)


@given(data=st.data())
@examples(60)
def test_a_copy_that_somebody_changed_gives_rows_or_none(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is in it, each row is one that the database had."""
    folder = tmp_path_factory.mktemp("copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PHASEWISE_CACHE", str(folder / "cache"))
        db = folder / "x.db"
        _fill(db)
        wanted = _read(db, [])
        for copy in (folder / "cache" / "databases").rglob("*"):
            if copy.is_file():
                content = bytearray(copy.read_bytes())
                for _ in range(data.draw(st.integers(0, 3))):
                    content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
                copy.write_bytes(content[: data.draw(st.integers(0, len(content)))])
        _garbage(db)
        plan, *lists = _read(db, [])
        assert plan in (None, wanted[0], replace(PLAN, origin=replace(PLAN.origin, verified=False)))
        for rows, own in zip(lists, wanted[1:], strict=True):
            possible = [
                *own,
                *(replace(row, origin=replace(row.origin, verified=not row.origin.verified)) for row in own),
            ]
            assert all(row in possible for row in rows)


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

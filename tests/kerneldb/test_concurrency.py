"""Several processes, one database, on SQLite and PostgreSQL; exports and imports hold few rows at a time."""

from __future__ import annotations

import gc
import io
import multiprocessing
import os
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from sqlalchemy import create_engine, text

from phasewise.kerneldb import portable, schema
from phasewise.kerneldb.portable import export_lines, groups_of, import_rows, read_export, rows_of
from phasewise.kerneldb.records import Measurement, PlanRecord
from phasewise.kerneldb.store import Store, open_store
from tests.support.machines.grown_database import Fleet, fill
from tests.support.machines.kerneldb_examples import MACHINE, MEASUREMENT, PLAN, PROBLEM, PROMOTION, measured
from tests.support.machines.kerneldb_server import new_database_url

SPAWN = multiprocessing.get_context("spawn")
FIRST_SCHEMA = Path(__file__).resolve().parent.parent / "data" / "schemas" / "0001.db"
BATCH = 7


@pytest.fixture(params=["file", "postgresql"])
def db(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgresql":
        return new_database_url(request.getfixturevalue("postgres"))
    return str(tmp_path / "shared.db")


def together(target: Callable[..., None], *arguments: Any, count: int = 2) -> None:
    """Run `target` in N processes that begin at the same moment; all must succeed."""
    start = SPAWN.Barrier(count)
    processes = [SPAWN.Process(target=target, args=(start, *arguments)) for _ in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * count


def import_file(start: Barrier, db: str, file: Path) -> None:
    start.wait(60)
    with open_store(db) as store, file.open("rb") as stream:
        import_rows(store, read_export(stream, file.name, pytest.fail))


def open_once(start: Barrier, db: str) -> None:
    start.wait(60)
    with open_store(db, upgrades_server=True) as store:
        assert store.measurements(PROBLEM, MACHINE, MEASUREMENT.kernel_abi) == [MEASUREMENT]


def append_for_ever(db: str, begun: Event) -> None:
    with open_store(db) as store:
        for turn in range(1, 1_000_000):
            store.add(measured(turn) for _ in range(BATCH))
            begun.set()


def tune(start: Barrier, db: str) -> None:
    """Do as a tuner does: append, promote and look at what is in use."""
    start.wait(60)
    with open_store(db) as store:
        for turn in range(1, 30):
            store.add([measured(turn), PROMOTION])
            assert store.promoted_measurement(PROBLEM, MACHINE, MEASUREMENT.kernel_abi) is not None


@pytest.mark.slow
def test_two_processes_that_import_one_file_add_it_once(db: str, tmp_path: Path) -> None:
    file = tmp_path / "schedules.jsonl"
    file.write_text("".join(export_lines([[measured(ns) for ns in range(1, 700)]])))
    with open_store(db):
        pass
    together(import_file, db, file)

    with open_store(db) as store:
        assert store.stats().rows["measurement"] == 699
        assert "".join(export_lines(groups_of(store))) == file.read_text()


@pytest.mark.slow
def test_two_tuners_share_a_database(db: str) -> None:
    """Each waits for the other's transaction; no row is lost, and a row that both need is one."""
    together(tune, db)

    with open_store(db) as store:
        rows = store.stats().rows
    assert (rows["measurement"], rows["promotion"]) == (58, 58)
    assert (rows["problem"], rows["schedule"]) == (1, 1)


def test_a_killed_process_leaves_whole_batches(db: str) -> None:
    """A transaction's rows are there as a whole or not at all, and the next process is not stopped."""
    with open_store(db):
        pass
    begun = SPAWN.Event()
    process = SPAWN.Process(target=append_for_ever, args=(db, begun))
    process.start()
    assert begun.wait(60)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)

    with open_store(db) as store:
        count = store.stats().rows["measurement"]
        assert count > 0
        assert count % BATCH == 0
        store.add([MEASUREMENT])
        assert store.stats().rows["measurement"] == count + 1


def test_a_reader_is_not_stopped_by_a_writer_and_sees_whole_transactions(db: str) -> None:
    with open_store(db) as writer, open_store(db) as reader:
        writer.add([MEASUREMENT])

        def appended_half() -> Iterator[Measurement]:
            yield measured(1)
            assert reader.stats().rows["measurement"] == 1
            yield measured(2)

        writer.add(appended_half())
        assert reader.stats().rows["measurement"] == 3


def test_a_scan_is_of_one_moment(db: str) -> None:
    """Rows that another process appends while an export reads are in the next one."""
    with open_store(db) as store, open_store(db) as other:
        store.add(measured(ns) for ns in range(1, 1200))
        scan = store.stream(Measurement)
        next(scan)
        other.add([measured(5000)])

        assert len([*scan]) == 1198


@pytest.mark.slow
def test_two_processes_may_upgrade_an_old_file_at_once(tmp_path: Path) -> None:
    file = shutil.copy(FIRST_SCHEMA, tmp_path / "old.db")
    together(open_once, str(file), count=3)

    with open_store(file) as store:
        assert store.schema_change.before == schema.HEAD


@pytest.mark.slow
def test_two_processes_may_upgrade_an_old_server_at_once(postgres: Path) -> None:
    url = new_database_url(postgres)
    fill_first_schema(url)
    together(open_once, url)

    with open_store(url) as store:
        assert_upgraded(store)


def fill_first_schema(url: str) -> None:
    """The tables of schema 0001 with the rows of its fixture."""
    engine = create_engine(url)
    with engine.begin() as connection, sqlite3.connect(FIRST_SCHEMA) as old:
        command.upgrade(schema.alembic_config(connection), "0001")
        old.row_factory = sqlite3.Row
        for table in ("problem", "schedule", "measurement", "service_plan"):
            for row in map(dict, old.execute(f"SELECT * FROM {table}")):
                if "verified" in row:
                    row["verified"] = bool(row["verified"])
                values = ", ".join(f":{name}" for name in row)
                connection.execute(text(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({values})"), row)
    old.close()
    engine.dispose()


def assert_upgraded(store: Store) -> None:
    assert store.measurements(PROBLEM, MACHINE, MEASUREMENT.kernel_abi) == [MEASUREMENT]
    assert store.rows(PlanRecord) == [PLAN]


def test_opening_a_database_again_does_not_give_up_the_first_ones_locks(tmp_path: Path) -> None:
    """Else the last other process to close it takes the write-ahead log away from under the first."""
    file = tmp_path / "shared.db"
    with open_store(file) as first:
        first.add([PLAN])
        with open_store(file) as second:
            assert second.rows(PlanRecord) == [PLAN]
        other = SPAWN.Process(target=add_plan_once, args=(str(file),))
        other.start()
        other.join(60)
        assert other.exitcode == 0
        assert file.with_name("shared.db-wal").exists()
        first.add([PLAN])
        assert len(first.rows(PlanRecord)) == 3


def add_plan_once(db: str) -> None:
    with open_store(db) as store:
        store.add([PLAN])


FLEET = Fleet(cores=6, problems=5, timings=20)
N_TIMINGS = FLEET.cores * FLEET.problems * FLEET.timings
AT_ONCE = 25


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "fleet.db") as opened:
        fill(opened, FLEET)
        gc.freeze()  # `gc.get_objects` gives what is made from now on
        yield opened


def n_alive() -> int:
    """Timings in memory."""
    return sum(isinstance(thing, Measurement) for thing in gc.get_objects())


def most_alive(lines: Iterator[Any]) -> int:
    return max(n_alive() for number, _ in enumerate(lines) if number % 7 == 0)


def test_an_export_holds_one_group_of_rows(store: Store) -> None:
    before = n_alive()
    assert most_alive(export_lines(groups_of(store))) - before <= 2 * FLEET.timings
    assert 10 * FLEET.timings < N_TIMINGS


def test_an_import_appends_before_it_reads_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "ROWS_AT_ONCE", AT_ONCE)
    file = io.BytesIO("".join(export_lines(groups_of(store))).encode())
    n_held = list[int]()

    def watched(rows: Iterator[Any], there: Store) -> Iterator[Any]:
        for number, row in enumerate(rows):
            if number % AT_ONCE == 0:
                n_held.append(number - sum(there.stats().rows[name] for name in ("measurement", "promotion")))
            yield row

    with open_store(":memory:") as there:
        taken = import_rows(there, watched(read_export(file, "x", pytest.fail), there))  # type: ignore[arg-type]
        assert taken.added == taken.read > N_TIMINGS
    assert len(n_held) > 10
    assert max(n_held) <= AT_ONCE


def test_a_merge_holds_a_few_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "ROWS_AT_ONCE", AT_ONCE)
    before, most = n_alive(), 0

    def watched() -> Iterator[Any]:
        nonlocal most
        for number, row in enumerate(rows_of(store)):
            if number % AT_ONCE == 0:
                most = max(most, n_alive() - before)
            yield row

    with open_store(":memory:") as there:
        assert import_rows(there, watched()).added > N_TIMINGS
    assert most <= 2 * FLEET.timings + 2 * AT_ONCE

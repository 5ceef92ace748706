"""Opening a database in every state a disk can offer: it works, or one clear line says why not."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Engine, event

from phasewise.kerneldb import connect
from phasewise.kerneldb.errors import (
    BusyDatabaseError,
    DamagedDatabaseError,
    DatabaseFullError,
    ForeignDatabaseError,
    KernelDbError,
    ReadOnlyDatabaseError,
)
from phasewise.kerneldb.records import Measurement, PlanRecord
from phasewise.kerneldb.store import open_store
from tests.support.machines.kerneldb_examples import (
    MACHINE,
    MEASUREMENT,
    PLAN,
    PROBLEM,
    measured,
    without_rights,
)
from tests.support.machines.kerneldb_server import new_database_url
from tests.support.tiers import examples


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder that a process without rights can reach: pytest's own every session closes again to others."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        os.chmod(folder, 0o755)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A good database with one measurement and one plan."""
    path = tmp_path / "good.db"
    with open_store(path) as store:
        store.add([MEASUREMENT, PLAN])
    return path


def _assert_one_line(error: KernelDbError, *words: object) -> None:
    """A message for a person: one line, naming the thing."""
    message = str(error)
    assert "\n" not in message
    assert len(message) < 400
    assert error.exit_code == 1
    for word in words:
        assert str(word) in message


def _read_all(path: Path, report: Callable[[str], None] = lambda message: None) -> None:
    with open_store(path, report) as store:
        store.rows(PlanRecord)
        store.best_measurement(PROBLEM, MACHINE, MEASUREMENT.kernel_abi)
        store.measurements(PROBLEM, MACHINE, MEASUREMENT.kernel_abi)
        store.stats()


def _refusal(path: Path) -> KernelDbError:
    with pytest.raises(KernelDbError) as caught:
        _read_all(path)
    return caught.value


def test_a_new_database_is_created_with_a_write_ahead_log(tmp_path: Path) -> None:
    path = tmp_path / "new.db"
    with open_store(path) as store:
        assert store.schema_change.before is None
        assert store.rows(PlanRecord) == []
    with contextlib.closing(sqlite3.connect(path)) as raw:
        assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_the_default_database_brings_its_directory_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "not" / "yet"))
    with open_store() as store:
        store.add([PLAN])

    assert (tmp_path / "not" / "yet" / "phasewise" / "phasewise.db").is_file()


def test_another_directory_that_is_missing_is_a_typing_error(tmp_path: Path) -> None:
    error = _refusal(tmp_path / "tpyo" / "x.db")

    _assert_one_line(error, "there is no directory", tmp_path / "tpyo")
    assert not (tmp_path / "tpyo").exists()


def test_a_default_directory_that_cannot_be_made_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    with pytest.raises(KernelDbError) as caught, open_store():
        pass

    _assert_one_line(caught.value, "cannot be created", "--db")


def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    """`mktemp` and `touch` leave one."""
    path = tmp_path / "empty.db"
    path.touch()
    with open_store(path) as store:
        store.add([PLAN])
        assert store.rows(PlanRecord) == [PLAN]


@pytest.mark.parametrize("content", [b"x", b"GGUF\x03\0\0\0", b"SQLite format 2\0", os.urandom(5000)])
def test_what_is_not_a_database_is_left_alone(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(content)
    error = _refusal(path)

    assert isinstance(error, ForeignDatabaseError)
    _assert_one_line(error, path, "--db")
    assert path.read_bytes() == content


def test_a_directory_a_pipe_and_a_dangling_link_are_no_databases(tmp_path: Path) -> None:
    """And opening a pipe must not wait for its writer."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "link"):
        _assert_one_line(_refusal(path), path)


def test_a_database_of_another_program_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "bookmarks.db"
    with contextlib.closing(sqlite3.connect(path)) as raw:
        raw.execute("CREATE TABLE bookmarks (url TEXT)")
    before = path.read_bytes()
    error = _refusal(path)

    assert isinstance(error, ForeignDatabaseError)
    _assert_one_line(error, path, "another program", "bookmarks", "--db")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TABLE service_plan",
        "ALTER TABLE measurement DROP COLUMN effort_ns",
        "DELETE FROM phasewise_schema",
        "INSERT INTO phasewise_schema (version_num) VALUES ('0000')",
    ],
)
def test_a_database_without_what_its_revision_promises_is_damaged(file: Path, damage: str) -> None:
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as raw:
        raw.execute("PRAGMA legacy_alter_table = ON")
        raw.execute(damage)
    error = _refusal(file)

    assert isinstance(error, DamagedDatabaseError)
    _assert_one_line(error, file, "restore a copy")


@pytest.mark.parametrize("keep", [16, 100, 512, 4096, 9000, 30000])
def test_a_truncated_database_is_one_clear_line(file: Path, keep: int) -> None:
    file.write_bytes(file.read_bytes()[:keep])

    _assert_one_line(_refusal(file), file)


def test_a_signature_that_lost_a_letter_is_reported(file: Path) -> None:
    """SQLite does not notice a byte that is gone from a row."""
    letters = MACHINE.placement_sig.encode()
    file.write_bytes(file.read_bytes().replace(letters, letters[:-1] + b"\0"))
    said: list[str] = []
    _read_all(file, said.append)

    assert any("placement_sig" in line and str(file) in line for line in said)


@examples(60)
@given(flips=st.lists(st.tuples(st.integers(0, 45_055), st.integers(1, 255)), min_size=1, max_size=30))
def test_flipped_bits_give_rows_or_one_clear_line(
    flips: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No crash, no traceback, no hang: what is read is a valid record, or was reported and skipped."""
    path = tmp_path_factory.getbasetemp() / "flipped.db"
    for beside in ("-wal", "-shm"):
        Path(f"{path}{beside}").unlink(missing_ok=True)
    content = bytearray(_pristine(tmp_path_factory))
    for position, mask in flips:
        content[position % len(content)] ^= mask
    path.write_bytes(content)
    try:
        _read_all(path)
    except KernelDbError as error:
        _assert_one_line(error)


def _pristine(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.getbasetemp() / "pristine.db"
    if not path.exists():
        with open_store(path) as store:
            store.add([*(measured(ns) for ns in range(1, 30)), PLAN])
    return path.read_bytes()


HOSTILE_VALUES = [
    *("9223372036854775807", "'text'", "x'ff00'", "-1", "9e999", "zeroblob(100000)", "CAST(x'ff' AS TEXT)"),
    *("'[1e400]'", "'[[['"),
]


@pytest.mark.many
@pytest.mark.parametrize("value", HOSTILE_VALUES)
@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("problem", "n"),
        ("problem", "family"),
        ("schedule", "block_k"),
        ("schedule", "compute_path"),
        ("measurement", "samples_ns"),
        ("measurement", "estimate_ns"),
        ("measurement", "core_sig"),
        ("measurement", "created_at_ms"),
        ("service_plan", "objectives"),
        ("service_plan", "model_key"),
    ],
)
def test_a_hostile_value_costs_its_row_and_nothing_else(
    file: Path, table: str, column: str, value: str
) -> None:
    """Every type that SQLite lets into a column: the row is named and skipped (or, if text, kept)."""
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as raw:
        for name in ("measurement", "service_plan"):
            raw.execute(f"DROP TRIGGER {name}_is_never_edited")
        raw.execute(f"UPDATE {table} SET {column} = {value}")
    said: list[str] = []
    with open_store(file, said.append) as store:
        n_read = len(store.rows(PlanRecord)) + len([*store.stream(Measurement)])

    assert n_read + len(said) == 2
    for line in said:
        assert "is skipped" in line
        assert len(line) < 500


def test_a_bad_newer_plan_does_not_hide_the_good_one(file: Path) -> None:
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as raw:
        raw.execute("CREATE TEMP TABLE copied AS SELECT * FROM service_plan")
        raw.execute("UPDATE copied SET id = 2, created_at_ms = -5")
        raw.execute("INSERT INTO service_plan SELECT * FROM copied")
    said: list[str] = []
    with open_store(file, said.append) as store:
        assert store.newest_plan(MACHINE, PLAN.model_key, PLAN.phase) == PLAN

    assert len(said) == 1
    assert "row 2 of service_plan" in said[0]


def _read_as_stranger(path: Path) -> tuple[list[str], int, str]:
    said: list[str] = []
    with open_store(path, said.append) as store:
        refused = ""
        try:
            store.add([PLAN])
        except ReadOnlyDatabaseError as error:
            refused = str(error)
        return said, len(store.rows(PlanRecord)), refused


@pytest.mark.parametrize("writer_is_open", [False, True], ids=["at rest", "in use"])
@pytest.mark.parametrize(("file_mode", "folder_mode"), [(0o444, 0o755), (0o444, 0o777), (0o666, 0o755)])
def test_a_read_only_database_is_read_with_a_remark(
    tmp_path: Path, file: Path, file_mode: int, folder_mode: int, writer_is_open: bool
) -> None:
    """Also while its owner has it open, with rows still in the write-ahead log."""
    with contextlib.ExitStack() as stack:
        rows = 1
        if writer_is_open:
            stack.enter_context(open_store(file)).add([PLAN])
            rows = 2
        file.chmod(file_mode)
        tmp_path.chmod(folder_mode)
        for beside in ("-wal", "-shm"):
            if (path := Path(f"{file}{beside}")).exists():
                path.chmod(0o644)
        said, n_read, refused = without_rights(lambda: _read_as_stranger(file))

    assert n_read == rows
    assert said == [f"database {file} is read-only: it is used, and nothing new is kept"]
    assert "read-only" in refused


def _append_and_die(path: Path) -> None:
    with open_store(path) as store:
        store.add([PLAN])
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("index_is_left", [True, False])
def test_a_read_only_database_that_was_not_closed_cleanly(tmp_path: Path, index_is_left: bool) -> None:
    """Readable while the index of its log is there; without it only a writer can recover it."""
    path = tmp_path / "killed.db"
    os.waitpid(_fork(lambda: _append_and_die(path)), 0)
    for left in tmp_path.iterdir():
        left.chmod(0o644)
    if index_is_left:
        assert without_rights(lambda: _read_as_stranger(path))[1] == 1
        return
    Path(f"{path}-shm").unlink()
    with pytest.raises(KernelDbError) as caught:
        without_rights(lambda: _read_as_stranger(path))

    _assert_one_line(caught.value, path, "not closed cleanly")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("", ReadOnlyDatabaseError, ("cannot be created", "not writable")),
        ("good.db", KernelDbError, (os.strerror(errno.EACCES),)),
        ("empty.db", ReadOnlyDatabaseError, ("is empty and cannot be written",)),
    ],
    ids=["a directory that cannot be written", "a file that cannot be read", "an empty read-only file"],
)
def test_what_cannot_be_used_is_one_clear_line(
    tmp_path: Path, file: Path, name: str, error: type[KernelDbError], words: tuple[str, ...]
) -> None:
    file.chmod(0o200)
    (tmp_path / "empty.db").touch(0o444)
    if not name:
        tmp_path.chmod(0o555)
    with pytest.raises(error) as caught:
        without_rights(lambda: _read_as_stranger(tmp_path / (name or "new.db")))

    _assert_one_line(caught.value, tmp_path / name, *words)


@contextlib.contextmanager
def at_most(n_pages: int) -> Iterator[None]:
    """SQLite's own limit on pages fails as a full disk does, in the middle of a write."""

    def limit(dbapi: sqlite3.Connection, _: object) -> None:
        dbapi.execute(f"PRAGMA max_page_count = {n_pages}")

    event.listen(Engine, "connect", limit)
    try:
        yield
    finally:
        event.remove(Engine, "connect", limit)


def test_a_full_disk_keeps_what_was_committed(file: Path) -> None:
    with at_most(14), open_store(file) as store:
        with pytest.raises(DatabaseFullError) as caught:
            store.add([measured(ns) for ns in range(1, 2000)])
        assert store.measurements(PROBLEM, MACHINE, MEASUREMENT.kernel_abi) == [MEASUREMENT]

    _assert_one_line(caught.value, file, "disk is full")


def test_a_database_on_a_full_disk_is_read_and_not_written(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SQLite could not even open it: the memory that its processes share is a file beside it."""
    monkeypatch.setattr(connect, "LEAST_ROOM_BYTES", 1 << 80)
    remarks: list[str] = []
    with open_store(file, remarks.append) as store:
        assert store.rows(PlanRecord) == [PLAN]
        with pytest.raises(DatabaseFullError) as caught:
            store.add([PLAN])

    _assert_one_line(caught.value, file, "disk is full")
    assert remarks == [f"database {file} cannot grow: the disk is full: it is used, and nothing new is kept"]


def test_a_disk_too_full_to_create_the_database_is_one_clear_line(tmp_path: Path) -> None:
    with at_most(3):
        error = _refusal(tmp_path / "new.db")

    assert isinstance(error, DatabaseFullError)
    with open_store(tmp_path / "new.db") as store:
        assert store.rows(PlanRecord) == []


def test_a_lock_that_is_never_released_is_one_clear_line(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "BUSY_TIMEOUT_S", 0.2)
    with contextlib.closing(sqlite3.connect(file, isolation_level=None)) as raw:
        raw.execute("BEGIN IMMEDIATE")
        with open_store(file) as store:
            assert store.rows(PlanRecord) == [PLAN]
            with pytest.raises(BusyDatabaseError) as caught:
                store.add([PLAN])

    _assert_one_line(caught.value, file, "locked by another process")


def _append_for_ever(path: Path, acknowledged: int) -> None:
    with open_store(path) as store:
        for count in range(1, 100_000):
            store.add([measured(count)])
            os.write(acknowledged, b"x")


def _fork(action: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        action()
        os._exit(0)
    return child


def test_a_killed_writer_loses_at_most_the_row_in_flight(tmp_path: Path) -> None:
    """kill -9 in the middle: the next opening is clean, and every row that was acknowledged is there."""
    path = tmp_path / "killed.db"
    reader, writer = os.pipe()
    child = _fork(lambda: _append_for_ever(path, writer))
    os.close(writer)
    seen = os.read(reader, 1)
    time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    while more := os.read(reader, 4096):
        seen += more
    os.close(reader)

    with open_store(path) as store:
        kept = store.stats().rows["measurement"]
    assert len(seen) <= kept <= len(seen) + 1


ENDLESS = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT "


def with_a_view(connection: sqlite3.Connection) -> None:
    columns = [row[1] for row in connection.execute("PRAGMA table_info(measurement)")]
    connection.execute("ALTER TABLE measurement RENAME TO other")
    named = ", ".join(f"x AS {column}" for column in columns)
    connection.execute(f"CREATE VIEW measurement AS {ENDLESS} {named} FROM n")


HOSTILE = {
    "an endless view": with_a_view,
    "a view beside": lambda it: it.execute(f"CREATE VIEW other AS {ENDLESS} x FROM n"),
    "a trigger": lambda it: it.execute(
        f"CREATE TRIGGER t BEFORE INSERT ON measurement BEGIN {ENDLESS} count(*) FROM n; END"
    ),
    "a virtual table": lambda it: it.execute("CREATE VIRTUAL TABLE v USING fts5(a)"),
    "an index of an expression": lambda it: it.execute(
        "CREATE INDEX i ON measurement (length(hex(zeroblob(400000000))))"
    ),
    "an index of some rows": lambda it: it.execute(
        "CREATE INDEX i ON measurement (id) WHERE length(hex(zeroblob(4000000))) > id"
    ),
    "a check": lambda it: it.execute(
        "CREATE TABLE other (a INTEGER, CHECK (length(hex(zeroblob(400000000))) > a))"
    ),
    "a default": lambda it: it.execute(
        "CREATE TABLE other (a INTEGER, b TEXT DEFAULT (hex(zeroblob(400000000))))"
    ),
    "a generated column": lambda it: it.execute(
        "ALTER TABLE measurement ADD COLUMN g GENERATED ALWAYS AS (hex(zeroblob(400000000))) VIRTUAL"
    ),
}


@pytest.mark.many
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_database_that_computes_its_rows_is_refused(file: Path, kind: str) -> None:
    with contextlib.closing(sqlite3.connect(file)) as connection, connection:
        HOSTILE[kind](connection)

    with pytest.raises(ForeignDatabaseError, match="which no database of phasewise has"), open_store(file):
        pass


def test_a_statement_without_end_is_ended(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "MAX_STATEMENT_STEPS", 3_000_000)
    with open_store(file) as store:
        with pytest.raises(DamagedDatabaseError, match="work without end"), connect.clear_errors(store.name):
            count_for_ever(store._engine)

        assert list(store.stream(Measurement)) == [MEASUREMENT]


def test_a_statement_without_end_is_ended_by_a_server(
    postgres: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connect, "STATEMENT_TIMEOUT_S", 1)
    with open_store(new_database_url(postgres)) as store:
        with pytest.raises(DamagedDatabaseError, match="took too long"), connect.clear_errors(store.name):
            count_for_ever(store._engine)

        assert not list(store.stream(Measurement))


def test_limits_of_a_server_yield_to_those_of_its_url() -> None:
    own = connect.server_limits(
        "postgresql://host/name?options=-c%20statement_timeout%3D9s&connect_timeout=3"
    )

    assert own["options"].endswith("-c statement_timeout=9s")
    assert "connect_timeout" not in own
    assert connect.server_limits("mysql://host/name") == {}


def test_a_view_in_place_of_a_servers_table_is_refused(postgres: Path) -> None:
    url = new_database_url(postgres)
    with open_store(url) as store, store._engine.begin() as connection:
        connection.exec_driver_sql("ALTER TABLE measurement RENAME TO other")
        connection.exec_driver_sql(f"CREATE VIEW measurement AS {ENDLESS} x AS id FROM n")

    with pytest.raises(ForeignDatabaseError, match="has a view measurement"), open_store(url):
        pass


def test_ctrl_c_ends_a_statement(file: Path) -> None:
    begun = threading.Event()

    def press() -> None:
        begun.wait()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    with open_store(file) as store:
        presser = threading.Thread(target=press)
        presser.start()
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (no Ctrl-C comes before it)
            begun.set()
            count_for_ever(store._engine)
        presser.join()

        assert list(store.stream(Measurement)) == [MEASUREMENT]


def count_for_ever(engine: Engine) -> None:
    with engine.connect() as connection:
        connection.exec_driver_sql(f"{ENDLESS} count(*) FROM n").all()

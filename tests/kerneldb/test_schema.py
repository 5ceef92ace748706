"""The history of the schema: it leads to today's models, from every schema that was ever released."""

from __future__ import annotations

import ast
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, text

import phasewise.migrations
from phasewise.kerneldb import schema, store
from phasewise.kerneldb.errors import (
    DatabaseTooNewError,
    DatabaseTooOldError,
    KernelDbError,
    ReadOnlyDatabaseError,
)
from phasewise.kerneldb.records import (
    KINDS,
    PlanRecord,
    StepTime,
)
from phasewise.kerneldb.store import open_store
from tests.data.schemas.draft import draft_revision
from tests.support.machines.kerneldb_examples import (
    MACHINE,
    MEASUREMENT,
    PLAN,
    PREDICTOR_SCORE,
    PROBLEM,
    PROMOTION,
    STEP_TIME,
    STORAGE_DUEL,
    USER_PROMOTION,
)
from tests.support.machines.kerneldb_server import new_database_url

MIGRATIONS = Path(phasewise.migrations.__file__).parent
FIXTURES = Path(__file__).resolve().parent.parent / "data" / "schemas"

NEXT_REVISION = """
import sqlalchemy as sa
from alembic import op

revision, down_revision, branch_labels, depends_on = "{revision}", "{down}", None, None


def upgrade() -> None:
    op.add_column("schedule", sa.Column("colour", sa.Integer(), server_default="0", nullable=False))
    {then}
"""


@pytest.fixture
def connection() -> Iterator[Connection]:
    """A transaction on an empty database in memory."""
    engine = create_engine("sqlite://")
    with engine.begin() as opened:
        yield opened
    engine.dispose()


@pytest.fixture
def released(tmp_path: Path) -> Path:
    """A copy of the database that the newest released schema left."""
    return Path(shutil.copy(FIXTURES / f"{schema.HEAD}.db", tmp_path / "released.db"))


def _add_revision(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, then: str = "pass", revision: str = "9999"
) -> None:
    """Let this program know one more revision, which runs the statement `then`."""
    versions = tmp_path / "versions"
    shutil.copytree(MIGRATIONS / "versions", versions)
    down = schema.HEAD
    (versions / "next.py").write_text(NEXT_REVISION.format(revision=revision, down=down, then=then))
    original = schema.alembic_config

    def with_one_more(connection: Connection) -> Config:
        config = original(connection)
        config.set_main_option("version_locations", str(versions))
        return config

    monkeypatch.setattr(schema, "alembic_config", with_one_more)
    monkeypatch.setattr(schema, "REVISIONS", (*schema.REVISIONS, revision))
    monkeypatch.setattr(schema, "HEAD", revision)


def test_the_revisions_are_those_of_the_migration_files() -> None:
    """One line of history, and the constant that spares loading Alembic tells the truth."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)

    assert tuple(reversed([script.revision for script in scripts.walk_revisions()])) == schema.REVISIONS
    assert scripts.get_heads() == [schema.HEAD]


def test_a_new_file_is_what_the_migrations_make_of_none(connection: Connection) -> None:
    """The statement of each table and index, but for comments and the order of columns; triggers and the
    revision in every letter.
    """
    schema.migrate(connection)
    migrated = _schema_of(connection)
    engine = create_engine("sqlite://")
    with engine.begin() as other:
        assert schema.upgrade(other, "in memory") == schema.SchemaChange(None, schema.HEAD)
        created = _schema_of(other)
    engine.dispose()

    assert created == migrated


def _schema_of(connection: Connection) -> list[tuple[str, list[str]]]:
    statements = connection.execute(
        text("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name")
    )
    revisions = connection.scalars(text(f"SELECT version_num FROM {schema.VERSION_TABLE}"))
    return [*((name, _normal(sql)) for name, sql in statements), *((own, []) for own in revisions)]


def _normal(sql: str) -> list[str]:
    return sorted(
        part.strip() for part in " ".join(sql.split()).replace("( ", "(").replace(")", "").split(",")
    )


def test_a_migration_imports_nothing_of_ours() -> None:
    """A revision must still run when today's models are long gone."""
    for path in (MIGRATIONS / "versions").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert {name for name in names if name.startswith("phasewise")} <= {"phasewise.migrations"}, path


def test_every_released_schema_left_a_database() -> None:
    assert sorted(path.stem for path in FIXTURES.glob("*.db")) == sorted(schema.REVISIONS)


SINCE = {PROMOTION: "0002", STEP_TIME: "0003", USER_PROMOTION: "0004", STORAGE_DUEL: "0005"}
SINCE |= {PREDICTOR_SCORE: "0007"}


def _assert_has_its_rows(opened: store.Store, revision: str) -> None:
    """Of each kind that the schema had a table for."""
    assert opened.measurements(PROBLEM, MACHINE, MEASUREMENT.kernel_abi) == [MEASUREMENT]
    assert opened.rows(PlanRecord) == [PLAN]
    for row, since in SINCE.items():
        assert opened.rows(type(row)) == ([row] if revision >= since else [])


@pytest.mark.parametrize("revision", schema.REVISIONS)
def test_every_released_schema_upgrades_and_keeps_its_rows(revision: str, tmp_path: Path) -> None:
    """Rows stored under an old schema read as the same records under ours."""
    file = shutil.copy(FIXTURES / f"{revision}.db", tmp_path)
    with open_store(file) as opened:
        assert opened.schema_change == schema.SchemaChange(revision, schema.HEAD)
        _assert_has_its_rows(opened, revision)


def test_an_older_schema_is_upgraded_in_place_and_said(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in one line; the rows stay."""
    before = schema.HEAD
    _add_revision(monkeypatch, tmp_path)
    said: list[str] = []
    with open_store(released, said.append) as opened:
        assert opened.schema_change == schema.SchemaChange(before, "9999")
        assert opened.rows(PlanRecord) == [PLAN]
    with open_store(released, said.append) as opened:
        assert opened.schema_change == schema.SchemaChange("9999", "9999")

    copy = released.with_name("released.db.before-upgrade")
    assert said == [f"database {released} upgraded from schema {before} to 9999; {copy} is what it was"]
    with open_store(copy, said.append) as opened:
        assert opened.schema_change.before == before
        assert opened.rows(PlanRecord) == [PLAN]


def test_an_upgrade_that_fails_changes_nothing(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statements before the failure are rolled back with it."""
    before = list(_dump(released))
    with monkeypatch.context() as patch:
        _add_revision(patch, tmp_path, then='op.execute("SELECT * FROM missing")')
        with pytest.raises(Exception, match="missing"), open_store(released):
            pass

    assert list(_dump(released)) == before
    with open_store(released) as opened:
        assert opened.rows(PlanRecord) == [PLAN]


def test_a_newer_schema_is_refused_untouched(released: Path, tmp_path: Path) -> None:
    """Whatever its tables are: the file is not written at all."""
    with sqlite3.connect(released) as raw:
        raw.execute(f"UPDATE {schema.VERSION_TABLE} SET version_num = '0742'")
    raw.close()
    before = released.read_bytes()
    with (
        pytest.raises(DatabaseTooNewError, match="0742, newer than this phasewise") as caught,
        open_store(released),
    ):
        pass

    assert caught.value.exit_code == 1
    assert released.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == [released.name]


def test_without_room_for_the_copy_nothing_is_upgraded(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = list(_dump(released))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:
        _add_revision(patch, tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            with pytest.raises(KernelDbError, match="before-upgrade before"), open_store(released):
                pass
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert list(_dump(released)) == before
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [released.name]


def test_the_copy_has_what_the_log_holds_and_the_mode_of_the_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that another process has committed and not yet moved into the file."""
    file = tmp_path / "used.db"
    with open_store(file) as other:
        file.chmod(0o600)
        other.add([PLAN])
        assert (tmp_path / "used.db-wal").stat().st_size > 0
        with monkeypatch.context() as patch:
            _add_revision(patch, tmp_path)
            with open_store(file):
                pass
    copy = tmp_path / "used.db.before-upgrade"

    assert copy.stat().st_mode & 0o777 == 0o600
    with open_store(copy) as opened:
        assert opened.rows(PlanRecord) == [PLAN]
        assert opened.writable


def test_a_servers_database_is_changed_by_db_upgrade_alone(
    postgres: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, before, said = new_database_url(postgres), schema.HEAD, list[str]()
    with open_store(url) as opened:
        opened.add([PLAN])
    with monkeypatch.context() as patch:
        _add_revision(patch, tmp_path)
        with open_store(url, said.append) as opened:
            assert opened.rows(PlanRecord) == [PLAN]
            with pytest.raises(DatabaseTooOldError, match="run `phasewise db upgrade`"):
                opened.add([PLAN])
        assert "it is read, and nothing new is kept" in said.pop()
        with open_store(url, said.append, upgrades_server=True) as opened:
            assert opened.schema_change == schema.SchemaChange(before, "9999")
            opened.add([PLAN])
        assert len(said) == 1
        assert said[0].endswith(f"upgraded from schema {before} to 9999")
    with pytest.raises(DatabaseTooNewError), open_store(url):
        pass


@pytest.mark.parametrize("revision", schema.REVISIONS)
def test_an_older_schema_that_cannot_be_upgraded_is_read(
    revision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every read of a store and every count, from the newest revision that broke with older rows on. What the
    schema has no table for has no rows; nothing can be written, and the file stays as it is."""
    file, said = Path(shutil.copy(FIXTURES / f"{revision}.db", tmp_path)), list[str]()
    monkeypatch.setattr(store.connect, "check_file", lambda _: False)  # as of a file of another user
    before = file.read_bytes()
    if revision < schema.BREAKING[-1]:
        with pytest.raises(DatabaseTooOldError), open_store(file):
            pass
        return
    with open_store(file, said.append) as opened:
        assert opened.rows(PlanRecord) == [PLAN]
        assert opened.newest_plan(PLAN.origin.machine, PLAN.model_key, PLAN.phase) == PLAN
        assert opened.promoted_measurements() == [MEASUREMENT]
        _assert_has_its_rows(opened, revision)
        for record in KINDS.values():
            assert all(group for group in opened.grouped(record))
        stats = opened.stats()
        assert stats.revision == revision
        assert stats.rows["service_plan"] == 1
        assert MACHINE in opened.machines()
        assert opened.machines(PlanRecord, StepTime)
        with pytest.raises((DatabaseTooOldError, ReadOnlyDatabaseError), match="nothing can be added"):
            opened.add([PLAN])
    assert len(said) == 1
    assert file.read_bytes() == before


def test_a_draft_of_a_revision_imports_and_has_the_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template that the next schema change begins with."""
    shutil.copytree(MIGRATIONS, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(phasewise.migrations, "__file__", str(tmp_path / "migrations" / "__init__.py"))
    draft_revision("keep the weather")
    after = f"{len(schema.REVISIONS) + 1:04}"
    (draft,) = (tmp_path / "migrations" / "versions").glob(f"v{after}_keep_the_weather.py")
    source = draft.read_text()

    assert "Never import today's models" in (ast.get_docstring(ast.parse(source)) or "")
    assert f'revision = "{after}"' in source.replace("'", '"')
    compile(source, str(draft), "exec")


def _dump(file: Path) -> Iterator[str]:
    raw = sqlite3.connect(file)
    yield from raw.iterdump()
    raw.close()

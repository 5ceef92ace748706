"""The history of the schema: it leads to today's models, from every schema that was ever released."""

from __future__ import annotations

import ast
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
from phasewise.kerneldb.errors import DatabaseTooNewError
from phasewise.kerneldb.models import Base
from phasewise.kerneldb.store import open_store
from tests.support.kerneldb_examples import (
    MACHINE,
    MEASUREMENT,
    PLAN,
    PROBLEM,
    PROMOTION,
    STEP_TIME,
    STORAGE_DUEL,
    USER_PROMOTION,
)

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
    original = schema._alembic_config

    def with_one_more() -> Config:
        config = original()
        config.set_main_option("version_locations", str(versions))
        return config

    monkeypatch.setattr(schema, "_alembic_config", with_one_more)
    monkeypatch.setattr(schema, "REVISIONS", (*schema.REVISIONS, revision))
    monkeypatch.setattr(schema, "HEAD", revision)
    monkeypatch.setattr(store, "HEAD", revision)


def test_the_revisions_are_those_of_the_migration_files() -> None:
    """One line of history, and the constant that spares loading Alembic tells the truth."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    scripts = ScriptDirectory.from_config(config)

    assert tuple(reversed([script.revision for script in scripts.walk_revisions()])) == schema.REVISIONS
    assert scripts.get_heads() == [schema.HEAD]


def test_the_migrations_name_constraints_as_the_models_do(connection: Connection) -> None:
    """SQLite keeps the statement of each table: built from the models it reads the same, comments aside."""
    schema.upgrade(connection, "in memory")
    query = text("SELECT name, sql FROM sqlite_master WHERE type IN ('table', 'index') AND sql IS NOT NULL")
    migrated = {name: _normal(sql) for name, sql in connection.execute(query) if name != schema.VERSION_TABLE}
    engine = create_engine("sqlite://")
    with engine.begin() as other:
        Base.metadata.create_all(other)
        modelled = {name: _normal(sql) for name, sql in other.execute(query)}
    engine.dispose()

    assert migrated == modelled


def _normal(sql: str) -> list[str]:
    return sorted(part.strip() for part in " ".join(sql.split()).replace(")", "").split(","))


def test_a_migration_imports_nothing_of_ours() -> None:
    """A revision must still run when today's models are long gone."""
    for path in (MIGRATIONS / "versions").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.startswith("phasewise")], path


def test_every_released_schema_left_a_database() -> None:
    assert sorted(path.stem for path in FIXTURES.glob("*.db")) == sorted(schema.REVISIONS)


@pytest.mark.parametrize("revision", schema.REVISIONS)
def test_every_released_schema_upgrades_and_keeps_its_rows(revision: str, tmp_path: Path) -> None:
    """What was stored under an old schema reads as the same records under ours."""
    file = shutil.copy(FIXTURES / f"{revision}.db", tmp_path)
    with open_store(file) as opened:
        assert opened.schema_change == schema.SchemaChange(revision, schema.HEAD)
        assert opened.measurements(PROBLEM, MACHINE, MEASUREMENT.kernel_abi) == [MEASUREMENT]
        assert opened.plans() == [PLAN]
        assert [*opened.all_promotions()] == ([] if revision == "0001" else [PROMOTION])
        assert [*opened.all_storage_duels()] == ([STORAGE_DUEL] if revision >= "0005" else [])
        assert [*opened.all_step_times()] == ([STEP_TIME] if revision >= "0003" else [])
        assert opened.user_promotions() == ([USER_PROMOTION] if revision >= "0004" else [])


def test_an_older_schema_is_upgraded_in_place_and_said(
    released: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, in one line; the rows stay."""
    before = schema.HEAD
    _add_revision(monkeypatch, tmp_path)
    said: list[str] = []
    with open_store(released, said.append) as opened:
        assert opened.schema_change == schema.SchemaChange(before, "9999")
        assert opened.plans() == [PLAN]
    with open_store(released, said.append) as opened:
        assert opened.schema_change == schema.SchemaChange("9999", "9999")

    assert said == [f"database {released} upgraded from schema {before} to 9999"]


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
        assert opened.plans() == [PLAN]


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


def test_a_draft_of_a_revision_imports_and_has_the_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The template that the next schema change begins with."""
    shutil.copytree(MIGRATIONS, tmp_path / "migrations", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(phasewise.migrations, "__file__", str(tmp_path / "migrations" / "__init__.py"))
    schema.draft_revision("keep the weather")
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

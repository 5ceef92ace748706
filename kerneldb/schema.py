"""The schema revision of a database, and its upgrade to this program's. Alembic is loaded if needed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, column, inspect, select, table, text

import phasewise.migrations
from phasewise.kerneldb.errors import DamagedDatabaseError, DatabaseTooNewError, ForeignDatabaseError
from phasewise.kerneldb.records import KINDS
from phasewise.kerneldb.tables import METADATA

if TYPE_CHECKING:
    from alembic.config import Config

REVISIONS = ("0001", "0002", "0003", "0004", "0005", "0006", "0007")
"""Every revision of the schema, oldest first. A test compares it with the migration files."""

HEAD = REVISIONS[-1]

BREAKING = ("0001", "0002")
"""Revisions that changed the meaning of older rows. All others only add tables, or columns without which the
other columns keep their meaning."""

VERSION_TABLE = "phasewise_schema"
"""Our Alembic version table, not the usual name: Optuna's history may be in the same database."""


_UPGRADE_LOCK = (
    0x7068617365  # any number that other programs are unlikely to lock in the same PostgreSQL database
)


@dataclass(frozen=True)
class SchemaChange:
    """Schema revisions before and after opening a database; `before` is None for a new database."""

    before: str | None
    after: str


def is_readable(revision: str) -> bool:
    """True if rows of this revision still mean what they meant: no later revision was a breaking one."""
    return not set(REVISIONS[REVISIONS.index(revision) + 1 :]) & set(BREAKING)


def absent_tables(connection: Connection) -> frozenset[str]:
    """The tables of this program's schema that the database lacks."""
    return frozenset(METADATA.tables) - set(inspect(connection).get_table_names())


def read_revision(connection: Connection, name: str) -> str | None:
    """Read the revision of our tables; None where there are no tables at all. Refuses a database of another
    program, a database without exactly one revision, and a newer revision."""
    if connection.dialect.name == "sqlite":
        _refuse_computed_rows(connection, name)
    elif connection.dialect.name == "postgresql":
        _refuse_views(connection, name)
    if not connection.dialect.has_table(connection, VERSION_TABLE):
        _refuse_foreign_tables(connection, name)
        return None
    stated: Sequence[Any] = connection.scalars(
        select(column("version_num")).select_from(table(VERSION_TABLE))
    ).all()
    if len(stated) != 1:
        raise DamagedDatabaseError(
            f"database {name} states {len(stated)} schema revisions instead of one; restore a copy"
        )
    if stated[0] not in REVISIONS:
        raise DatabaseTooNewError(
            f"database {name} has schema {stated[0]!s:.40}, newer than this phasewise knows ({HEAD}): "
            "upgrade phasewise, or name another database with --db"
        )
    return str(stated[0])


_GUARDED = frozenset(record.kind.table for record in KINDS.values())
_COMPUTES = """
    SELECT CASE WHEN type = 'table' THEN 'virtual table' ELSE type END, name, tbl_name, sql FROM sqlite_master
    WHERE type IN ('view', 'trigger') OR (type = 'table' AND rootpage = 0)
    UNION ALL
    SELECT 'generated column', c.name, t.name, '' FROM sqlite_master t, pragma_table_xinfo(t.name) c
    WHERE t.type = 'table' AND t.rootpage <> 0 AND c.hidden <> 0
    LIMIT 100
"""


def _refuse_computed_rows(connection: Connection, name: str) -> None:
    """Refuse views, triggers and the like, which could compute rows without end. Allowed are our triggers
    that forbid editing of rows, also on a newer program's tables; Optuna has none."""
    for kind, what, where, definition in connection.execute(text(_COMPUTES)):
        if kind != "trigger" or definition != _guard_of(where):
            raise _computing(name, f"a {kind} {what!s:.60}")
    for kind, what, definition in connection.execute(text(_DEFINITIONS)):
        computed = _computed_part(kind, str(definition))
        if computed is not None:
            raise _computing(name, f"{computed} in {kind} {what!s:.60}")


def _computing(name: str, what: str) -> ForeignDatabaseError:
    return ForeignDatabaseError(
        f"database {name} has {what}, which no database of phasewise has: do not use it"
    )


_DEFINITIONS = (
    "SELECT type, name, sql FROM sqlite_master WHERE type IN ('table', 'index') AND sql IS NOT NULL"
)
_PLAIN_INDEX = re.compile(r"CREATE (?:UNIQUE )?INDEX \S+ ON \S+ \([^()]*\)", re.IGNORECASE)
_PLAIN_CHECK = re.compile(r"\s*\([^()]*\)")


def _computed_part(kind: str, definition: str) -> str | None:
    """The expression in a definition that each written row would compute, None for none; a file from
    elsewhere can have any."""
    if kind == "index":
        return None if _PLAIN_INDEX.fullmatch(definition) else "an expression"
    for check in re.finditer(r"\bCHECK\b", definition, re.IGNORECASE):
        if _PLAIN_CHECK.match(definition, check.end()) is None:
            return "a CHECK that calls functions"
    return "a default that is computed" if re.search(r"\bDEFAULT\b\s*\(", definition, re.IGNORECASE) else None


_VIEWS = """
    SELECT relname FROM pg_class
    WHERE relname = ANY(:names) AND relkind IN ('v', 'm', 'f') AND pg_table_is_visible(oid) LIMIT 1
"""


def _refuse_views(connection: Connection, name: str) -> None:
    """Refuse a view or a foreign table with the name of a table of ours: it can have rows without end."""
    ours = [VERSION_TABLE, *METADATA.tables]
    view = connection.scalar(text(_VIEWS), {"names": ours})
    if view is not None:
        raise _computing(name, f"a view {view!s:.60}")


def _guard_of(table_name: str) -> str:
    """The statement of the trigger that forbids editing rows, exactly as the migrations write it."""
    return (
        f"CREATE TRIGGER {table_name}_is_never_edited BEFORE UPDATE ON {table_name} "
        f"BEGIN SELECT RAISE(ABORT, 'rows of {table_name} are appended, never edited'); END"
    )


def _refuse_foreign_tables(connection: Connection, name: str) -> None:
    """Refuse a file with any table: another program's. A server may be shared while no name collides."""
    tables = set(inspect(connection).get_table_names())
    if connection.dialect.name != "sqlite":
        tables &= set(METADATA.tables)
    if tables:
        raise ForeignDatabaseError(
            f"database {name} belongs to another program (it has a table {min(tables)!r:.60}): "
            "name another with --db"
        )


def upgrade(
    connection: Connection, name: str, before_changing: Callable[[], None] = lambda: None
) -> SchemaChange:
    """Bring the database to HEAD inside the caller's transaction, which on SQLite holds the write lock.
    before_changing: called first where there are rows of an older schema."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _UPGRADE_LOCK})
    before = read_revision(connection, name)
    if before is None and connection.dialect.name == "sqlite":
        _create_file(connection)
    elif before != HEAD:
        if before is not None:
            before_changing()
        migrate(connection)
    return SchemaChange(before, HEAD)


def migrate(connection: Connection) -> None:
    """Bring the database to HEAD by all migrations that it lacks."""
    from alembic import command

    command.upgrade(alembic_config(connection), "head")


def _create_file(connection: Connection) -> None:
    """Create what all migrations make of an empty file, in a tenth of the time; tests compare the two."""
    METADATA.create_all(connection, checkfirst=False)
    for name in sorted(_GUARDED):
        connection.execute(text(_guard_of(name)))
    connection.execute(
        text(
            f"CREATE TABLE {VERSION_TABLE} (version_num VARCHAR(32) NOT NULL, "
            f"CONSTRAINT {VERSION_TABLE}_pkc PRIMARY KEY (version_num))"
        )
    )
    connection.execute(text(f"INSERT INTO {VERSION_TABLE} VALUES (:head)"), {"head": HEAD})


def alembic_config(connection: Connection) -> Config:
    """Make Alembic's configuration, in place of an alembic.ini, for which a wheel has no good place."""
    from alembic.config import Config

    config = Config()
    # `%` is the configuration's own escape character.
    config.set_main_option(
        "script_location", str(Path(phasewise.migrations.__file__).parent).replace("%", "%%")
    )
    config.set_main_option("path_separator", "os")
    config.set_main_option("file_template", "v%%(rev)s_%%(slug)s")
    config.attributes["version_table"] = VERSION_TABLE
    config.attributes["connection"] = connection
    return config

"""Statements that revisions share: what released revisions did. No line of them is ever changed."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
WORD = sa.String(32)
LINE = sa.String(255)


def column(name: str, of_type: sa.types.TypeEngine[Any], comment: str | None = None) -> sa.Column[Any]:
    """A column that is never null."""
    return sa.Column(name, of_type, nullable=False, comment=comment)


def id_column() -> sa.Column[Any]:
    """The number of a row."""
    return column("id", ROW_ID)


def core_column() -> sa.Column[Any]:
    """The kind of core."""
    return column("core_sig", LINE, "topology.signature, per-core half")


def sample_columns() -> tuple[sa.Column[Any], ...]:
    """A timing."""
    return (
        column("samples_ns", sa.JSON(), "raw samples, a list in the order taken"),
        column("estimate_ns", sa.BigInteger(), "robust estimate over samples_ns"),
    )


def conditions_column() -> sa.Column[Any]:
    """The surroundings of a timing."""
    return column("conditions", sa.JSON(), "name to number: what the timer noticed around it")


def comparison_columns(gain: str = "incumbent's time / candidate's time") -> tuple[sa.Column[Any], ...]:
    """A paired comparison. gain: what it is, in words."""
    return (
        column("gain", sa.Double(), gain),
        column("gain_low", sa.Double(), "of the confidence interval"),
        column("gain_high", sa.Double()),
        column("confidence", sa.Double(), "of the interval, 0..1"),
        column("pairs", sa.Integer(), "timings of each of the two"),
    )


def end_columns(verified: str) -> tuple[sa.Column[Any], ...]:
    """Program, time, and whether a row is trusted: what that means, in words."""
    return (
        column("program_version", LINE, "phasewise that wrote the row"),
        column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        column("verified", sa.Boolean(), verified),
    )


def primary_key(table: str) -> sa.PrimaryKeyConstraint:
    """By a row's number."""
    return sa.PrimaryKeyConstraint("id", name=f"pk_{table}")


def refuse_updates(table: str) -> None:
    """Rows are appended, never edited. Deleting whole rows stays possible."""
    message = f"rows of {table} are appended, never edited"
    trigger = f"CREATE TRIGGER {table}_is_never_edited BEFORE UPDATE ON {table}"
    dialect = op.get_bind().dialect.name
    if dialect == "sqlite":
        op.execute(f"{trigger} BEGIN SELECT RAISE(ABORT, '{message}'); END")
    elif dialect == "postgresql":
        op.execute(
            f"CREATE FUNCTION {table}_is_never_edited() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{message}'; END $$"
        )
        op.execute(f"{trigger} EXECUTE FUNCTION {table}_is_never_edited()")

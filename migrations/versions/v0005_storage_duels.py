"""Duels of storages of a weight: between sparse and dense.

Revision 0005, after 0004.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LINE = sa.String(255)
TABLE = "storage_duel"


def upgrade() -> None:
    _create_table()
    _refuse_updates()


def _refuse_updates() -> None:
    """Rows are appended, never edited. Deleting whole rows stays possible."""
    message = f"rows of {TABLE} are appended, never edited"
    trigger = f"CREATE TRIGGER {TABLE}_is_never_edited BEFORE UPDATE ON {TABLE}"
    dialect = op.get_bind().dialect.name
    if dialect == "sqlite":
        op.execute(f"{trigger} BEGIN SELECT RAISE(ABORT, '{message}'); END")
    elif dialect == "postgresql":
        op.execute(
            f"CREATE FUNCTION {TABLE}_is_never_edited() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{message}'; END $$"
        )
        op.execute(f"{trigger} EXECUTE FUNCTION {TABLE}_is_never_edited()")


def _column(name: str, of_type: sa.types.TypeEngine[Any], comment: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, of_type, nullable=False, comment=comment)


def _create_table() -> None:
    op.create_table(
        TABLE,
        _column("id", ROW_ID),
        _column("problem_id", ROW_ID, "of the sparse weight: its format names the sixteenths that are kept"),
        _column("schedule_id", ROW_ID, "of the sparse weight"),
        _column("dense_schedule_id", ROW_ID, "of the same weight stored dense"),
        _column("core_sig", LINE, "topology.signature, per-core half"),
        _column("placement_sig", LINE, "topology.signature, sharing half"),
        _column("kernel_abi", LINE, "hash over the kernel family's body and flags"),
        _column("gain", sa.Double(), "dense's time / sparse's time"),
        _column("gain_low", sa.Double(), "of the confidence interval"),
        _column("gain_high", sa.Double()),
        _column("confidence", sa.Double(), "of the interval, 0..1"),
        _column("pairs", sa.Integer(), "timings of each of the two"),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "compared here; false: imported"),
        sa.PrimaryKeyConstraint("id", name=f"pk_{TABLE}"),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=f"fk_{TABLE}_problem_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name=f"fk_{TABLE}_schedule_id"),
        sa.ForeignKeyConstraint(["dense_schedule_id"], ["schedule.id"], name=f"fk_{TABLE}_dense_schedule_id"),
    )
    op.create_index(f"ix_{TABLE}_problem", TABLE, ["problem_id", "core_sig", "placement_sig", "kernel_abi"])

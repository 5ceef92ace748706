"""Timings of whole steps, so that a search over service configurations can be replayed.

Revision 0003, after 0002.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
WORD = sa.String(32)
LINE = sa.String(255)


def upgrade() -> None:
    _create_step_time()
    _refuse_updates("step_time")


def _refuse_updates(table: str) -> None:
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


def _column(name: str, of_type: sa.types.TypeEngine[Any], comment: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, of_type, nullable=False, comment=comment)


def _create_step_time() -> None:
    op.create_table(
        "step_time",
        _column("id", ROW_ID),
        _column("core_sig", LINE, "topology.signature, per-core half"),
        _column("placement_sig", LINE, "topology.signature over all allowed PUs"),
        _column("model_key", LINE, "tuner.plans.model_key: name@format"),
        _column("configuration_key", LINE, "hash over the cores of the plan's ranks"),
        _column("plan", sa.Text(), "JSON, read and checked by tuner.plans"),
        _column("kernels", WORD, "default or tuned: by which schedules products ran"),
        _column("kernel_abi", LINE, "of the family that most time is spent in"),
        _column("phase", WORD, "prefill or decode"),
        _column("tokens", sa.Integer(), "new tokens of each sequence"),
        _column("sequences", sa.Integer()),
        _column("context", sa.Integer(), "tokens that each sequence has behind it"),
        _column("samples_ns", sa.JSON(), "raw samples, a list in the order taken"),
        _column("estimate_ns", sa.BigInteger(), "robust estimate over samples_ns"),
        _column("conditions", sa.JSON(), "name to number: what the timer noticed around it"),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "measured here; false: imported"),
        sa.PrimaryKeyConstraint("id", name="pk_step_time"),
    )
    op.create_index("ix_step_time_key", "step_time", ["model_key", "phase", "core_sig", "placement_sig"])

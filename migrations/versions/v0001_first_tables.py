"""Problems, schedules, measurements and service plans.

Revision 0001, after nothing.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
WORD = sa.String(32)
LINE = sa.String(255)
SCHEDULE_KEY = (
    "mr",
    "panels",
    "block_m",
    "block_n",
    "block_k",
    "threads_m",
    "threads_n",
    "threads_k",
    "compute_path",
)
APPEND_ONLY = ("measurement", "service_plan")


def upgrade() -> None:
    _create_problem()
    _create_schedule()
    _create_measurement()
    _create_service_plan()
    for table in APPEND_ONLY:
        _refuse_updates(table)


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


def _create_problem() -> None:
    op.create_table(
        "problem",
        _column("id", ROW_ID),
        _column("family", WORD, "kernel family, e.g. gemm"),
        _column("format", WORD, "weight format"),
        _column("n", sa.Integer(), "outputs"),
        _column("k", sa.Integer(), "inputs"),
        _column("m", sa.Integer(), "rows of activations"),
        sa.PrimaryKeyConstraint("id", name="pk_problem"),
        sa.UniqueConstraint("family", "format", "n", "k", "m", name="uq_problem"),
    )


def _create_schedule() -> None:
    op.create_table(
        "schedule",
        _column("id", ROW_ID),
        _column("mr", sa.Integer(), "rows of the micro-kernel"),
        _column("panels", sa.Integer(), "columns of the micro-kernel / 16"),
        _column("block_m", sa.Integer(), "computation slice"),
        _column("block_n", sa.Integer()),
        _column("block_k", sa.Integer()),
        _column("threads_m", sa.Integer(), "thread grid"),
        _column("threads_n", sa.Integer()),
        _column("threads_k", sa.Integer(), "above 1: split-K, with a reduction"),
        _column("compute_path", WORD, "a name that the kernel family knows"),
        sa.PrimaryKeyConstraint("id", name="pk_schedule"),
        sa.UniqueConstraint(*SCHEDULE_KEY, name="uq_schedule"),
    )


def _create_measurement() -> None:
    op.create_table(
        "measurement",
        _column("id", ROW_ID),
        _column("problem_id", ROW_ID),
        _column("schedule_id", ROW_ID),
        _column("core_sig", LINE, "topology.signature, per-core half"),
        _column("placement_sig", LINE, "topology.signature, sharing half"),
        _column("kernel_abi", LINE, "hash over the kernel family's body and flags"),
        _column("samples_ns", sa.JSON(), "raw samples, a list in the order taken"),
        _column("estimate_ns", sa.BigInteger(), "robust estimate over samples_ns"),
        sa.Column("numeric_error", sa.Double(), comment="largest error seen, relative; null: not compared"),
        _column("effort_ns", sa.BigInteger(), "wall clock that the timing cost"),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "measured here; false: imported, not yet measured"),
        sa.PrimaryKeyConstraint("id", name="pk_measurement"),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_measurement_problem_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name="fk_measurement_schedule_id"),
    )
    op.create_index(
        "ix_measurement_problem", "measurement", ["problem_id", "core_sig", "placement_sig", "kernel_abi"]
    )


def _create_service_plan() -> None:
    op.create_table(
        "service_plan",
        _column("id", ROW_ID),
        _column("core_sig", LINE, "topology.signature, per-core half"),
        _column("placement_sig", LINE, "topology.signature over all allowed PUs"),
        _column("model_key", LINE, "tuner.plans.model_key: name@format"),
        _column("phase", WORD, "prefill or decode"),
        _column("plan", sa.Text(), "JSON, read and checked by tuner.plans"),
        _column("objectives", sa.JSON(), "name to value reached; empty: set by hand"),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "measured or set here; false: imported, not yet measured"),
        sa.PrimaryKeyConstraint("id", name="pk_service_plan"),
    )
    op.create_index(
        "ix_service_plan_key", "service_plan", ["model_key", "phase", "core_sig", "placement_sig"]
    )

"""A schedule's arithmetic, prefetch distance and loop order; a timing's conditions; promotions.

Revision 0002, after 0001. Rows that are there summed k in one part, without prefetch, panel blocks outermost.

On SQLite `schedule` and `measurement` are written anew, because a constraint of the first changes. The old
tables leave in the order child, parent: with foreign keys enforced, no other order can be committed.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
WORD = sa.String(32)
LINE = sa.String(255)
OLD_SCHEDULE_KEY = (
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
SCHEDULE_KEY = (*OLD_SCHEDULE_KEY, "k_parts", "prefetch_bytes", "loop_order")
OLD_MEASUREMENT = (
    "id",
    "problem_id",
    "schedule_id",
    "core_sig",
    "placement_sig",
    "kernel_abi",
    "samples_ns",
    "estimate_ns",
    "numeric_error",
    "effort_ns",
    "program_version",
    "created_at_ms",
    "verified",
)
MEASUREMENT_INDEX = ("problem_id", "core_sig", "placement_sig", "kernel_abi")


def upgrade() -> None:
    if op.get_bind().dialect.name == "sqlite":
        _rewrite_tables()
    else:
        _alter_tables()
    _create_promotion()


def _rewrite_tables() -> None:
    op.drop_index("ix_measurement_problem", "measurement")
    op.rename_table("schedule", "schedule_0001")
    op.rename_table("measurement", "measurement_0001")
    _create_schedule()
    _create_measurement()
    old_key = ", ".join(OLD_SCHEDULE_KEY)
    op.execute(
        f"INSERT INTO schedule (id, {old_key}, k_parts, prefetch_bytes, loop_order) "
        f"SELECT id, {old_key}, 1, 0, 'nm' FROM schedule_0001"
    )
    old_columns = ", ".join(OLD_MEASUREMENT)
    op.execute(
        f"INSERT INTO measurement ({old_columns}, conditions) "
        f"SELECT {old_columns}, '{{}}' FROM measurement_0001"
    )
    op.drop_table("measurement_0001")
    op.drop_table("schedule_0001")
    op.create_index("ix_measurement_problem", "measurement", list(MEASUREMENT_INDEX))
    _refuse_updates("measurement")


def _alter_tables() -> None:
    op.drop_constraint("uq_schedule", "schedule")
    for column, value in zip(_new_schedule_columns(), ("1", "0", "nm"), strict=True):
        _add_column("schedule", column, value)
    op.create_unique_constraint("uq_schedule", "schedule", list(SCHEDULE_KEY))
    _add_column("measurement", _conditions(), "{}")


def _add_column(table: str, column: sa.Column[Any], value: str) -> None:
    """Rows that are there get the value; rows to come must bring their own."""
    column.server_default = sa.DefaultClause(value)
    op.add_column(table, column)
    op.alter_column(table, column.name, server_default=None)


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


def _new_schedule_columns() -> tuple[sa.Column[Any], ...]:
    return (
        _column("k_parts", sa.Integer(), "k is summed in so many parts, added in order"),
        _column("prefetch_bytes", sa.Integer(), "ahead of a panel's reads; 0: none"),
        _column("loop_order", WORD, "nm: panel blocks outermost; mn: row blocks"),
    )


def _conditions() -> sa.Column[Any]:
    return _column("conditions", sa.JSON(), "name to number: what the timer noticed around it")


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
        *_new_schedule_columns(),
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
        _conditions(),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "measured here; false: imported, not yet measured"),
        sa.PrimaryKeyConstraint("id", name="pk_measurement"),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_measurement_problem_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name="fk_measurement_schedule_id"),
    )


def _create_promotion() -> None:
    op.create_table(
        "promotion",
        _column("id", ROW_ID),
        _column("problem_id", ROW_ID),
        _column("schedule_id", ROW_ID),
        sa.Column("incumbent_id", ROW_ID, comment="compared with; null: the kernel's default"),
        _column("core_sig", LINE, "topology.signature, per-core half"),
        _column("placement_sig", LINE, "topology.signature, sharing half"),
        _column("kernel_abi", LINE, "hash over the kernel family's body and flags"),
        _column("gain", sa.Double(), "incumbent's time / candidate's time"),
        _column("gain_low", sa.Double(), "of the confidence interval"),
        _column("gain_high", sa.Double()),
        _column("confidence", sa.Double(), "of the interval, 0..1"),
        _column("pairs", sa.Integer(), "timings of each of the two"),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "compared here; false: imported"),
        sa.PrimaryKeyConstraint("id", name="pk_promotion"),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_promotion_problem_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name="fk_promotion_schedule_id"),
        sa.ForeignKeyConstraint(["incumbent_id"], ["schedule.id"], name="fk_promotion_incumbent_id"),
    )
    op.create_index(
        "ix_promotion_problem", "promotion", ["problem_id", "core_sig", "placement_sig", "kernel_abi"]
    )
    _refuse_updates("promotion")

"""A schedule's arithmetic, prefetch distance and loop order; a timing's conditions; promotions.

Revision 0002, after 0001. Rows that are there summed k in one part, without prefetch, panel blocks outermost.

On SQLite `schedule` and `measurement` are written anew, because a constraint of the first changes. The old
tables leave in the order child, parent: with foreign keys enforced, no other order can be committed.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

from phasewise.migrations import ddl

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

OLD_SCHEDULE_KEY = (
    *("mr", "panels", "block_m", "block_n", "block_k", "threads_m", "threads_n", "threads_k"),
    "compute_path",
)
SCHEDULE_KEY = (*OLD_SCHEDULE_KEY, "k_parts", "prefetch_bytes", "loop_order")
OLD_MEASUREMENT = (
    *("id", "problem_id", "schedule_id", "core_sig", "placement_sig", "kernel_abi", "samples_ns"),
    *("estimate_ns", "numeric_error", "effort_ns", "program_version", "created_at_ms", "verified"),
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
    ddl.refuse_updates("measurement")


def _alter_tables() -> None:
    op.drop_constraint("uq_schedule", "schedule")
    for added, value in zip(_new_schedule_columns(), ("1", "0", "nm"), strict=True):
        _add_column("schedule", added, value)
    op.create_unique_constraint("uq_schedule", "schedule", list(SCHEDULE_KEY))
    _add_column("measurement", ddl.conditions_column(), "{}")


def _add_column(table: str, column: sa.Column[Any], value: str) -> None:
    """Rows that are there get the value; rows to come must bring their own."""
    column.server_default = sa.DefaultClause(value)
    op.add_column(table, column)
    op.alter_column(table, column.name, server_default=None)


def _new_schedule_columns() -> tuple[sa.Column[Any], ...]:
    return (
        ddl.column("k_parts", sa.Integer(), "k is summed in so many parts, added in order"),
        ddl.column("prefetch_bytes", sa.Integer(), "ahead of a panel's reads; 0: none"),
        ddl.column("loop_order", ddl.WORD, "nm: panel blocks outermost; mn: row blocks"),
    )


def _create_schedule() -> None:
    op.create_table(
        "schedule",
        ddl.id_column(),
        ddl.column("mr", sa.Integer(), "rows of the micro-kernel"),
        ddl.column("panels", sa.Integer(), "columns of the micro-kernel / 16"),
        ddl.column("block_m", sa.Integer(), "computation slice"),
        ddl.column("block_n", sa.Integer()),
        ddl.column("block_k", sa.Integer()),
        ddl.column("threads_m", sa.Integer(), "thread grid"),
        ddl.column("threads_n", sa.Integer()),
        ddl.column("threads_k", sa.Integer(), "above 1: split-K, with a reduction"),
        ddl.column("compute_path", ddl.WORD, "a name that the kernel family knows"),
        *_new_schedule_columns(),
        ddl.primary_key("schedule"),
        sa.UniqueConstraint(*SCHEDULE_KEY, name="uq_schedule"),
    )


def _create_measurement() -> None:
    op.create_table(
        "measurement",
        ddl.id_column(),
        ddl.column("problem_id", ddl.ROW_ID),
        ddl.column("schedule_id", ddl.ROW_ID),
        ddl.core_column(),
        ddl.column("placement_sig", ddl.LINE, "topology.signature, sharing half"),
        ddl.column("kernel_abi", ddl.LINE, "hash over the kernel family's body and flags"),
        *ddl.sample_columns(),
        sa.Column("numeric_error", sa.Double(), comment="largest error seen, relative; null: not compared"),
        ddl.column("effort_ns", sa.BigInteger(), "wall clock that the timing cost"),
        ddl.conditions_column(),
        *ddl.end_columns("measured here; false: imported, not yet measured"),
        ddl.primary_key("measurement"),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_measurement_problem_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name="fk_measurement_schedule_id"),
    )


def _create_promotion() -> None:
    op.create_table(
        "promotion",
        ddl.id_column(),
        ddl.column("problem_id", ddl.ROW_ID),
        ddl.column("schedule_id", ddl.ROW_ID),
        sa.Column("incumbent_id", ddl.ROW_ID, comment="compared with; null: the kernel's default"),
        ddl.core_column(),
        ddl.column("placement_sig", ddl.LINE, "topology.signature, sharing half"),
        ddl.column("kernel_abi", ddl.LINE, "hash over the kernel family's body and flags"),
        *ddl.comparison_columns(),
        *ddl.end_columns("compared here; false: imported"),
        ddl.primary_key("promotion"),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_promotion_problem_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name="fk_promotion_schedule_id"),
        sa.ForeignKeyConstraint(["incumbent_id"], ["schedule.id"], name="fk_promotion_incumbent_id"),
    )
    op.create_index(
        "ix_promotion_problem", "promotion", ["problem_id", "core_sig", "placement_sig", "kernel_abi"]
    )
    ddl.refuse_updates("promotion")

"""Problems, schedules, measurements and service plans.

Revision 0001, after nothing.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from phasewise.migrations import ddl

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

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
        ddl.refuse_updates(table)


def _create_problem() -> None:
    op.create_table(
        "problem",
        ddl.id_column(),
        ddl.column("family", ddl.WORD, "kernel family, e.g. gemm"),
        ddl.column("format", ddl.WORD, "weight format"),
        ddl.column("n", sa.Integer(), "outputs"),
        ddl.column("k", sa.Integer(), "inputs"),
        ddl.column("m", sa.Integer(), "rows of activations"),
        ddl.primary_key("problem"),
        sa.UniqueConstraint("family", "format", "n", "k", "m", name="uq_problem"),
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
        *ddl.end_columns("measured here; false: imported, not yet measured"),
        ddl.primary_key("measurement"),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name="fk_measurement_problem_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name="fk_measurement_schedule_id"),
    )
    op.create_index(
        "ix_measurement_problem", "measurement", ["problem_id", "core_sig", "placement_sig", "kernel_abi"]
    )


def _create_service_plan() -> None:
    op.create_table(
        "service_plan",
        ddl.id_column(),
        ddl.core_column(),
        ddl.column("placement_sig", ddl.LINE, "topology.signature over all allowed PUs"),
        ddl.column("model_key", ddl.LINE, "tuner.plans.model_key: name@format"),
        ddl.column("phase", ddl.WORD, "prefill or decode"),
        ddl.column("plan", sa.Text(), "JSON, read and checked by tuner.plans"),
        ddl.column("objectives", sa.JSON(), "name to value reached; empty: set by hand"),
        *ddl.end_columns("measured or set here; false: imported, not yet measured"),
        ddl.primary_key("service_plan"),
    )
    op.create_index(
        "ix_service_plan_key", "service_plan", ["model_key", "phase", "core_sig", "placement_sig"]
    )

"""Duels of storages of a weight: between sparse and dense.

Revision 0005, after 0004.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from phasewise.migrations import ddl

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

TABLE = "storage_duel"


def upgrade() -> None:
    _create_table()
    ddl.refuse_updates(TABLE)


def _create_table() -> None:
    op.create_table(
        TABLE,
        ddl.id_column(),
        ddl.column(
            "problem_id", ddl.ROW_ID, "of the sparse weight: its format names the sixteenths that are kept"
        ),
        ddl.column("schedule_id", ddl.ROW_ID, "of the sparse weight"),
        ddl.column("dense_schedule_id", ddl.ROW_ID, "of the same weight stored dense"),
        ddl.core_column(),
        ddl.column("placement_sig", ddl.LINE, "topology.signature, sharing half"),
        ddl.column("kernel_abi", ddl.LINE, "hash over the kernel family's body and flags"),
        *ddl.comparison_columns("dense's time / sparse's time"),
        *ddl.end_columns("compared here; false: imported"),
        ddl.primary_key(TABLE),
        sa.ForeignKeyConstraint(["problem_id"], ["problem.id"], name=f"fk_{TABLE}_problem_id"),
        sa.ForeignKeyConstraint(["schedule_id"], ["schedule.id"], name=f"fk_{TABLE}_schedule_id"),
        sa.ForeignKeyConstraint(["dense_schedule_id"], ["schedule.id"], name=f"fk_{TABLE}_dense_schedule_id"),
    )
    op.create_index(f"ix_{TABLE}_problem", TABLE, ["problem_id", "core_sig", "placement_sig", "kernel_abi"])

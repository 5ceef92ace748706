"""Indexes that begin with the machine: a start reads its own rows, whatever a fleet has added.

Those of timings hold all that counts and choices need, so that no row is read for them. Narrow ones by
problem and by schedule are for deletions, which look for rows that name what goes.

Revision 0006, after 0005.
"""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

MACHINE = ["core_sig", "placement_sig", "kernel_abi", "problem_id"]


def upgrade() -> None:
    for table in ("measurement", "promotion", "storage_duel"):
        op.drop_index(f"ix_{table}_problem", table)
        op.create_index(f"ix_{table}_problem", table, ["problem_id"])
    op.create_index("ix_measurement_schedule", "measurement", ["schedule_id"])
    op.create_index("ix_measurement_key", "measurement", [*MACHINE, "verified", "schedule_id", "estimate_ns"])
    op.create_index("ix_promotion_key", "promotion", MACHINE)
    op.create_index("ix_storage_duel_key", "storage_duel", MACHINE)

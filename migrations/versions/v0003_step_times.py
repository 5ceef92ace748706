"""Timings of whole steps, so that a search over service configurations can be replayed.

Revision 0003, after 0002.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from phasewise.migrations import ddl

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_step_time()
    ddl.refuse_updates("step_time")


def _create_step_time() -> None:
    op.create_table(
        "step_time",
        ddl.id_column(),
        ddl.core_column(),
        ddl.column("placement_sig", ddl.LINE, "topology.signature over all allowed PUs"),
        ddl.column("model_key", ddl.LINE, "tuner.plans.model_key: name@format"),
        ddl.column("configuration_key", ddl.LINE, "hash over the cores of the plan's ranks"),
        ddl.column("plan", sa.Text(), "JSON, read and checked by tuner.plans"),
        ddl.column("kernels", ddl.WORD, "default or tuned: by which schedules products ran"),
        ddl.column("kernel_abi", ddl.LINE, "of the family that most time is spent in"),
        ddl.column("phase", ddl.WORD, "prefill or decode"),
        ddl.column("tokens", sa.Integer(), "new tokens of each sequence"),
        ddl.column("sequences", sa.Integer()),
        ddl.column("context", sa.Integer(), "tokens that each sequence has behind it"),
        *ddl.sample_columns(),
        ddl.conditions_column(),
        *ddl.end_columns("measured here; false: imported"),
        ddl.primary_key("step_time"),
    )
    op.create_index("ix_step_time_key", "step_time", ["model_key", "phase", "core_sig", "placement_sig"])

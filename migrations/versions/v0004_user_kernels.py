"""Parameters of kernels that users bring: their timings, and which are in use.

Revision 0004, after 0003.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from phasewise.migrations import ddl

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    _create_timing()
    ddl.refuse_updates("user_kernel_timing")
    _create_promotion()
    ddl.refuse_updates("user_kernel_promotion")


_KEY = (
    ("core_sig", ddl.LINE, "topology.signature, per-core half"),
    ("name", ddl.LINE, "of the kernel's function"),
    ("kernel_abi", ddl.LINE, "hash over the kernel's text and its lowered C"),
    ("shape", sa.JSON(), "pairs: argument, whole number"),
    ("parameters", sa.JSON(), "pairs: parameter, value"),
)


def _create_timing() -> None:
    op.create_table(
        "user_kernel_timing",
        ddl.id_column(),
        *(ddl.column(*own) for own in _KEY),
        *ddl.sample_columns(),
        ddl.conditions_column(),
        *ddl.end_columns("measured here; false: imported, not yet measured"),
        ddl.primary_key("user_kernel_timing"),
    )
    op.create_index("ix_user_kernel_timing_key", "user_kernel_timing", ["core_sig", "kernel_abi"])


def _create_promotion() -> None:
    op.create_table(
        "user_kernel_promotion",
        ddl.id_column(),
        *(ddl.column(*own) for own in _KEY),
        ddl.column("incumbent", sa.JSON(), "compared with; pairs as above"),
        *ddl.comparison_columns(),
        *ddl.end_columns("compared here; false: imported"),
        ddl.primary_key("user_kernel_promotion"),
    )
    op.create_index("ix_user_kernel_promotion_key", "user_kernel_promotion", ["core_sig", "kernel_abi"])

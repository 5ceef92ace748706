"""Parameters of kernels that users bring: their timings, and which are in use.

Revision 0004, after 0003.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
LINE = sa.String(255)


def upgrade() -> None:
    _create_timing()
    _refuse_updates("user_kernel_timing")
    _create_promotion()
    _refuse_updates("user_kernel_promotion")


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


_KEY = (
    ("core_sig", LINE, "topology.signature, per-core half"),
    ("name", LINE, "of the kernel's function"),
    ("kernel_abi", LINE, "hash over the kernel's text and its lowered C"),
    ("shape", sa.JSON(), "pairs: argument, whole number"),
    ("parameters", sa.JSON(), "pairs: parameter, value"),
)


def _create_timing() -> None:
    op.create_table(
        "user_kernel_timing",
        _column("id", ROW_ID),
        *(_column(*column) for column in _KEY),
        _column("samples_ns", sa.JSON(), "raw samples, a list in the order taken"),
        _column("estimate_ns", sa.BigInteger(), "robust estimate over samples_ns"),
        _column("conditions", sa.JSON(), "name to number: what the timer noticed around it"),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "measured here; false: imported, not yet measured"),
        sa.PrimaryKeyConstraint("id", name="pk_user_kernel_timing"),
    )
    op.create_index("ix_user_kernel_timing_key", "user_kernel_timing", ["core_sig", "kernel_abi"])


def _create_promotion() -> None:
    op.create_table(
        "user_kernel_promotion",
        _column("id", ROW_ID),
        *(_column(*column) for column in _KEY),
        _column("incumbent", sa.JSON(), "compared with; pairs as above"),
        _column("gain", sa.Double(), "incumbent's time / candidate's time"),
        _column("gain_low", sa.Double(), "of the confidence interval"),
        _column("gain_high", sa.Double()),
        _column("confidence", sa.Double(), "of the interval, 0..1"),
        _column("pairs", sa.Integer(), "timings of each of the two"),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "compared here; false: imported"),
        sa.PrimaryKeyConstraint("id", name="pk_user_kernel_promotion"),
    )
    op.create_index("ix_user_kernel_promotion_key", "user_kernel_promotion", ["core_sig", "kernel_abi"])

"""Scores of predictors of answers' lengths.

Revision 0007, after 0006.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

ROW_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
WORD = sa.String(32)
LINE = sa.String(255)
TABLE = "predictor_score"


def upgrade() -> None:
    _create_table()
    _refuse_updates()


def _refuse_updates() -> None:
    """Rows are appended, never edited. Deleting whole rows stays possible."""
    message = f"rows of {TABLE} are appended, never edited"
    trigger = f"CREATE TRIGGER {TABLE}_is_never_edited BEFORE UPDATE ON {TABLE}"
    dialect = op.get_bind().dialect.name
    if dialect == "sqlite":
        op.execute(f"{trigger} BEGIN SELECT RAISE(ABORT, '{message}'); END")
    elif dialect == "postgresql":
        op.execute(
            f"CREATE FUNCTION {TABLE}_is_never_edited() RETURNS trigger LANGUAGE plpgsql AS "
            f"$$ BEGIN RAISE EXCEPTION '{message}'; END $$"
        )
        op.execute(f"{trigger} EXECUTE FUNCTION {TABLE}_is_never_edited()")


def _column(name: str, of_type: sa.types.TypeEngine[Any], comment: str | None = None) -> sa.Column[Any]:
    return sa.Column(name, of_type, nullable=False, comment=comment)


def _create_table() -> None:
    op.create_table(
        TABLE,
        _column("id", ROW_ID),
        _column("core_sig", LINE, "topology.signature, per-core half"),
        _column("placement_sig", LINE, "topology.signature over all allowed PUs"),
        _column("model_name", LINE, "whose answers they are"),
        _column("reads", LINE, "tokens, or the embedding model that reads prompts"),
        _column("answers_key", LINE, "hash over the answers that judged it"),
        _column("judged_by", WORD, "held_out, folds or drift"),
        _column("learnt_answers", sa.Integer(), "answers that it learnt from"),
        _column("judged_answers", sa.Integer(), "answers that judged it"),
        _column("hold", sa.Double(), "share of answers that rooms were to hold, 0..1"),
        _column("figures", sa.JSON(), "name to number, e.g. accuracy, coverage_90"),
        _column("program_version", LINE, "phasewise that wrote the row"),
        _column("created_at_ms", sa.BigInteger(), "Unix time, UTC"),
        _column("verified", sa.Boolean(), "judged here; false: imported"),
        sa.PrimaryKeyConstraint("id", name=f"pk_{TABLE}"),
    )
    op.create_index(f"ix_{TABLE}_key", TABLE, ["model_name", "answers_key"])

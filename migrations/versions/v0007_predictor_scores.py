"""Scores of predictors of answers' lengths.

Revision 0007, after 0006.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from phasewise.migrations import ddl

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

TABLE = "predictor_score"


def upgrade() -> None:
    _create_table()
    ddl.refuse_updates(TABLE)


def _create_table() -> None:
    op.create_table(
        TABLE,
        ddl.id_column(),
        ddl.core_column(),
        ddl.column("placement_sig", ddl.LINE, "topology.signature over all allowed PUs"),
        ddl.column("model_name", ddl.LINE, "whose answers they are"),
        ddl.column("reads", ddl.LINE, "tokens, or the embedding model that reads prompts"),
        ddl.column("answers_key", ddl.LINE, "hash over the answers that judged it"),
        ddl.column("judged_by", ddl.WORD, "held_out, folds or drift"),
        ddl.column("learnt_answers", sa.Integer(), "answers that it learnt from"),
        ddl.column("judged_answers", sa.Integer(), "answers that judged it"),
        ddl.column("hold", sa.Double(), "share of answers that rooms were to hold, 0..1"),
        ddl.column("figures", sa.JSON(), "name to number, e.g. accuracy, coverage_90"),
        *ddl.end_columns("judged here; false: imported"),
        ddl.primary_key(TABLE),
    )
    op.create_index(f"ix_{TABLE}_key", TABLE, ["model_name", "answers_key"])

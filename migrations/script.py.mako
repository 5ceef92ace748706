"""${message}

Revision ${up_revision}, after ${down_revision or "nothing"}.

Keep in mind:
- Define the tables used here with `sa.table` or `op.create_table`. Never import today's models: they will change.
- Rows may be a stranger's. Refuse what cannot be converted, and say which row; do not guess.
- Programs of the revision before may go on reading: add, and give what changes its meaning another name.
  Where they would misread rows all the same, name the revision in `kerneldb.schema.BREAKING`.
- SQLite rewrites a table to alter it (`op.batch_alter_table`), and loses its triggers: create them again.
- All of it runs in one transaction, while other processes wait. Do not loop over measurements in Python.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
${imports if imports else ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}

"""Alembic's entry: runs revisions in the transaction that `phasewise.kerneldb.schema` hands over."""

from __future__ import annotations

from alembic import context

from phasewise.kerneldb.tables import METADATA

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=METADATA,
    version_table=context.config.attributes["version_table"],
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()

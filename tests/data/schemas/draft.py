"""Draft the next migration: `python -m tests.data.schemas.draft 'what changes'`."""

from __future__ import annotations

import sys

from alembic import command
from sqlalchemy import create_engine

from phasewise.kerneldb import schema


def draft_revision(message: str) -> None:
    """Write its file from the difference between the newest schema and today's models."""
    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        schema.migrate(connection)
        config = schema.alembic_config(connection)
        command.revision(config, message, autogenerate=True, rev_id=f"{len(schema.REVISIONS) + 1:04}")
    engine.dispose()


if __name__ == "__main__":
    draft_revision(sys.argv[1])

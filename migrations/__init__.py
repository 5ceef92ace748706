"""The history of the database schema, one Alembic revision a file, shipped with the program.

To change the schema: edit `phasewise.kerneldb.records`, then draft a revision from the difference,

    python -c "from phasewise.migrations import draft_revision; draft_revision('what changes')"

finish it by hand, add it to `schema.REVISIONS`, and keep a small database of the schema it replaces
(`tests/data/schemas/make_fixture.py`). A revision that was released is never edited.
"""


def draft_revision(message: str) -> None:
    """Write the next migration file from the difference between the newest schema and today's models."""
    from alembic import command
    from sqlalchemy import create_engine

    from phasewise.kerneldb import schema

    engine = create_engine("sqlite://")
    with engine.connect() as connection:
        schema.migrate(connection)
        config = schema.alembic_config(connection)
        command.revision(config, message, autogenerate=True, rev_id=f"{len(schema.REVISIONS) + 1:04}")
    engine.dispose()

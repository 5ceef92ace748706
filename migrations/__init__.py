"""The history of the database schema, one Alembic revision a file, shipped with the program.

To change the schema: edit `phasewise.kerneldb.records`, then draft a revision from the difference,

    python -m tests.data.schemas.draft 'what changes'

finish it by hand, add it to `schema.REVISIONS`, and keep a small database of the schema it replaces
(`tests/data/schemas/make_fixture.py`). A revision that was released is never edited.
"""

"""Write a small database of the newest schema, to be kept for ever.

    python tests/data/schemas/make_fixture.py

Run it once when a schema is about to be released. It refuses to replace a database that is already there.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

HERE = Path(__file__).resolve().parent

from phasewise.kerneldb.schema import HEAD  # noqa: E402
from phasewise.kerneldb.store import open_store  # noqa: E402
from tests.support.machines.kerneldb_examples import EVERY_KIND  # noqa: E402


def main() -> None:
    file = HERE / f"{HEAD}.db"
    if file.exists():
        raise SystemExit(f"{file} exists: the schema {HEAD} was released, and its fixture never changes")
    with open_store(file) as store:
        store.add(EVERY_KIND)
    connection = sqlite3.connect(file, isolation_level=None)
    for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"):
        connection.execute(statement)
    connection.close()
    print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()

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
from tests.support.machines.kerneldb_examples import (  # noqa: E402
    MEASUREMENT,
    PLAN,
    PREDICTOR_SCORE,
    PROMOTION,
    STEP_TIME,
    STORAGE_DUEL,
    USER_PROMOTION,
    USER_TIMING,
)


def main() -> None:
    file = HERE / f"{HEAD}.db"
    if file.exists():
        raise SystemExit(f"{file} exists: the schema {HEAD} was released, and its fixture never changes")
    with open_store(file) as store:
        store.add([MEASUREMENT])
        store.add([PROMOTION])
        store.add([STORAGE_DUEL])
        store.add([PLAN])
        store.add([STEP_TIME])
        store.add([PREDICTOR_SCORE])
        store.add([USER_TIMING])
        store.add([USER_PROMOTION])
    connection = sqlite3.connect(file, isolation_level=None)
    for statement in ("PRAGMA journal_mode = DELETE", "PRAGMA page_size = 512", "VACUUM"):
        connection.execute(statement)
    connection.close()
    print(f"{file.name}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()

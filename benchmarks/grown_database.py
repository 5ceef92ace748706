"""The tuning database of a fleet: what a start, `db show`, `stats`, `export` and `import` take on it.

    python benchmarks/grown_database.py FOLDER                 makes FOLDER/fleet.db, a million timings
    python benchmarks/grown_database.py FOLDER --postgres      the same on a PostgreSQL server of its own
    python benchmarks/grown_database.py FOLDER --model M.gguf  also a start with that model

A row for each command: seconds, seconds of processor, most memory. What was made is kept and used again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import Row, Yielded, commands
from phasewise.kerneldb.store import open_store
from tests.support.machines.grown_database import MILLION, fill
from tests.support.machines.kerneldb_server import new_database_url, postgres_socket


def grown_database(
    folder: Annotated[Path, Argument()],
    postgres: Annotated[bool, Option("--postgres")] = False,
    model: Annotated[str | None, Option()] = None,
) -> Yielded:
    with databases(folder, postgres) as (fleet, other, empty):
        file = folder / "fleet.jsonl"
        yield measured("db stats", ["db", "stats", "--db", fleet])
        yield measured("db show", ["db", "show", "--db", fleet])
        yield measured("db export", ["db", "export", "--db", fleet], file)
        yield measured("db import", ["db", "import", str(file), "--db", other])
        for name, db in (("a fleet's", fleet), ("an empty one", empty)):
            if model:
                yield measured(f"generate, {name}", ["generate", model, "hello", "-n", "1", "--db", db])


@contextlib.contextmanager
def databases(folder: Path, on_server: bool) -> Iterator[tuple[str, str, str]]:
    """The fleet's database, and two that are empty."""
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        if on_server:
            socket = stack.enter_context(postgres_socket())
            names = [new_database_url(socket) for _ in range(3)]
        else:
            names = [str(folder / f"{name}.db") for name in ("fleet", "other", "empty")]
            Path(names[1]).unlink(missing_ok=True)
        for name in names:
            with open_store(name, print) as store:
                if name is names[0] and not store.key_counts():
                    fill(store, MILLION)
        yield names[0], names[1], names[2]


def measured(name: str, arguments: Sequence[str], output: Path | None = None) -> Row:
    """The row of a command that is run."""
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(output.open("wb")) if output else subprocess.DEVNULL
        process = subprocess.Popen([sys.executable, "-m", "phasewise", *arguments], stdout=out)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}")
    row = {"command": name, "s": time.monotonic() - began_s}
    return row | {"processor s": used.ru_utime + used.ru_stime, "MB": used.ru_maxrss / 1024}


app = commands(__doc__, grown_database)

if __name__ == "__main__":
    app()

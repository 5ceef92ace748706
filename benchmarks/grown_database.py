"""The tuning database of a fleet: what a start, `db show`, `stats`, `export` and `import` take on it.

    python benchmarks/grown_database.py FOLDER                 makes FOLDER/fleet.db, a million timings
    python benchmarks/grown_database.py FOLDER --postgres      the same on a PostgreSQL server of its own
    python benchmarks/grown_database.py FOLDER --model M.gguf  also a start with that model

A row for each command: seconds, seconds of processor, most memory. What was made is kept and used again.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from phasewise.kerneldb.store import open_store
from tests.support.machines.grown_database import MILLION, fill
from tests.support.machines.kerneldb_server import new_database_url, postgres_socket

ROW = "| {:28} | {:>8.1f} | {:>8.1f} | {:>6.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--model")
    arguments = parser.parse_args()
    with databases(arguments.folder, arguments.postgres) as (fleet, other, empty):
        print("| command | s | processor s | MB |\n|---|---|---|---|")
        file = arguments.folder / "fleet.jsonl"
        measure("db stats", ["db", "stats", "--db", fleet])
        measure("db show", ["db", "show", "--db", fleet])
        measure("db export", ["db", "export", "--db", fleet], file)
        measure("db import", ["db", "import", str(file), "--db", other])
        for name, db in (("a fleet's", fleet), ("an empty one", empty)):
            if arguments.model:
                measure(f"generate, {name}", ["generate", arguments.model, "hello", "-n", "1", "--db", db])


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


def measure(name: str, arguments: Sequence[str], output: Path | None = None) -> None:
    """Run a command and print its row."""
    began_s = time.monotonic()
    with contextlib.ExitStack() as stack:
        out = stack.enter_context(output.open("wb")) if output else subprocess.DEVNULL
        process = subprocess.Popen([sys.executable, "-m", "phasewise", *arguments], stdout=out)
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}")
    processor_s = used.ru_utime + used.ru_stime
    print(ROW.format(name, time.monotonic() - began_s, processor_s, used.ru_maxrss / 1024))


if __name__ == "__main__":
    main()

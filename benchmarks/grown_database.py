"""The tuning database of a fleet: what a start, `db show`, `stats`, `export` and `import` take on it.

    python benchmarks/grown_database.py FOLDER                 makes FOLDER/fleet.db, a million timings
    python benchmarks/grown_database.py FOLDER --postgres      the same on a PostgreSQL server of its own
    python benchmarks/grown_database.py FOLDER --model M.gguf  also a start with that model
    python benchmarks/grown_database.py FOLDER --before TREE   in turns with the program of another checkout

A row for each command: seconds, seconds of processor, most memory; on a server also its own seconds of
processor. What was made is kept and used again; the server gets it from the file by `db import`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from benchmarks.harness import Row, Yielded, commands
from phasewise.kerneldb.store import open_store
from tests.support.machines.grown_database import MILLION, fill
from tests.support.machines.kerneldb_server import new_database_url, postgres_socket

ROOT = Path(__file__).resolve().parent.parent
REPEATS = 3


def grown_database(
    folder: Annotated[Path, Argument()],
    postgres: Annotated[bool, Option("--postgres")] = False,
    model: Annotated[str | None, Option()] = None,
    before: Annotated[Path | None, Option(help="a checkout of an earlier program, its kernels built")] = None,
) -> Yielded:
    programs = {"": ROOT} | ({"before": before.resolve()} if before else {})
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    fleet, file = str(folder / "fleet.db"), folder / "fleet.jsonl"
    with open_store(fleet, print) as store:
        if not store.key_counts():
            fill(store, MILLION)
    with contextlib.ExitStack() as stack:
        socket = stack.enter_context(postgres_socket()) if postgres else None
        run = Measured(programs, socket)
        if not postgres:
            yield from run("db export", ["db", "export", "--db", fleet], file)
        elif not file.exists():
            run.once(ROOT, ["db", "export", "--db", fleet], file)
        others = [
            new_database_url(socket) if socket else str(folder / f"other{name}.db") for name in programs
        ]
        for (name, program), other in zip(programs.items(), others, strict=True):
            if not socket:
                Path(other).unlink(missing_ok=True)
            yield run.row(name, program, "db import", ["db", "import", str(file), "--db", other])
        grown = others[0]
        if postgres:
            yield from run("db export", ["db", "export", "--db", grown], folder / "again.jsonl")
        for _ in range(REPEATS):
            yield from run("db stats", ["db", "stats", "--db", grown])
            yield from run("db show", ["db", "show", "--db", grown])
        empty = new_database_url(socket) if socket else str(folder / "empty.db")
        with open_store(empty, print):
            pass
        for name, db in (("a fleet's", grown), ("an empty one", empty)) * REPEATS if model else ():
            yield from run(f"generate, {name}", ["generate", str(model), "hello", "-n", "1", "--db", db])


@dataclass(frozen=True)
class Measured:
    """Runs commands by each program in turn, and measures each."""

    programs: Mapping[str, Path]
    socket: Path | None
    """Of a server."""

    def __call__(self, name: str, arguments: Sequence[str], output: Path | None = None) -> Iterator[Row]:
        for when, program in self.programs.items():
            yield self.row(when, program, name, arguments, output)

    def row(
        self, when: str, program: Path, name: str, arguments: Sequence[str], output: Path | None = None
    ) -> Row:
        """The row of a command that is run."""
        began_s, server_s = time.monotonic(), self._server_s()
        used = self.once(program, arguments, output)
        row: dict[str, object] = {"command": " ".join([name, when]).strip(), "s": time.monotonic() - began_s}
        row |= {"processor s": used.ru_utime + used.ru_stime, "MB": used.ru_maxrss / 1024}
        return row | ({"server s": self._server_s() - server_s} if self.socket else {})

    def once(self, program: Path, arguments: Sequence[str], output: Path | None) -> resource.struct_rusage:
        with contextlib.ExitStack() as stack:
            out = stack.enter_context(output.open("wb")) if output else subprocess.DEVNULL
            command = [sys.executable, "-m", "phasewise", *arguments]
            environment = os.environ | {"PYTHONPATH": str(program)}
            process = subprocess.Popen(command, stdout=out, env=environment, cwd=program)
            _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        return used

    def _server_s(self) -> float:
        """Seconds of processor of a server, and of its processes that have ended."""
        if self.socket is None:
            return 0.0
        pid = (self.socket / "data/postmaster.pid").read_text().split()[0]
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


app = commands(__doc__, grown_database)

if __name__ == "__main__":
    app()

"""Time of one search by two processes, beside that by one.

    python benchmarks/two_searches.py [-n ROUNDS] [-p PROCESSES] -- MODEL [options of tune-config]

Runs `phasewise tune-config` alone, then N at the same time on one database, a new one each time, in
turns. A round of several has ended when the last of them has. Prints seconds, medians and their ratio, and
whether all of a round came to the same plans.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from benchmarks.harness import Spread, Yielded, commands, in_turns, note, ratios


@dataclass(frozen=True)
class Round:
    """Processes that began together."""

    seconds: float
    printed: tuple[dict[str, Any], ...]
    """The printed JSON of each process."""

    @property
    def agree(self) -> bool:
        """True if all printed the same plans."""
        return all(printed["plans"] == self.printed[0]["plans"] for printed in self.printed)


def run_round(arguments: list[str], processes: int) -> Round:
    """On a new database, which keeps trials as well."""
    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "tuned.db")
        command = [sys.executable, "-m", "phasewise", "tune-config", *arguments]
        command += ["--db", database, "--storage", database, "--json"]
        started_s = time.monotonic()
        running = [
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ)
            for _ in range(processes)
        ]
        outputs = [process.communicate() for process in running]
        seconds = time.monotonic() - started_s
    for process, (_, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            raise SystemExit(f"tune-config failed: {errors.decode()[-400:]}")
    return Round(seconds, tuple(json.loads(output) for output, _ in outputs))


def two_searches(
    arguments: Annotated[list[str], Argument(help="a model, and options of tune-config after --")],
    rounds: Annotated[int, Option("-n", "--rounds")] = 5,
    processes: Annotated[int, Option("-p", "--processes")] = 2,
) -> Yielded:
    def together(count: int) -> float:
        ended = run_round(arguments, count)
        counts = ", ".join(f"{printed['evaluations']} tried, {printed['end']}" for printed in ended.printed)
        note(f"{count}: {ended.seconds:.1f} s ({counts}){'' if ended.agree else '; THEIR PLANS DIFFER'}")
        return ended.seconds

    taken = in_turns({str(count): partial(together, count) for count in (1, processes)}, rounds, warm_ups=0)
    for count, seconds in taken.items():
        yield {"processes": count, "s": Spread.of(seconds), "over one": ratios(seconds, taken["1"])}


app = commands(__doc__, two_searches)

if __name__ == "__main__":
    app()

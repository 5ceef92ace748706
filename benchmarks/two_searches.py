"""How much sooner do two processes finish one search than one does?

    python benchmarks/two_searches.py [-n ROUNDS] [-p PROCESSES] -- MODEL [options of tune-config]

Runs `phasewise tune-config` alone, then N at the same time on one database, a new one each time, in
turns. A round of several has ended when the last of them has. Prints seconds, medians and their ratio, and
whether all of a round came to the same plans.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Round:
    """Processes that began together."""

    seconds: float
    found: tuple[dict[str, Any], ...]
    """What each of them printed."""

    @property
    def agree(self) -> bool:
        """Whether all printed the same plans."""
        return all(one["plans"] == self.found[0]["plans"] for one in self.found)


def run_round(arguments: list[str], processes: int) -> Round:
    """On a new database, which keeps trials as well. Raises CalledProcessError for a process that fails."""
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
    for process, (output, errors) in zip(running, outputs, strict=True):
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, command, output, errors)
    return Round(seconds, tuple(json.loads(output) for output, _ in outputs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("-n", "--rounds", type=int, default=5)
    parser.add_argument("-p", "--processes", type=int, default=2)
    parser.add_argument("arguments", nargs="+", help="a model, and options of tune-config after --")
    chosen = parser.parse_args()
    seconds: dict[int, list[float]] = {1: [], chosen.processes: []}
    for _ in range(chosen.rounds):
        for processes, known in seconds.items():
            ended = run_round(chosen.arguments, processes)
            known.append(ended.seconds)
            counts = ", ".join(f"{one['evaluations']} tried, {one['end']}" for one in ended.found)
            plans = "" if ended.agree else "; THEIR PLANS DIFFER"
            print(f"{processes}: {ended.seconds:.1f} s ({counts}){plans}", flush=True)
    medians = {processes: statistics.median(known) for processes, known in seconds.items()}
    for processes, known in seconds.items():
        print(f"{processes}: median {medians[processes]:.1f} s, {min(known):.1f} to {max(known):.1f}")
    print(f"ratio of the medians {medians[chosen.processes] / medians[1]:.2f}")


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(f"tune-config failed: {error.stderr.decode()[-400:]}")

"""Whole searches by each instruction set of this core, recorded for `nearest_machines.py --recordings`.

    python benchmarks/record_searches.py FOLDER [--isas avx2,avx512,avx512_vnni]

FOLDER/ISA.jsonl.gz is what `db export` would print of that search: one timing of every schedule that was
asked for, cold and begun with the winners of the others. A timing is the least of some shuffled rounds over
the least of the default schedule in the same rounds, times the default's first: so a busy machine moves both.
Run again, it times only what is new. Each instruction set is a process of its own, which holds the lock of
measurements while it times.
"""

from __future__ import annotations

import gzip
import math
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from typer import Option

from benchmarks.harness import Yielded, commands, cores_of, listed, note, numbers, shapes
from benchmarks.papers.rounds import shuffled_rounds
from phasewise._version import __version__
from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.portable import export_lines
from phasewise.kerneldb.records import Measurement, Origin, Problem, Sample, Schedule
from phasewise.topology import read_machine
from phasewise.tuner.measurement_lock import user_lock
from phasewise.tuner.native import NativeEvaluator, core_caches, group_of
from phasewise.tuner.plans import machine_key
from phasewise.tuner.search.group import Group, adopted
from phasewise.tuner.weights import cold_bytes
from tests.support.machines.recorded_searches import RECORDED, Asked, Recording, recordings_in, searched

THREADS = 2
ROUNDS = 25
DISTURBED = 1.1
"""Multiple of its least time from which on the default schedule was disturbed: rounds are taken again."""
MOST_TAKES = 4
AT_ONCE = 16
"""Schedules that take turns with the default one."""


def record_searches(
    folder: Path,
    isas: Annotated[str, Option(help="instruction sets")] = "avx2,avx512,avx512_vnni",
    own: Annotated[bool, Option("--own", help="only the instruction set in use")] = False,
    formats: Annotated[str, Option()] = "int8,int4m,q4_k",
    sizes: Annotated[str, Option("--shapes")] = "576,1536;2048,1024",
    rows: Annotated[str, Option("--rows")] = "1,4,8,16",
) -> Yielded:
    folder.mkdir(parents=True, exist_ok=True)
    if not own:
        asked = [f"--formats={formats}", f"--shapes={sizes}", f"--rows={rows}"]
        for _ in range(2):  # the second time all winners are known
            for isa in listed(isas):
                command = [sys.executable, __file__, str(folder), "--own", *asked]
                subprocess.run(command, check=True, env=os.environ | {"PHASEWISE_ISA": isa})
        return
    cores = cores_of(THREADS)
    caches = core_caches(read_machine(), cores)
    groups = [group_of(name, n, k, THREADS, caches) for name in listed(formats) for n, k in shapes(sizes)]
    recorder = Recorder(cores, folder)
    for group in groups:
        for m in numbers(rows):
            with user_lock(note).turn(math.inf):
                timed = recorder.search(group, m)
            note(f"{recorder.name}: {group.format} {group.n}x{group.k}, m {m}: {timed} schedules timed")
            recorder.save()
    recorder.close()
    yield {"instruction set": recorder.name, "timings": len(recorder.rows)}


class Recorder:
    """Times what the recording of this instruction set lacks."""

    def __init__(self, cores: Sequence[int], folder: Path) -> None:
        machine = read_machine()
        self.name = kernel_abi("gemm").split("-")[1]
        self._folder = folder
        self._file = folder / f"{self.name}{RECORDED}"
        self.rows = [*Recording.read(self._file).rows] if self._file.exists() else []
        self._key, self._abi = machine_key(machine, cores), kernel_abi("gemm")
        self._evaluator = NativeEvaluator(cores, cold_bytes(machine))
        self._quickest_ns: dict[Problem, float] = {}
        """Of the default schedule."""

    def search(self, group: Group, m: int) -> int:
        """A cold search, and one from the winners of others; the number of schedules that were timed."""
        space = group.space(m, group.arithmetics[0])
        space = replace(space, kernels=tuple(sorted(space.kernels)))
        default = space.fitted(group.default(m))
        problem, before = space.problem, len(self.rows)
        recording = Recording(self.name, self.rows)
        times = recording.times(problem)

        def timed(asked: list[Schedule]) -> list[Sample]:
            new = [schedule for schedule in dict.fromkeys(asked) if schedule not in times]
            for first in range(0, len(new), AT_ONCE):
                self._time(problem, default, new[first : first + AT_ONCE], times)
            return recording.samples(problem, asked)

        others = [
            other for other in recordings_in(self._folder) if other.name != self.name and other.times(problem)
        ]
        kernels = group.kernels[space.arithmetic.compute_path]
        winners = [adopted(other.search(problem)[0], kernels) for other in others]
        for seeds in ([], *([winner] for winner in winners), winners):
            searched(space, default, seeds, Asked(timed))
        return len(self.rows) - before

    def _time(
        self, problem: Problem, default: Schedule, new: Sequence[Schedule], times: dict[Schedule, int]
    ) -> None:
        began_ns = time.perf_counter_ns()
        contestants = [default, *(schedule for schedule in new if schedule != default)]
        if problem not in self._quickest_ns:
            alone = shuffled_rounds(self._evaluator.takes(problem, [default]), ROUNDS)
            self._quickest_ns[problem] = float(alone.min())
        for _ in range(MOST_TAKES):
            taken = shuffled_rounds(self._evaluator.takes(problem, contestants), ROUNDS)
            least = taken.min(axis=0)
            self._quickest_ns[problem] = min(self._quickest_ns[problem], float(least[0]))
            if least[0] <= DISTURBED * self._quickest_ns[problem]:
                break
        default_ns = times.setdefault(default, round(least[0]))
        effort_ns = (time.perf_counter_ns() - began_ns) // len(contestants)
        for number, schedule in enumerate(contestants):
            if number == 0 and default not in new:
                continue
            times[schedule] = max(1, round(default_ns * least[number] / least[0]))
            last_ms = (
                self.rows[-1].origin.created_at_ms if self.rows else 0
            )  # rows of a file are in this order
            origin = Origin(self._key, __version__, max(last_ms + 1, time.time_ns() // 1_000_000), False)
            least_ns = max(1, round(least[number]))
            sample = Sample(schedule, (least_ns,), times[schedule], None, effort_ns)
            self.rows.append(Measurement(problem, sample, self._abi, origin))

    def save(self) -> None:
        lines = "".join(export_lines([self.rows])).encode("ascii")
        self._file.write_bytes(gzip.compress(lines, 9, mtime=0))

    def close(self) -> None:
        self._evaluator.close()


app = commands(__doc__, record_searches)

if __name__ == "__main__":
    app()

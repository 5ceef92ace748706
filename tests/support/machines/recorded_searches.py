"""Searches on recordings of real cores: every schedule that is asked for has the time that was recorded.

A recording is a file of `db export`, compressed. What it lacks cannot be asked for.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from phasewise.cython_kernels.packing import padded_k, padded_n
from phasewise.kerneldb.errors import ExportFileError
from phasewise.kerneldb.portable import read_export
from phasewise.kerneldb.records import Measurement, Problem, Sample, Schedule
from phasewise.tuner.nearest import CoreFacts, facts_of
from phasewise.tuner.search.protocol import SearchOptions, drive
from phasewise.tuner.search.sandwich import sandwich
from phasewise.tuner.search.space import Caches, ScheduleSpace, arithmetic_of, fitting, kernel_of
from phasewise.tuner.weights import blank_weight

RECORDED = ".jsonl.gz"
_BITS = {"avx2": 256.0, "avx512": 512.0, "avx512_vnni": 512.0, "neon": 128.0}
"""Of vectors, by the instruction set that a build is named after."""


@dataclass
class Asked:
    """Answers a search, and keeps what it asked for, in this order."""

    answer: Callable[[list[Schedule]], list[Sample]]
    schedules: list[Schedule] = field(default_factory=list)

    def __call__(self, schedules: list[Schedule]) -> list[Sample]:
        self.schedules += schedules
        return self.answer(schedules)


def searched(space: ScheduleSpace, default: Schedule, seeds: Sequence[Schedule], asked: Asked) -> Schedule:
    """The winner of a search that begins with these, and the default schedule."""
    return drive(sandwich(space, SearchOptions(), [*seeds, default]), asked)


class Recording:
    """The times of one kind of core, by one build of its kernels."""

    def __init__(self, name: str, rows: Sequence[Measurement]) -> None:
        self.name = name
        self.rows = rows
        self._times: dict[Problem, dict[Schedule, int]] = {}
        for row in sorted(rows, key=lambda row: row.origin.created_at_ms):
            self.times(row.problem)[row.sample.schedule] = row.sample.estimate_ns

    @classmethod
    def read(cls, file: Path) -> Recording:
        """ExportFileError for what `db export` did not write."""

        def refuse(line: int, reason: str) -> None:
            raise ExportFileError(f"{file}: line {line}: {reason}")

        text = io.BytesIO(gzip.decompress(file.read_bytes()))
        rows = [row for row in read_export(text, file.name, refuse) if isinstance(row, Measurement)]
        return cls(file.name.removesuffix(RECORDED), rows)

    @property
    def problems(self) -> list[Problem]:
        """Those that are recorded."""
        return [*self._times]

    def times(self, problem: Problem) -> dict[Schedule, int]:
        """Nanoseconds of every recorded schedule, in the order in which they were timed."""
        return self._times.setdefault(problem, {})

    def space(self, problem: Problem) -> ScheduleSpace:
        """The schedules that a search has there: every search times all kernels, so that all are recorded."""
        times, facts = self.times(problem), self.facts
        kernels = tuple(sorted({kernel_of(schedule) for schedule in times}))
        weight = blank_weight(problem.format, problem.n, problem.k)
        return ScheduleSpace(
            problem=problem,
            arithmetic=arithmetic_of(self.default(problem)),
            threads=self.default(problem).threads,
            kernels=fitting(kernels, problem.m),
            caches=Caches(int(facts.l1d_bytes or 0), int(facts.l2_bytes or 0)),
            weight_bits=round(8 * weight.nbytes / (padded_n(problem.n) * padded_k(problem.k))),
        )

    def default(self, problem: Problem) -> Schedule:
        """The kernels' own schedule, which every search times first."""
        return next(iter(self.times(problem)))

    def search(self, problem: Problem, seeds: Sequence[Schedule] = ()) -> tuple[Schedule, list[Schedule]]:
        """The winner, and what was asked for, in this order."""
        asked = Asked(lambda schedules: self.samples(problem, schedules))
        return searched(self.space(problem), self.default(problem), seeds, asked), asked.schedules

    def samples(self, problem: Problem, asked: Sequence[Schedule]) -> list[Sample]:
        """LookupError for a schedule that is not recorded: then the search is another one than it was."""
        times = self.times(problem)
        if any(schedule not in times for schedule in asked):
            raise LookupError(f"{self.name} lacks what a search for {problem.describe()} asks: record again")
        return [Sample(schedule, (times[schedule],), times[schedule], None, 0) for schedule in asked]

    @property
    def facts(self) -> CoreFacts:
        """As `tuner.nearest` has it; the width of vectors is that of the build's instruction set."""
        facts = facts_of(self.rows[0].origin.machine.core_sig, self.rows)
        return replace(facts, vector_bits=_BITS.get(self.rows[0].kernel_abi.split("-")[1], facts.vector_bits))

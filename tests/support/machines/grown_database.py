"""A tuning database of a fleet, drawn: many kinds of cores, each with the rows of some tuning runs.

Rows have the sizes of real ones: 30 samples a timing, signatures and builds as long as those of hosts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert

from phasewise.kerneldb.fields import flattened
from phasewise.kerneldb.records import MachineKey, Problem, Schedule
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.tables import MEASUREMENT, PROMOTION, TABLES

SAMPLES = 30
SCHEDULES = 200
ROWS_AT_ONCE = 5000
FIRST_MS = 1_790_000_000_000
PROMOTIONS_OF_A_PROBLEM = 3


@dataclass(frozen=True)
class Fleet:
    """The size of a drawn database: `problems` of each of `cores`, `timings` of each."""

    cores: int = 40
    problems: int = 108
    timings: int = 250

    @property
    def measurements(self) -> int:
        """All of them."""
        return self.cores * self.problems * self.timings


MILLION = Fleet()
"""1.08 million measurements of 40 kinds of cores."""


def machine_of(number: int) -> MachineKey:
    """The kind of machine with this number."""
    core = f"AuthenticAMD 26/{number} avx2+fma+f16c+avx512f+avx512bw+avx512vl+avx512_vnni+avx512_bf16"
    return MachineKey(f"{core} L1d 48K L2 1M", "32 threads: 2 nodes x 4 L3 x 4 cores")


def build_of(number: int) -> str:
    """The build of the kernels that this kind of machine had."""
    return f"gemm-avx512_bf16-{number:012x}"


def fill(store: Store, fleet: Fleet, seed: int = 0) -> None:
    """Add the rows of a fleet to a database that has none."""
    rng = random.Random(seed)
    problems = [
        Problem("gemm", "int4m", 64 * (1 + index // 8), 1024, 2 ** (index % 8))
        for index in range(fleet.problems)
    ]
    schedules = [
        Schedule(mr, panels, 8 * mr, 64 * panels, 32 * (1 + index), 1, 2, 1, "int8_dot", 1, 0, "nm")
        for index in range(SCHEDULES)
        for mr, panels in [(1 + index % 8, 1 + index // 8 % 4)]
    ]  # fmt: skip
    with store.writing() as connection:
        for kind, records in ((Problem, problems), (Schedule, schedules)):
            connection.execute(
                insert(TABLES[kind]),
                [{"id": row_id, **flattened(record)} for row_id, record in enumerate(records, start=1)],
            )
        batch: list[dict[str, Any]] = []
        for row in _timings(fleet, rng):
            batch.append(row)
            if len(batch) == ROWS_AT_ONCE:
                connection.execute(insert(MEASUREMENT), batch)
                batch = []
        if batch:
            connection.execute(insert(MEASUREMENT), batch)
        connection.execute(insert(PROMOTION), [*_promotions(fleet)])


def _origin(core: int, at_ms: int) -> dict[str, Any]:
    machine = machine_of(core)
    return {
        "core_sig": machine.core_sig,
        "placement_sig": machine.placement_sig,
        "kernel_abi": build_of(core),
        "program_version": "0.1.0",
        "created_at_ms": at_ms,
    }


def _timings(fleet: Fleet, rng: random.Random) -> Iterator[dict[str, Any]]:
    at_ms = FIRST_MS
    for core in range(fleet.cores):
        for problem in range(fleet.problems):
            for timing in range(fleet.timings):
                at_ms += 7
                estimate_ns = rng.randint(100_000, 900_000)
                yield {
                    **_origin(core, at_ms),
                    "verified": core % 2 == 0,
                    "problem_id": problem + 1,
                    "schedule_id": timing % SCHEDULES + 1,
                    "samples_ns": [estimate_ns + rng.randint(0, 99_999) for _ in range(SAMPLES)],
                    "estimate_ns": estimate_ns,
                    "numeric_error": 0.00025,
                    "effort_ns": 40 * estimate_ns,
                    "conditions": {"steal_share": 0.015625, "mhz": 2900.0, "load": 0.25},
                }


def _promotions(fleet: Fleet) -> Iterator[dict[str, Any]]:
    for core in range(fleet.cores):
        for problem in range(fleet.problems):
            for number in range(min(PROMOTIONS_OF_A_PROBLEM, fleet.timings)):
                yield {
                    **_origin(core, FIRST_MS + number),
                    "verified": core % 2 == 0,
                    "problem_id": problem + 1,
                    "schedule_id": number + 1,
                    "incumbent_id": number or None,
                    "gain": 1.25,
                    "gain_low": 1.125,
                    "gain_high": 1.5,
                    "confidence": 0.99,
                    "pairs": 15,
                }

"""The schedules of this machine's database for the products of a vLLM process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

from phasewise.cython_kernels.packing import PackedWeight
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.kerneldb.errors import KernelDbError
from phasewise.kerneldb.location import locate
from phasewise.topology import Machine, read_machine
from phasewise.torch.shared_threads import torch_team
from phasewise.tuner.weights import format_name
from phasewise.vllm.plugin import logger

MOST_ROWS = 8192
"""Rows of one product for which schedules are looked up; beyond them the default runs."""


def row_schedules(packed: PackedWeight) -> tuple[str | None, int, list[tuple[int, Any]]]:
    """A weight's compute path and k parts, and its schedules by the last number of rows."""
    lookup = _lookup()
    path, k_parts = lookup.arithmetic(packed)
    ranges = [(rows.last_m, rows.schedule) for rows in lookup.products(packed, MOST_ROWS)]
    _tell(format_name(packed), packed.n, packed.k, sum(schedule is not None for _, schedule in ranges))
    return path, k_parts, ranges


@cache
def _tell(weight_format: str, n: int, k: int, tuned: int) -> None:
    """Once for each shape."""
    by = f"by {tuned} tuned schedules" if tuned else "by the default schedule"
    logger.info("weights of %d x %d are multiplied by phasewise: %s, %s", n, k, weight_format, by)


@cache
def _lookup() -> ScheduleLookup:
    database = os.environ.get("PHASEWISE_DB") or None
    try:
        if locate(database).is_absent:
            return ScheduleLookup()
        from phasewise.kerneldb.start_reads import open_start_reads
        from phasewise.workflows.opening.tuned_schedules import read_schedules

        machine = read_machine()
        cores = cores_of(torch_team().observed_cpus(), machine)
        with open_start_reads(database, logger.warning) as reads:
            return read_schedules(reads, machine, cores, logger.info)
    except KernelDbError as error:
        logger.warning("the default schedules are used: %s", error)
        return ScheduleLookup()


def cores_of(seen: Sequence[int], machine: Machine) -> tuple[int, ...]:
    """The CPUs that the threads were seen on; of threads that move, as many cores as there are threads."""
    if len(set(seen)) == len(seen) and min(seen) >= 0:
        return tuple(sorted(seen))
    first = [core[0] for core in machine.allowed_cores()] or list(machine.allowed_pus)
    return tuple(first[: len(seen)])

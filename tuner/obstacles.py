"""Validation of schedules: why one of a database cannot run here. Its row may be a stranger's, or of a
program to come.
"""

from __future__ import annotations

from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.tuner.attention import ARITHMETIC, KV_BYTES, head_dim_of
from phasewise.tuner.errors import TunerError
from phasewise.tuner.native import paths_of
from phasewise.tuner.search.space import arithmetic_of
from phasewise.tuner.weights import blank_weight

# A row may ask for more memory or time than there is. No known model comes near these limits.
MAX_WEIGHT = 1 << 29
MAX_ROWS_OF_X_OR_Y = 1 << 28
MAX_MULTIPLY_ADDS = 1 << 40
MAX_ATTENTION = 1 << 26


def obstacle(problem: Problem, schedule: Schedule) -> str | None:
    """The reason why a schedule cannot run here; None: it can be timed, and kernels may take its numbers as
    they are."""
    if problem.family == "attention":
        return _attention_obstacle(problem, schedule)
    if problem.family == "gemm":
        return _product_obstacle(problem, schedule)
    return f"there are no kernels of family {problem.family} here"


def abi_of(family: str) -> str | None:
    """The name under which timings of a kernel family are kept; None for a family that this program lacks."""
    try:
        return _native.kernel_abi(family)
    except KeyError:
        return None


def _product_obstacle(problem: Problem, schedule: Schedule) -> str | None:
    n, k, m = problem.n, problem.k, problem.m
    if n * k > MAX_WEIGHT or max(n, k) * m > MAX_ROWS_OF_X_OR_Y or n * k * m > MAX_MULTIPLY_ADDS:
        return "it is larger than that of any model"
    try:
        paths = paths_of(problem.format)
        blank_weight(problem.format, n, k)
    except (TunerError, ValueError) as error:
        return str(error)
    if schedule.compute_path not in paths:
        return f"there is no compute path {schedule.compute_path} for {problem.format} here"
    return None


def _attention_obstacle(problem: Problem, schedule: Schedule) -> str | None:
    n, k, m = problem.n, problem.k, problem.m
    if n * m > MAX_ATTENTION:
        return "it is larger than that of any model"
    if problem.format not in KV_BYTES or n % k or k % head_dim_of(n, k):
        return "there is no such attention"
    if arithmetic_of(schedule) != ARITHMETIC:
        return f"there is no compute path {schedule.compute_path} in {schedule.k_parts} parts for attention"
    return None

"""Duels between sparse and dense storage of a model's weights: what `--sparse auto` goes by afterwards."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from phasewise._version import __version__
from phasewise.cython_kernels import sparse
from phasewise.cython_kernels._native import kernel_abi
from phasewise.kerneldb.records import Measurement, Origin, Problem, Schedule, StorageDuel
from phasewise.serving.ranks.open_ranks import ALL_LOGITS_ROWS
from phasewise.tuner.lookup import ScheduleTable
from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.tuner.native import default_schedule, paths_of
from phasewise.tuner.plans import machine_key
from phasewise.tuner.search.space import Arithmetic, arithmetic_of
from phasewise.tuner.timing import PAIRS
from phasewise.tuner.weights import (
    SIXTEENTHS,
    blank_weight,
    dense_format,
    sparse_format,
    split_format,
)
from phasewise.workflows.opening.tuned_schedules import read_schedules
from phasewise.workflows.report import silent
from phasewise.workflows.tune_kernels.rounds import HEADS, HERE, Round, TuningBench, evaluator_on

if TYPE_CHECKING:
    from phasewise.kerneldb.store import Store
    from phasewise.serving.models.packed_model import PackedModel
    from phasewise.topology import Machine

DECODE_ROWS = (1, 8, 16, 32)
"""Rows of the products that decode's duels compare: one sequence, and as many as servers have."""

CALLS_A_DUEL = 4 * PAIRS
"""Least calls that take as long as a duel, whose products reach half of the limits."""

MOST_KEPT = 15
"""Sixteenths: of a weight that keeps more, sparse storage saves nothing worth a comparison."""


def storage_problems(model: PackedModel, tuning_round: Round) -> list[Problem]:
    """The duels of a round: each shape and density of the model's weights, by the rows of its phases."""
    head = next(name for name in HEADS if name in model.weights)
    problems: dict[Problem, None] = {}
    for name, weight in model.products().items():
        if (name in HEADS and name != head) or not sparse.can_be_sparse(weight.kind, weight.mins is not None):
            continue
        density = sparse.density(weight)
        if round(SIXTEENTHS * density) > MOST_KEPT:
            continue
        kept = sparse_format(dense_format(weight), density)
        for m in _rows(tuning_round, name == head):
            problems[Problem("gemm", kept, weight.n, weight.k, m)] = None
    return list(problems)


def _rows(tuning_round: Round, is_head: bool) -> Iterator[int]:
    """The head computes logits of few rows alone."""
    most = max(task.ms[-1] for task in tuning_round.tasks)
    if "decode" in tuning_round.phases:
        yield from (m for m in DECODE_ROWS if m <= most)
    if "prefill" in tuning_round.phases:
        yield min(most, ALL_LOGITS_ROWS) if is_head else most


def fight_storage_duels(
    problems: Sequence[Problem],
    tuning_round: Round,
    machine: Machine,
    store: Store,
    budget_s: float,
    resume: bool,
    lock: MeasurementLock,
    bench: TuningBench = HERE,
    call_s: Callable[[Problem], float] = lambda _: 0.0,
) -> list[StorageDuel]:
    """Those of `problems` that the budget allows, each kept at once.

    A duel is expected to take as long as the longest of as many rows, and as its calls at least. call_s: the
    least time of a call.

    resume: stored ones are not repeated.
    """
    deadline_s, key, abi = (
        bench.clock() + budget_s,
        machine_key(machine, tuning_round.cores),
        kernel_abi("gemm"),
    )
    threads = len(tuning_round.cores)
    table = read_schedules(store, machine, tuning_round.cores, silent)
    rows = store.rows(StorageDuel, machine=key, kernel_abi=abi, verified=True) if resume else []
    stored_duels = {duel.problem: duel for duel in rows}
    duels: list[StorageDuel] = []
    longest_s: dict[int, float] = {}
    with evaluator_on(tuning_round.cores, machine, lock, budget_s, bench) as evaluator:
        for problem in problems:
            if problem in stored_duels:
                duels.append(stored_duels[problem])
                continue
            expected_s = max(longest_s.get(problem.m, 0.0), CALLS_A_DUEL * call_s(problem))
            if bench.clock() + expected_s >= deadline_s:
                continue
            schedule, dense = schedules_of_duel(problem, table, threads)
            with lock.turn(deadline_s - bench.clock()) as is_alone:
                if not is_alone:
                    break
                began_s = bench.clock()
                fought = evaluator.duel_storages(problem, schedule, dense)
                longest_s[problem.m] = max(expected_s, bench.clock() - began_s)
            origin = Origin(key, __version__, time.time_ns() // 1_000_000)
            duel = StorageDuel(problem, schedule, dense, fought.comparison, abi, origin)
            of_dense = Problem("gemm", split_format(problem.format)[0], problem.n, problem.k, problem.m)
            samples = [(of_dense, fought.incumbent), (problem, fought.candidate)]
            store.add(Measurement(what, sample, abi, origin) for what, sample in samples)
            store.add([duel])
            duels.append(duel)
    return duels


def schedules_of_duel(problem: Problem, table: ScheduleTable, threads: int) -> tuple[Schedule, Schedule]:
    """The schedule of each storage, sparse first, in the arithmetic of the dense weight."""
    dense = split_format(problem.format)[0]
    of_dense = table.arithmetic_of(("gemm", dense, problem.n, problem.k))
    arithmetic = of_dense or Arithmetic(paths_of(dense)[0])

    def schedule(weight_format: str) -> Schedule:
        tuned = table.choice(("gemm", weight_format, problem.n, problem.k), problem.m).schedule
        if tuned is not None and arithmetic_of(tuned) == arithmetic:
            return tuned
        weight = blank_weight(weight_format, problem.n, problem.k)
        return default_schedule(weight, problem.m, threads, arithmetic)

    return schedule(problem.format), schedule(dense)

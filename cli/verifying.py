"""Wires `db verify`: the database's claims, the tuner's evaluator, this machine's cores."""

from __future__ import annotations

from collections.abc import Iterator

from phasewise.cli.present import note
from phasewise.cli.tuning import machine_key
from phasewise.cython_kernels import _native
from phasewise.kerneldb.records import Problem, Schedule
from phasewise.kerneldb.store import Store
from phasewise.kerneldb.upkeep import Here, Verdict, verify
from phasewise.topology import Machine
from phasewise.tuner.errors import TunerError
from phasewise.tuner.native import NativeEvaluator
from phasewise.tuner.plans import PHASES, default_plan
from phasewise.tuner.weights import cold_bytes, kind_of

FAMILIES = ("gemm",)
"""Those that the evaluator times."""

MAX_WEIGHT = 1 << 29
"""Outputs times inputs; a stranger's row may ask for more memory than there is."""

MAX_PRODUCT = 1 << 40
"""Multiply-adds: seconds a call."""


class NativeBench(NativeEvaluator):
    """The tuner's evaluator, which also says what it will not try."""

    def obstacle(self, problem: Problem, schedule: Schedule) -> str | None:
        """See `kerneldb.upkeep.Bench`."""
        if problem.family not in FAMILIES:
            return f"kernels of family {problem.family} are not timed here"
        if problem.n * problem.k > MAX_WEIGHT or problem.n * problem.k * problem.m > MAX_PRODUCT:
            return "the product is larger than that of any model"
        try:
            paths = _native.compute_paths(kind_of(problem.format))
        except TunerError as error:
            return str(error)
        if schedule.compute_path not in paths:
            return f"there is no compute path {schedule.compute_path} for {problem.format} here"
        return None


def verdicts(
    store: Store, machine: Machine, top: int, threads: int | None, program_version: str
) -> Iterator[Verdict]:
    """Verify on the cores of each phase's default plan, which is what imported rows were measured on."""
    plans = [default_plan(machine, phase, threads) for phase in PHASES]
    for cores in dict.fromkeys(plan.ranks[0].cores for plan in plans):
        abis = {family: _native.kernel_abi(family) for family in FAMILIES}
        here = Here(machine_key(machine, cores), abis, program_version)
        bench = NativeBench(cores, cold_bytes(machine))
        try:
            yield from verify(store, here, bench, top, note)
        finally:
            bench.close()

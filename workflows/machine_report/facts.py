"""The tuning database's facts of this machine, gathered for a report that can be sent along with it.

Host names, paths and user names are in none of it: machines go by their signatures, as in the database.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from phasewise._words import counted
from phasewise.kerneldb.location import locate
from phasewise.kerneldb.records import PlanRecord, Promotion, StepTime
from phasewise.topology import Machine, read_machine
from phasewise.workflows.errors import WorkflowError
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.kerneldb.counts import ProgramCount
    from phasewise.kerneldb.records import MachineKey, Measurement, Problem, Schedule
    from phasewise.kerneldb.store import Store
    from phasewise.tuner.config.storage import StudyFacts
    from phasewise.tuner.lookup import IsDefault
    from phasewise.tuner.machine_limits import Roofline
    from phasewise.tuner.plans import Phase, ServicePlan
    from phasewise.workflows.machine_report.worth import Worth


@dataclass(frozen=True)
class ScheduleFacts:
    """The schedule in use for one product. `promotion`: the duel that took it into use, where one is known.

    `weight_bytes`: what one call reads of its weight; 0 for attention.
    """

    measurement: Measurement
    promotion: Promotion | None
    weight_bytes: int

    @property
    def problem(self) -> Problem:
        return self.measurement.problem

    @property
    def n_flops(self) -> int:
        return 2 * self.problem.m * self.problem.n * self.problem.k

    @property
    def flops(self) -> float:
        """Operations a second."""
        return self.n_flops * 1e9 / self.measurement.sample.estimate_ns

    @property
    def bytes_per_s(self) -> float:
        """Bytes of the weight a second."""
        return self.weight_bytes * 1e9 / self.measurement.sample.estimate_ns


@dataclass(frozen=True)
class VersionFacts:
    """The rows that one version of the program has written. `last_ms`: Unix time of the last row."""

    version: str
    measurements: int
    promotions: int
    plans: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True)
class DatabaseReport:
    """All of it. `plans`: the newest verified plan of each phase, by model. `others`: rows of other machines.

    `roofline`: limits measured now, while the report was made; None: they were not to be measured. `worth`:
    of every kind of machine in the database.
    """

    machine: Machine
    plans: Mapping[str, Mapping[Phase, ServicePlan]]
    objectives: Mapping[str, Mapping[str, Mapping[str, float]]]
    schedules: Sequence[ScheduleFacts]
    studies: Sequence[StudyFacts]
    history: Sequence[VersionFacts]
    others: int
    roofline: Roofline | None
    worth: Worth


def report_of(
    db: str | os.PathLike[str] | None = None, *, measure: bool = True, report: Report = silent
) -> DatabaseReport:
    """Read the database `db` for this machine. measure: also the machine's limits, for some seconds.

    Raises WorkflowError where there is no database, KernelDbError where it cannot be read.
    """
    from phasewise.kerneldb.store import open_store
    from phasewise.tuner.config.storage import read_studies
    from phasewise.tuner.plans import machine_key
    from phasewise.workflows.machine_report.worth import worth_of

    location = locate(db)
    if location.is_absent:
        raise WorkflowError(
            f"there is no database at {location.name}: tune-kernels makes one; --db names another"
        )
    machine = read_machine()
    with open_store(db, report) as store:
        keys = _keys_of(store, machine)
        schedules = _schedules(store, keys)
        plans = [plan for plan in store.rows(PlanRecord) if plan.origin.machine in keys]
        history, others = _history(store, machine_key(machine).core_sig)
        worth = worth_of(store, _default_here())
    roofline = _roofline(machine, schedules, report) if measure and schedules else None
    return DatabaseReport(
        machine,
        _newest(plans, machine, report),
        _objectives(plans),
        schedules,
        read_studies(location, {key.core_sig for key in keys}),
        history,
        others,
        roofline,
        worth,
    )


def _default_here() -> IsDefault:
    """True of schedules that the kernels of this program choose by themselves on cores like these."""
    from phasewise.cython_kernels.errors import KernelError
    from phasewise.tuner.errors import TunerError
    from phasewise.tuner.native import is_default_for

    @lru_cache(maxsize=4096)
    def is_default(problem: Problem, schedule: Schedule) -> bool:
        try:
            return is_default_for(schedule.threads)(problem, schedule)
        except (TunerError, KernelError, KeyError, ValueError):  # a stranger's product
            return False

    return is_default


def _keys_of(store: Store, machine: Machine) -> frozenset[MachineKey]:
    """Every kind of placement on this kind of core: whole machines, and the cores of single ranks."""
    from phasewise.tuner.plans import machine_key

    own = machine_key(machine).core_sig
    keys = {timed.key.machine for timed in store.timed_keys(own)}
    keys |= store.machines(PlanRecord, StepTime)
    return frozenset(key for key in keys if key.core_sig == own)


def _schedules(store: Store, keys: frozenset[MachineKey]) -> list[ScheduleFacts]:
    from phasewise.kerneldb.upkeep import PreferenceReason, preferred, standings
    from phasewise.tuner.errors import TunerError
    from phasewise.tuner.weights import blank_weight

    latest: dict[tuple[object, ...], Promotion] = {}
    for promotion in store.stream(Promotion):
        promoted = (promotion.problem, promotion.origin.machine, promotion.kernel_abi, promotion.schedule)
        latest[promoted] = promotion
    facts = []
    in_use = {
        key: standing
        for core_sig in {machine.core_sig for machine in keys}
        for key, standing in standings(store, core_sig).items()
        if key.machine in keys and standing is PreferenceReason.IN_USE
    }
    for choice in preferred(store, in_use):
        key, problem = choice.key, choice.key.problem
        try:
            n_bytes = blank_weight(problem.format, problem.n, problem.k).nbytes
        except (TunerError, KeyError, ValueError):  # attention, whose operands are no weight
            n_bytes = 0
        duel = latest.get((problem, key.machine, key.kernel_abi, choice.schedule))
        facts.append(ScheduleFacts(choice.measurement, duel, n_bytes))
    return facts


def _history(store: Store, core_sig: str) -> tuple[list[VersionFacts], int]:
    """Oldest first; and how many measurements are of other kinds of cores."""
    rows: dict[str, dict[str, ProgramCount]] = defaultdict(dict)
    for table, counts in store.programs(core_sig).items():
        for program in counts:
            rows[program.program_version][table] = program
    history = []
    for version, of_table in rows.items():
        sizes = {name: count.rows for name, count in of_table.items()}
        history.append(
            VersionFacts(
                version,
                sizes.get("measurement", 0),
                sizes.get("promotion", 0),
                sizes.get("service_plan", 0),
                min(count.first_ms for count in of_table.values()),
                max(count.last_ms for count in of_table.values()),
            )
        )
    own = sum(count.rows for count in store.programs(core_sig)["measurement"])
    return sorted(history, key=lambda facts: facts.first_ms), store.stats().rows["measurement"] - own


def _newest(
    plans: Sequence[PlanRecord], machine: Machine, report: Report
) -> dict[str, dict[Phase, ServicePlan]]:
    from phasewise.tuner.errors import PlanError
    from phasewise.tuner.plans import PHASES, stored_plan

    newest: dict[str, dict[Phase, ServicePlan]] = defaultdict(dict)
    for record in plans:  # oldest first
        if not record.origin.verified or record.phase not in PHASES:
            continue
        try:
            plan = stored_plan(record.plan_json, machine)
        except PlanError as error:
            report(f"the {record.phase} plan of {record.model_key} cannot be read and is left out: {error}")
            continue
        newest[record.model_key][plan.phase] = plan
    return dict(newest)


def _objectives(plans: Sequence[PlanRecord]) -> dict[str, dict[str, Mapping[str, float]]]:
    from phasewise.tuner.plans import PHASES

    objectives: dict[str, dict[str, Mapping[str, float]]] = defaultdict(dict)
    for record in plans:
        if record.origin.verified and record.phase in PHASES:
            objectives[record.model_key][record.phase] = record.objectives
    return dict(objectives)


def _roofline(machine: Machine, schedules: Sequence[ScheduleFacts], report: Report) -> Roofline:
    from phasewise.tuner.machine_limits import measure_roofline

    cores = [core[0] for core in machine.allowed_cores()]
    report(f"measuring the limits of {counted(len(cores), 'core')}")
    formats = sorted({facts.problem.format for facts in schedules if facts.weight_bytes})
    return measure_roofline(cores, formats, max(facts.weight_bytes for facts in schedules) or 1 << 26)

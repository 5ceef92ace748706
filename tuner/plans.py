"""Service plans: on which cores each phase runs, and in how many ranks.

The plan of a phase comes from the flags `--threads` and `--ranks`, else from the newest verified row of the
database, else it is the default: one rank, one thread on each core that the process may use. A row may be a
stranger's, or older than a change of cpuset, so a plan from the database is checked against this machine,
and set aside with a reason.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from phasewise._words import counted, number, plural
from phasewise.kerneldb.location import locate
from phasewise.kerneldb.records import MachineKey, PlanRecord
from phasewise.topology import (
    Kind,
    Machine,
    TopologyError,
    core_signature,
    placement_signature,
    places_of,
    pus_at,
)
from phasewise.tuner.errors import PlanError

Phase = Literal["prefill", "decode"]
Source = Literal["default", "database", "imported", "flag", "search", "file"]
Report = Callable[[str], None]

PHASES: tuple[Phase, ...] = get_args(Phase)
MAX_RANKS = 256
MAX_PU = 65_535
PLAN_FORMAT = 1
"""Version of the JSON that names cores; a reader refuses versions that it does not know."""
PLACED_FORMAT = 2
"""Version of the JSON that names places of the topology, as the database keeps plans."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankCores:
    """The PUs that one rank pins its threads to, one thread each, and the NUMA node of its memory."""

    cores: tuple[int, ...]
    numa_node: int | None = None
    """None: the PUs span nodes, or the machine does not say."""

    def __post_init__(self) -> None:
        if not self.cores:
            raise PlanError("a rank without cores: name at least one")
        for core in self.cores:
            if type(core) is not int or not 0 <= core <= MAX_PU:
                raise PlanError(f"a core must be a number from 0 to {MAX_PU}, not {core!r:.40}")
        if len(set(self.cores)) != len(self.cores):
            raise PlanError(f"a rank names a core twice: {list_cores(self.cores)}")
        node = self.numa_node
        if node is not None and (type(node) is not int or not 0 <= node <= MAX_PU):
            raise PlanError(f"a NUMA node must be a number from 0 to {MAX_PU}, not {node!r:.40}")


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The way in which one phase runs. Ranks never share a PU."""

    phase: Phase
    ranks: tuple[RankCores, ...]
    source: Source = "default"

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise PlanError(f"a phase is prefill or decode, not {self.phase!r:.40}")
        if not 1 <= len(self.ranks) <= MAX_RANKS:
            raise PlanError(f"a plan has 1 to {MAX_RANKS} ranks, not {len(self.ranks)}")
        if len(set(self.cores)) != len(self.cores):
            raise PlanError(f"two ranks share a core: {list_cores(self.cores)}")

    @property
    def cores(self) -> tuple[int, ...]:
        """Every PU of the plan, rank by rank."""
        return tuple(core for rank in self.ranks for core in rank.cores)

    def describe(self) -> str:
        """A line for people, e.g. `decode: 1 rank on cores 0,1 (database)`."""
        ranks = " | ".join(list_cores(rank.cores) for rank in self.ranks)
        count = counted(len(self.ranks), "rank")
        return f"{self.phase}: {count} on {plural(len(self.cores), 'core')} {ranks} ({self.source})"

    def to_json(self) -> str:
        """The plan by its cores, for other processes of this host. Where it came from is not part of it."""
        ranks = [{"cores": list(rank.cores), "numa_node": rank.numa_node} for rank in self.ranks]
        return json.dumps({"format": PLAN_FORMAT, "phase": self.phase, "ranks": ranks})

    @classmethod
    def from_json(cls, text: str, source: Source = "database") -> ServicePlan:
        """Read `to_json`'s text. PlanError, saying why, for anything else, unknown fields included."""
        fields = _parsed(text)
        _check_object(fields, {"format", "phase", "ranks"}, "a plan")
        if type(fields["format"]) is not int or fields["format"] != PLAN_FORMAT:
            raise PlanError(
                f"the plan has format {fields['format']!r:.40}; this phasewise reads {PLAN_FORMAT}"
            )
        if not isinstance(fields["ranks"], list):
            raise PlanError("the ranks of a plan must be a list")
        return cls(fields["phase"], tuple(_rank(rank) for rank in fields["ranks"][: MAX_RANKS + 1]), source)


def placed_json(plan: ServicePlan, machine: Machine) -> str:
    """The plan as the database keeps it: by places of the topology, which machines of a kind share.

    PlanError where a core of it may not be used here.
    """
    try:
        ranks = [[*places_of(machine, rank.cores)] for rank in plan.ranks]
    except TopologyError as error:
        raise PlanError(str(error)) from None
    return json.dumps(
        {"format": PLACED_FORMAT, "phase": plan.phase, "pus": len(machine.allowed_pus), "ranks": ranks}
    )


def stored_plan(text: str, machine: Machine, source: Source = "database") -> ServicePlan:
    """A plan of the database in this machine's own numbers. PlanError, saying why, for what is none.

    It names places; one of an earlier version names cores, which then are those of the host that kept it.
    """
    if not is_placed(text):
        return ServicePlan.from_json(text, source)
    phase, n_pus, ranks = _placed_fields(text)
    if n_pus != len(machine.allowed_pus):
        raise PlanError(f"it is for a process with {n_pus} PUs; this one may use {len(machine.allowed_pus)}")
    try:
        cores = [pus_at(machine, rank) for rank in ranks]
    except TopologyError as error:
        raise PlanError(str(error)) from None
    return ServicePlan(phase, tuple(rank_on(machine, own) for own in cores), source)


def stored_places(text: str) -> list[list[int]] | None:
    """The places of each rank; None where the plan names cores."""
    return [[*rank] for rank in _placed_fields(text)[2]] if is_placed(text) else None


def is_placed(text: str) -> bool:
    """True of a plan that names places of the topology."""
    fields = _parsed(text)
    return isinstance(fields, dict) and fields.get("format") == PLACED_FORMAT


def _placed_fields(text: str) -> tuple[Phase, int, list[tuple[int, ...]]]:
    fields = _parsed(text)
    _check_object(fields, {"format", "phase", "pus", "ranks"}, "a plan")
    n_pus, ranks = fields["pus"], fields["ranks"]
    if type(n_pus) is not int or not 1 <= n_pus <= MAX_PU + 1:
        raise PlanError(f"the PUs of a plan must be a number from 1 to {MAX_PU + 1}, not {n_pus!r:.40}")
    if not isinstance(ranks, list) or not all(isinstance(rank, list) for rank in ranks):
        raise PlanError("the ranks of a plan must be lists of places")
    places = [RankCores(tuple(rank)).cores for rank in ranks[: MAX_RANKS + 1]]
    return fields["phase"], n_pus, places


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise PlanError("the plan is not JSON") from None


def _rank(fields: Any) -> RankCores:
    _check_object(fields, {"cores", "numa_node"}, "a rank")
    if not isinstance(fields["cores"], list):
        raise PlanError("the cores of a rank must be a list")
    return RankCores(tuple(fields["cores"]), fields["numa_node"])


def _check_object(fields: Any, names: set[str], what: str) -> None:
    if not isinstance(fields, dict) or set(fields) != names:
        raise PlanError(f"{what} must be an object with exactly the fields {', '.join(sorted(names))}")


class PlanSource(Protocol):
    """The part of a store that `resolve_plans` needs."""

    def newest_plan(self, machine: MachineKey, model_key: str, phase: str) -> PlanRecord | None: ...


def model_key(name: str, weight_format: str) -> str:
    """Under what a model's plans are kept: its name and the format of its weights, e.g. `tinyllama@int4`."""
    return f"{name}@{weight_format}"


def machine_key(machine: Machine, cores: Sequence[int] | None = None) -> MachineKey:
    """The key of plans and measurements: the signature of the cores, and that of the placement of `cores`.

    None: all cores that this process may use, by which plans are kept. Measurements are kept by the cores
    that ran them.
    """
    if cores is None:
        cores = tuple(core[0] for core in machine.allowed_cores()) or machine.allowed_pus
    return MachineKey(core_signature(machine), placement_signature(machine, cores))


def default_plan(
    machine: Machine, phase: Phase, threads: int | None = None, ranks: int | None = None
) -> ServicePlan:
    """One rank over the allowed cores, one PU of each, no more than the cgroup quota pays for.

    `threads` sets the count instead, quota or not; beyond the number of cores, second PUs of cores are
    taken. `ranks`: as many divide these cores, neighbours on a NUMA node together. PlanError if either does
    not fit.
    """
    pus = _pus_by_preference(machine)
    source: Source = "default" if threads is None and ranks is None else "flag"
    if threads is None:
        threads = default_thread_count(machine)
    if not 1 <= threads <= len(pus):
        raise PlanError(
            f"{threads} threads do not fit: this process may use {len(pus)} CPUs "
            f"({list_cores(machine.allowed_pus)})"
        )
    return ServicePlan(phase, _divided(machine, pus[:threads], 1 if ranks is None else ranks), source)


def _divided(machine: Machine, pus: tuple[int, ...], n_ranks: int) -> tuple[RankCores, ...]:
    """Ranks of as many PUs each as can be, or one fewer."""
    if n_ranks == 1:
        return (rank_on(machine, pus),)
    if not 1 <= n_ranks <= min(len(pus), MAX_RANKS):
        raise PlanError(
            f"{counted(n_ranks, 'rank')} cannot divide {counted(len(pus), 'core')}: each needs one of its own"
        )
    nodes = [set(node.cpus) for node in machine.nodes(Kind.NUMA)]
    by_node = sorted(pus, key=lambda pu: [pu not in node for node in nodes])
    cuts = [len(pus) * rank // n_ranks for rank in range(n_ranks + 1)]
    return tuple(rank_on(machine, tuple(by_node[a:b])) for a, b in itertools.pairwise(cuts))


def default_thread_count(machine: Machine) -> int:
    """One a core. A quota of 2.5 CPUs runs two pinned threads: a third would get all of them throttled."""
    cores = len(machine.allowed_cores()) or len(machine.allowed_pus)
    quota = cores if machine.cpu_quota is None else max(1, int(machine.cpu_quota))
    return min(cores, quota)


def _pus_by_preference(machine: Machine) -> tuple[int, ...]:
    """The allowed PUs: the first of every core, then the second of every core, and so on."""
    cores = machine.allowed_cores()
    depth = max((len(core) for core in cores), default=0)
    by_turn = tuple(core[turn] for turn in range(depth) for core in cores if turn < len(core))
    return by_turn or machine.allowed_pus


def cores_of_share(machine: Machine, first: int, count: int) -> tuple[int, ...]:
    """PUs for one of several processes on a host, after the `first` of others. PlanError if too few."""
    pus = _pus_by_preference(machine)
    if first + count > len(pus):
        raise PlanError(
            f"{counted(count, 'core')} after the first {first} are too many: this process may use "
            f"{len(pus)} CPUs ({list_cores(machine.allowed_pus)})"
        )
    return pus[first : first + count]


def rank_on(machine: Machine, pus: tuple[int, ...]) -> RankCores:
    """A rank on these PUs, with the NUMA node that holds all of them, if one does."""
    holders = (node.os_index for node in machine.nodes(Kind.NUMA) if set(pus) <= set(node.cpus))
    return RankCores(pus, next(holders, None))


def check_fits(plan: ServicePlan, machine: Machine) -> None:
    """PlanError, saying why, unless this process may run the plan here."""
    foreign = sorted(set(plan.cores).difference(machine.allowed_pus))
    if foreign:
        raise PlanError(
            f"this process may not use core {list_cores(foreign)}, only {list_cores(machine.allowed_pus)}"
        )
    quota = machine.cpu_quota
    if quota is not None and len(plan.cores) > max(1, int(quota)):
        raise PlanError(
            f"{counted(len(plan.cores), 'thread')} would be throttled:"
            f" the cgroup quota is {number(quota)} {plural(quota, 'CPU')}"
        )
    known_nodes = {node.os_index for node in machine.nodes(Kind.NUMA)} | {None}
    for rank in plan.ranks:
        if rank.numa_node not in known_nodes:
            raise PlanError(f"there is no NUMA node {rank.numa_node}")


def resolve_plans(
    store: PlanSource | None,
    machine: Machine,
    model: str,
    threads: int | None = None,
    report: Report = _log.warning,
    ranks: int | None = None,
) -> Mapping[Phase, ServicePlan]:
    """The plan of each phase for `model` (a `model_key`): the flags', else the database's, else the default.

    A plan of the database that cannot run here is set aside, and `report` is told why in one line.
    """
    if threads is not None or ranks is not None or store is None:
        return {phase: default_plan(machine, phase, threads, ranks) for phase in PHASES}
    key = machine_key(machine)
    return {
        phase: _stored_plan(store.newest_plan(key, model, phase), machine, phase, report)
        or default_plan(machine, phase)
        for phase in PHASES
    }


def _stored_plan(
    record: PlanRecord | None, machine: Machine, phase: Phase, report: Report
) -> ServicePlan | None:
    if record is None:
        return None
    try:
        plan = stored_plan(record.plan_json, machine, "database" if record.origin.verified else "imported")
        if plan.phase != phase:
            raise PlanError(f"it is a plan for {plan.phase}")
        check_fits(plan, machine)
    except PlanError as error:
        report(f"the {phase} plan in the database is set aside, the default is used: {error}")
        return None
    return plan


def plans_for(
    db: str | os.PathLike[str] | None,
    machine: Machine,
    model: str,
    threads: int | None = None,
    report: Report = _log.warning,
    ranks: int | None = None,
) -> Mapping[Phase, ServicePlan]:
    """`resolve_plans` with the database that `--db` names, opened only if it can matter; never created.

    KernelDbError if the database exists and cannot be used.
    """
    location = locate(db)
    is_flagged = threads is not None or ranks is not None
    if is_flagged or location.is_absent:
        if location.is_absent and not location.is_default:
            report(f"there is no database at {location.name} yet: default plans are used")
        return resolve_plans(None, machine, model, threads, report, ranks)
    # SQLAlchemy takes a quarter of a second to load, which a start without a database need not pay.
    from phasewise.kerneldb.store import open_store

    with open_store(db, report) as store:
        return resolve_plans(store, machine, model, None, report)


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU numbers as taskset writes them, e.g. `0-3,8`, in the order given. PlanError for anything else."""
    cores: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,5})(?:-([0-9]{1,5}))?\s*", part)
        if match is None:
            raise PlanError(f"cores are written like 0-3,8, not {text!r:.40}")
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high <= MAX_PU:
            raise PlanError(f"{part.strip()} is no range of cores from 0 to {MAX_PU}")
        cores += range(low, high + 1)
    return tuple(cores)


def list_cores(pus: Sequence[int]) -> str:
    """CPU numbers as taskset writes them, consecutive ones joined: `0-3,8`. The order is kept."""
    runs: list[list[int]] = []
    for pu in pus:
        if runs and pu == runs[-1][1] + 1:
            runs[-1][1] = pu
        else:
            runs.append([pu, pu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)

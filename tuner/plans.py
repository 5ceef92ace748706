"""Service plans: the cores and ranks on which each phase runs.

The plan of a phase comes from the flags `--threads` and `--ranks`, else from the newest verified row of the
database, else it is the default: one rank, one thread on each allowed core. Decode may have other cores for
steps of more sequences (decision 0149). A row may be a stranger's, or older than a change of cpuset, so a
plan from the database is checked against this machine, and ignored with a reason if it does not fit."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeAlias, get_args

from phasewise._json import read_json
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
DefaultPlan: TypeAlias = "Callable[[Machine, Phase], ServicePlan]"
"""A function that makes the plan of a phase without a plan in the database."""

PHASES: tuple[Phase, ...] = get_args(Phase)
MAX_RANKS = 256
MAX_PU = 65_535
MAX_BANDS = 3
"""The most bands of a plan: a program has this many tables of schedules beside the phases'
(PW_SCHEDULE_TABLES)."""
MAX_BAND_SEQUENCES = 4096
PLAN_FORMAT, BANDED_FORMAT = 1, 3
"""Versions of the JSON that names cores, without and with bands; a reader refuses unknown versions."""
PLACED_FORMAT, BANDED_PLACED_FORMAT = 2, 4
"""Versions of the JSON that names topology places, as in the database, without and with bands."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankCores:
    """The PUs of one rank's threads, one thread each, and the NUMA node of the rank's memory."""

    cores: tuple[int, ...]
    numa_node: int | None = None
    """The NUMA node of the rank's memory; None: the PUs span nodes, or the machine names none."""

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
class LoadBand:
    """The cores of decode's ranks in steps of at least `sequences` sequences."""

    sequences: int
    ranks: tuple[RankCores, ...]

    def __post_init__(self) -> None:
        n = self.sequences
        if type(n) is not int or not 2 <= n <= MAX_BAND_SEQUENCES:
            raise PlanError(f"a band begins at 2 to {MAX_BAND_SEQUENCES} sequences, not {n!r:.40}")
        _check_ranks(self.ranks)


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """The cores and ranks of one phase; ranks never share a PU. `bands`: other cores of the same ranks for
    decode steps of more sequences, fewest first; ranks stay on their NUMA nodes, where their memory is."""

    phase: Phase
    ranks: tuple[RankCores, ...]
    source: Source = "default"
    bands: tuple[LoadBand, ...] = ()

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise PlanError(f"a phase is prefill or decode, not {self.phase!r:.40}")
        _check_ranks(self.ranks)
        if self.bands and self.phase != "decode":
            raise PlanError(f"bands of sequences are decode's, not those of {self.phase}")
        if len(self.bands) > MAX_BANDS:
            raise PlanError(f"a plan has at most {MAX_BANDS} bands of more sequences, not {len(self.bands)}")
        for before, after in itertools.pairwise(self.starts):
            if before >= after:
                raise PlanError(f"bands must rise: {after} sequences come after {before}")
        for band in self.bands:
            if nodes_of(band.ranks) != nodes_of(self.ranks):
                raise PlanError(
                    f"the band from {band.sequences} sequences on has other ranks, or on other NUMA nodes"
                )

    @property
    def cores(self) -> tuple[int, ...]:
        """Every PU of the plan, rank by rank, without its bands (`all_cores`)."""
        return _cores_of(self.ranks)

    @property
    def all_cores(self) -> frozenset[int]:
        """Every PU of the plan and its bands."""
        return frozenset(self.cores).union(*(_cores_of(band.ranks) for band in self.bands))

    @property
    def each(self) -> tuple[ServicePlan, ...]:
        """The plan without its bands, then a plan for each band."""
        return tuple(replace(self, ranks=ranks, bands=()) for _, ranks in self._loads)

    @property
    def starts(self) -> tuple[int, ...]:
        """The number of sequences from which each band applies."""
        return tuple(band.sequences for band in self.bands)

    @property
    def _loads(self) -> tuple[tuple[int, tuple[RankCores, ...]], ...]:
        return ((1, self.ranks), *((band.sequences, band.ranks) for band in self.bands))

    def at(self, sequences: int) -> ServicePlan:
        """The plan, without bands, for steps of this many sequences."""
        return self.each[bisect_right(self.starts, sequences)]

    def with_band(self, sequences: int, ranks: tuple[RankCores, ...]) -> ServicePlan:
        """The plan with a band of these cores from `sequences` on; unchanged if the cores are the same."""
        if [sorted(rank.cores) for rank in ranks] == [sorted(rank.cores) for rank in self.each[-1].ranks]:
            return self
        return replace(self, bands=(*self.bands, LoadBand(sequences, ranks)))

    def with_bands_that(self, keeps: Callable[[ServicePlan], bool]) -> ServicePlan:
        """The plan with only those of its bands for which `keeps` is true."""
        pairs = zip(self.bands, self.each[1:], strict=True)
        return replace(self, bands=tuple(band for band, plan in pairs if keeps(plan)))

    def describe(self) -> str:
        """The plan for people, e.g. `decode: 1 rank on cores 0,1 (database)`, with its bands."""
        count = counted(len(self.ranks), "rank")
        first, *bands = (
            f"{plural(len(plan.cores), 'core')} {' | '.join(list_cores(rank.cores) for rank in plan.ranks)}"
            for plan in self.each
        )
        told = (f"; from {n} sequences on: {words}" for n, words in zip(self.starts, bands, strict=True))
        return f"{self.phase}: {count} on {first} ({self.source}){''.join(told)}"

    def to_json(self) -> str:
        """The plan with its core numbers as JSON, for other processes of this host; without its source."""
        fields: dict[str, Any] = {
            "format": PLAN_FORMAT,
            "phase": self.phase,
            "ranks": ranks_fields(self.ranks),
        }
        if self.bands:
            fields |= {"format": BANDED_FORMAT, "bands": bands_fields(self)}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str, source: Source = "database") -> ServicePlan:
        """The plan in `to_json`'s text. PlanError, saying why, for any other text."""
        fields = _parsed(text)
        has_bands = isinstance(fields, dict) and fields.get("format") == BANDED_FORMAT
        _check_object(fields, {"format", "phase", "ranks", *(["bands"] if has_bands else [])}, "a plan")
        if type(fields["format"]) is not int or fields["format"] not in (PLAN_FORMAT, BANDED_FORMAT):
            raise PlanError(
                f"the plan has format {fields['format']!r:.40}; this phasewise reads {PLAN_FORMAT}"
                f" and {BANDED_FORMAT}"
            )
        bands = bands_from(fields["bands"]) if has_bands else ()
        return cls(fields["phase"], ranks_from(fields["ranks"]), source, bands)


def nodes_of(ranks: Sequence[RankCores]) -> tuple[int | None, ...]:
    """The NUMA node of each rank's memory."""
    return tuple(rank.numa_node for rank in ranks)


def _cores_of(ranks: Sequence[RankCores]) -> tuple[int, ...]:
    return tuple(core for rank in ranks for core in rank.cores)


def _check_ranks(ranks: Sequence[RankCores]) -> None:
    cores = _cores_of(ranks)
    if not 1 <= len(ranks) <= MAX_RANKS:
        raise PlanError(f"a plan has 1 to {MAX_RANKS} ranks, not {len(ranks)}")
    if len(set(cores)) != len(cores):
        raise PlanError(f"two ranks share a core: {list_cores(cores)}")


def ranks_fields(ranks: Sequence[RankCores]) -> list[dict[str, Any]]:
    """The cores of ranks as JSON values."""
    return [{"cores": list(rank.cores), "numa_node": rank.numa_node} for rank in ranks]


def bands_fields(plan: ServicePlan) -> list[dict[str, Any]]:
    """The bands of a plan as JSON values."""
    return [{"sequences": band.sequences, "ranks": ranks_fields(band.ranks)} for band in plan.bands]


def placed_json(plan: ServicePlan, machine: Machine) -> str:
    """The plan for the database: with topology places, which machines of a kind share. PlanError where one of
    its cores may not be used here."""
    try:
        ranks, *others = ([[*places_of(machine, rank.cores)] for rank in each.ranks] for each in plan.each)
    except TopologyError as error:
        raise PlanError(str(error)) from None
    n_pus = len(machine.allowed_pus)
    fields: dict[str, Any] = {"format": PLACED_FORMAT, "phase": plan.phase, "pus": n_pus, "ranks": ranks}
    if plan.bands:
        bands = [{"sequences": n, "ranks": own} for n, own in zip(plan.starts, others, strict=True)]
        fields |= {"format": BANDED_PLACED_FORMAT, "bands": bands}
    return json.dumps(fields)


def stored_plan(text: str, machine: Machine, source: Source = "database") -> ServicePlan:
    """A plan of the database with this machine's core numbers. PlanError, saying why, for an invalid plan.
    Plans name places; those of an earlier version name the cores of the host that stored them."""
    if not is_placed(text):
        return ServicePlan.from_json(text, source)
    phase, n_pus, loads = _placed_fields(text)
    if n_pus != len(machine.allowed_pus):
        raise PlanError(f"it is for a process with {n_pus} PUs; this one may use {len(machine.allowed_pus)}")
    try:
        (_, ranks), *bands = (
            (sequences, tuple(rank_on(machine, pus_at(machine, places)) for places in own))
            for sequences, own in loads
        )
    except TopologyError as error:
        raise PlanError(str(error)) from None
    return ServicePlan(phase, ranks, source, tuple(itertools.starmap(LoadBand, bands)))


Places: TypeAlias = list[list[int]]
"""The topology places of each rank's cores."""


def stored_places(text: str) -> list[tuple[int, Places]] | None:
    """The least number of sequences and the ranks' places, of the plan and of each band; None where the plan
    names cores."""
    if not is_placed(text):
        return None
    return [(sequences, [[*rank] for rank in ranks]) for sequences, ranks in _placed_fields(text)[2]]


def is_placed(text: str) -> bool:
    """True if the text is a plan that names topology places."""
    fields = _parsed(text)
    return isinstance(fields, dict) and fields.get("format") in (PLACED_FORMAT, BANDED_PLACED_FORMAT)


def _placed_fields(text: str) -> tuple[Phase, int, list[tuple[int, list[tuple[int, ...]]]]]:
    fields = _parsed(text)
    has_bands = fields["format"] == BANDED_PLACED_FORMAT
    _check_object(fields, {"format", "phase", "pus", "ranks", *(["bands"] if has_bands else [])}, "a plan")
    n_pus, bands = fields["pus"], fields["bands"] if has_bands else []
    if type(n_pus) is not int or not 1 <= n_pus <= MAX_PU + 1:
        raise PlanError(f"the PUs of a plan must be a number from 1 to {MAX_PU + 1}, not {n_pus!r:.40}")
    _check_bands(bands)
    loads = [(1, fields["ranks"]), *((band["sequences"], band["ranks"]) for band in bands)]
    return fields["phase"], n_pus, [(sequences, _placed_ranks(ranks)) for sequences, ranks in loads]


def _placed_ranks(ranks: Any) -> list[tuple[int, ...]]:
    if not isinstance(ranks, list) or not all(isinstance(rank, list) for rank in ranks):
        raise PlanError("the ranks of a plan must be lists of places")
    return [RankCores(tuple(rank)).cores for rank in ranks[: MAX_RANKS + 1]]


def _parsed(text: str) -> Any:
    try:
        return read_json(text)
    except ValueError:
        raise PlanError("the plan is not JSON") from None


def ranks_from(fields: Any) -> tuple[RankCores, ...]:
    """The ranks in JSON values of `ranks_fields`. PlanError for other values."""
    if not isinstance(fields, list):
        raise PlanError("the ranks of a plan must be a list")
    return tuple(_rank(rank) for rank in fields[: MAX_RANKS + 1])


def bands_from(fields: Any) -> tuple[LoadBand, ...]:
    """The bands in JSON values of `bands_fields`. PlanError for other values."""
    _check_bands(fields)
    return tuple(LoadBand(band["sequences"], ranks_from(band["ranks"])) for band in fields)


def _check_bands(fields: Any) -> None:
    if not isinstance(fields, list) or len(fields) > MAX_BANDS:
        raise PlanError(f"the bands of a plan must be a list of at most {MAX_BANDS}")
    for band in fields:
        _check_object(band, {"sequences", "ranks"}, "a band")


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
    """The key of a model's plans: its name and the format of its weights, e.g. `tinyllama@int4`."""
    return f"{name}@{weight_format}"


def machine_key(machine: Machine, cores: Sequence[int] | None = None) -> MachineKey:
    """The key of plans and measurements: the signatures of the machine's cores and of the placement of
    `cores`. `cores`: those that ran a measurement; None for plans: all cores that this process may use."""
    if cores is None:
        cores = tuple(core[0] for core in machine.allowed_cores()) or machine.allowed_pus
    return MachineKey(core_signature(machine), placement_signature(machine, cores))


def default_plan(
    machine: Machine, phase: Phase, threads: int | None = None, ranks: int | None = None
) -> ServicePlan:
    """One rank over the allowed cores, one PU each, within the cgroup quota. `threads`: the number of PUs
    instead, quota or not; beyond the number of cores, second PUs of cores are taken. `ranks`: divide the PUs
    into this many ranks, neighbours on a NUMA node together. PlanError if either does not fit."""
    pus = pus_by_preference(machine)
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
    """Ranks of equally many PUs, to within one, each with its share of every kind of core."""
    if n_ranks == 1:
        return (rank_on(machine, pus),)
    if not 1 <= n_ranks <= min(len(pus), MAX_RANKS):
        raise PlanError(
            f"{counted(n_ranks, 'rank')} cannot divide {counted(len(pus), 'core')}: each needs one of its own"
        )
    nodes = [set(node.cpus) for node in machine.nodes(Kind.NUMA)]
    place_in_kind = _places_in_kinds(machine, pus)
    by_node = sorted(pus, key=lambda pu: ([pu not in node for node in nodes], place_in_kind[pu]))
    cuts = [len(pus) * rank // n_ranks for rank in range(n_ranks + 1)]
    return tuple(rank_on(machine, tuple(by_node[a:b])) for a, b in itertools.pairwise(cuts))


def _places_in_kinds(machine: Machine, pus: Sequence[int]) -> dict[int, float]:
    """The position of each PU within its kind of core, from 0 to 1."""
    speed_of = _speed_of(machine)
    by_kind: dict[int, list[int]] = {}
    for pu in pus:
        by_kind.setdefault(speed_of.get(pu, -1), []).append(pu)
    return {pu: (place + 0.5) / len(own) for own in by_kind.values() for place, pu in enumerate(own)}


def _speed_of(machine: Machine) -> dict[int, int]:
    """The number of each PU's kind of core, counted from the slowest; PUs without a kind are left out."""
    return {pu: number for number, kind in enumerate(machine.kinds) for pu in kind.cpus}


def default_thread_count(machine: Machine) -> int:
    """Threads of the default plan: one per core, within the cgroup quota. A quota of 2.5 CPUs allows two
    pinned threads: a third would get all of them throttled."""
    cores = len(machine.allowed_cores()) or len(machine.allowed_pus)
    quota = cores if machine.cpu_quota is None else max(1, int(machine.cpu_quota))
    return min(cores, quota)


def pus_by_preference(machine: Machine) -> tuple[int, ...]:
    """The allowed PUs: the first of every core, then the second of every core, and so on, fastest kinds
    first."""
    speed_of = _speed_of(machine)
    cores = sorted(machine.allowed_cores(), key=lambda core: -speed_of.get(core[0], -1))
    depth = max((len(core) for core in cores), default=0)
    by_turn = tuple(core[turn] for turn in range(depth) for core in cores if turn < len(core))
    return by_turn or machine.allowed_pus


def rank_on(machine: Machine, pus: tuple[int, ...]) -> RankCores:
    """A rank on these PUs, with the NUMA node that holds all of them, if there is one."""
    holders = (node.os_index for node in machine.nodes(Kind.NUMA) if set(pus) <= set(node.cpus))
    return RankCores(pus, next(holders, None))


def check_fits(plan: ServicePlan, machine: Machine) -> None:
    """Raise PlanError, saying why, unless this process may run the plan on this machine."""
    foreign = sorted(plan.all_cores.difference(machine.allowed_pus))
    if foreign:
        raise PlanError(
            f"this process may not use core {list_cores(foreign)}, only {list_cores(machine.allowed_pus)}"
        )
    quota, n_threads = machine.cpu_quota, max(len(each.cores) for each in plan.each)
    if quota is not None and n_threads > max(1, int(quota)):
        raise PlanError(
            f"{counted(n_threads, 'thread')} would be throttled:"
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
    default: DefaultPlan = default_plan,
) -> Mapping[Phase, ServicePlan]:
    """The plan of each phase for `model` (a `model_key`): by flags, else from the database, else the default.
    A plan of the database that cannot run here is ignored, and `report` is told why in one line."""
    if threads is not None or ranks is not None:
        return {phase: default_plan(machine, phase, threads, ranks) for phase in PHASES}
    if store is None:
        return {phase: default(machine, phase) for phase in PHASES}
    key = machine_key(machine)
    return {
        phase: _stored_plan(store.newest_plan(key, model, phase), machine, phase, report)
        or default(machine, phase)
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
    default: DefaultPlan = default_plan,
) -> Mapping[Phase, ServicePlan]:
    """`resolve_plans` with the database that `--db` names, which is opened only if needed and never created.
    DatabaseNameError if `db` can name no database."""
    location = locate(db)
    is_flagged = threads is not None or ranks is not None
    if is_flagged or location.is_absent:
        if location.is_absent and not location.is_default:
            report(f"there is no database at {location.name} yet: default plans are used")
        return resolve_plans(None, machine, model, threads, report, ranks, default)
    # SQLAlchemy takes a quarter of a second to load, which a start without a database need not pay.
    from phasewise.kerneldb.start_reads import open_start_reads

    with open_start_reads(db, report) as reads:
        return resolve_plans(reads, machine, model, None, report, default=default)


def parse_cores(text: str) -> tuple[int, ...]:
    """CPU numbers in taskset's form, e.g. `0-3,8`, in the order given. PlanError for other texts."""
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
    """CPU numbers in taskset's form, consecutive ones joined: `0-3,8`. The order is kept."""
    runs: list[list[int]] = []
    for pu in pus:
        if runs and pu == runs[-1][1] + 1:
            runs[-1][1] = pu
        else:
            runs.append([pu, pu])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)

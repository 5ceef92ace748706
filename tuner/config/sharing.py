"""Bandwidth sharing: the rates at which the cores of a configuration read while all of them read.

Every active PU wants what its core can read; cores, L3s, memories, links between NUMA nodes and hidden
resources each serve a bounded rate. The rates of all PUs rise together until a resource is full; PUs behind
it stay, the others rise further: max-min fairness, as arbiters that serve in turn bring about (Bertsekas and
Gallager, Data Networks, section 6.5.2).

A hidden resource is shared by cores but shown by no system tool, e.g. the LLC tag array of four neighbouring
cores of a Kunpeng 920. The modelled evaluator reads hidden resources from a file:

    [{"pus": [0, 1, 2, 3], "read_gbps": 20.0, "lost_per_extra_pu": 0.3}, ...]

All reads of those PUs pass through the resource, which serves `read_gbps` (10^9 bytes a second). Once the
active PUs saturate it, each further active PU costs the fraction `lost_per_extra_pu` of it."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasewise._files import read_input
from phasewise._json import read_json
from phasewise._words import number
from phasewise.topology import Kind, Machine
from phasewise.tuner.config.rates import CoreShare, MachineRates
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import RankCores, list_cores

MAX_FILE_BYTES = 4 << 20
MAX_RESOURCES = 4096
MAX_READ_GBPS = 1e6
LEAST_SHARE = 0.05
"""The least share of its rate that a resource serves, however many PUs crowd it."""

FIELDS = frozenset({"pus", "read_gbps", "lost_per_extra_pu"})


@dataclass(frozen=True, slots=True)
class HiddenResource:
    """A resource that some PUs share although no system tool shows it."""

    pus: tuple[int, ...]
    read_gbps: float
    lost_per_extra_pu: float

    def __post_init__(self) -> None:
        _check_pus(self.pus)
        _check_number("read_gbps", self.read_gbps, MAX_READ_GBPS)
        _check_number("lost_per_extra_pu", self.lost_per_extra_pu, 1.0)
        if self.read_gbps == 0:
            raise EvaluationError("read_gbps must be more than 0")

    def capacity_gbps(self, active: int, asked_gbps: float) -> float:
        """The rate that the resource serves to `active` PUs that together ask for `asked_gbps`."""
        if asked_gbps <= self.read_gbps:
            return self.read_gbps
        saturating = math.ceil(self.read_gbps / (asked_gbps / active))
        lost = self.lost_per_extra_pu * (active - saturating)
        return self.read_gbps * max(LEAST_SHARE, 1.0 - lost)


def read_hidden(path: str | os.PathLike[str], machine: Machine) -> tuple[HiddenResource, ...]:
    """The hidden resources in a file. EvaluationError, naming file and entry, for any invalid content."""
    name = os.fspath(path)
    try:
        content = read_input(path, MAX_FILE_BYTES)
    except OSError as error:
        raise EvaluationError(f"{name}: {error.strerror or error}") from None
    try:
        entries = read_json(content)
    except ValueError:
        raise EvaluationError(f"{name} is not JSON: a list of hidden resources expected") from None
    if not isinstance(entries, list) or len(entries) > MAX_RESOURCES:
        raise EvaluationError(f"{name} must hold a list of at most {MAX_RESOURCES} hidden resources")
    allowed = frozenset(machine.allowed_pus)
    return tuple(_resource(entry, f"{name}, entry {n}", allowed) for n, entry in enumerate(entries, 1))


def _resource(entry: Any, where: str, machine_pus: frozenset[int]) -> HiddenResource:
    if not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise EvaluationError(f"{where}: an object with exactly {', '.join(sorted(FIELDS))} expected")
    if not isinstance(entry["pus"], list):
        raise EvaluationError(f"{where}: pus must be a list of CPU numbers")
    try:
        resource = HiddenResource(tuple(entry["pus"]), entry["read_gbps"], entry["lost_per_extra_pu"])
    except EvaluationError as error:
        raise EvaluationError(f"{where}: {error}") from None
    if foreign := sorted(set(resource.pus) - machine_pus):
        raise EvaluationError(f"{where}: the machine has no PU {list_cores(foreign[:8])}")
    return resource


def _check_pus(pus: tuple[Any, ...]) -> None:
    if not pus:
        raise EvaluationError("pus is empty: name the PUs that share the resource")
    for pu in pus:
        if type(pu) is not int or pu < 0:
            raise EvaluationError(f"a PU must be a number from 0 on, not {pu!r:.40}")
    if len(set(pus)) != len(pus):
        raise EvaluationError("pus names a PU twice")


def _check_number(name: str, value: object, high: float) -> None:
    if type(value) not in (int, float) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise EvaluationError(f"{name} must be a number from 0 to {number(high)}, not {value!r:.40}")


Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

LOCAL_RATING = 10
"""The firmware's rating of a NUMA node's distance to itself; 20 is twice as far."""

_WHOLE = CoreShare()

_EVEN = 1 + 1e-9
"""Factor within which two rates count as equal: rounding must not keep a full resource open."""


def fair_rates(demand: Vector, use: Matrix, capacity: Vector) -> Vector:
    """Max-min fair rates: rate <= demand, use @ rate <= capacity. use[c, i]: what a unit of i takes of c."""
    assert use.shape == (capacity.size, demand.size), f"{use.shape} for {capacity.size} x {demand.size}"
    rate = np.zeros_like(demand)
    rising = np.ones(demand.size, dtype=bool)
    while rising.any():
        weight = use[:, rising].sum(axis=1)
        slack = np.maximum(0.0, capacity - use[:, ~rising] @ rate[~rising])
        levels = np.full(capacity.size, np.inf)
        np.divide(slack, weight, out=levels, where=weight > 0)
        level = min(float(levels.min(initial=np.inf)), float(demand[rising].min()))
        behind_full = (use[levels <= level * _EVEN] > 0).any(axis=0)
        stays = rising & (behind_full | (demand <= level * _EVEN))
        rate[stays] = np.minimum(level, demand[stays])
        rising &= ~stays
    return rate


class Neighbourhood:
    """A lookup of the core, L3, NUMA node and package of each PU."""

    def __init__(self, machine: Machine) -> None:
        self._core_of = _holders(machine, Kind.CORE)
        self._l3_of = _holders(machine, Kind.L3)
        self._package_of = _holders(machine, Kind.PACKAGE)
        # Of two memories with the same PUs the first one counts, as in `plans.rank_on`.
        memories = reversed(machine.nodes(Kind.NUMA))
        self._node_of = {pu: node.os_index or 0 for node in memories for pu in node.cpus}
        self._distances = machine.distances
        self._package_of_node = {node: self._package_of.get(pu, 0) for pu, node in self._node_of.items()}

    def l3s_of(self, pus: Sequence[int]) -> list[int | None]:
        """The index of each PU's L3; None for a PU without one."""
        return [self._l3_of.get(pu) for pu in pus]

    def node_of(self, pu: int) -> int:
        """The number of the PU's NUMA node; 0 where the machine does not say."""
        return self._node_of.get(pu, 0)

    def nodes_of(self, pus: Sequence[int]) -> set[int]:
        """The NUMA nodes of these PUs."""
        return {self.node_of(pu) for pu in pus}

    def share_l3(self, pus: Sequence[int]) -> bool:
        """True if one L3 holds all of these PUs."""
        l3s = set(self.l3s_of(pus))
        return len(l3s) == 1 and None not in l3s

    def share_package(self, pus: Sequence[int]) -> bool:
        """True if one package holds all of these PUs."""
        return len({self._package_of.get(pu, 0) for pu in pus}) == 1

    def are_neighbours(self, first: int, second: int) -> bool:
        """True if two NUMA nodes lie in one package."""
        return self._package_of_node.get(first, 0) == self._package_of_node.get(second, 0)

    def rating(self, first: int, second: int) -> int | None:
        """The firmware's distance between two NUMA nodes, 10 for the same node; None where it states none."""
        return None if self._distances is None else self._distances.between(first, second)

    def core_shares(self, pus: Sequence[int]) -> list[float]:
        """The share of its core that each of these PUs has while all of them are active."""
        cores = [self._core_of.get(pu, -1 - pu) for pu in pus]
        active = Counter(cores)
        return [1 / active[core] for core in cores]

    def memory_of(self, rank: RankCores) -> dict[int, float]:
        """The NUMA nodes of the rank's weights, with the share of the weights on each."""
        if rank.numa_node is not None:
            return {rank.numa_node: 1.0}
        nodes = [self.node_of(pu) for pu in rank.cores]
        return {node: nodes.count(node) / len(nodes) for node in sorted(set(nodes))}


def _holders(machine: Machine, kind: Kind) -> dict[int, int]:
    return {pu: index for index, node in enumerate(machine.nodes(kind)) for pu in node.cpus}


class ReadSharing:
    """The read limits of a machine, to be asked about many configurations."""

    def __init__(self, machine: Machine, rates: MachineRates, hidden: Sequence[HiddenResource] = ()) -> None:
        self.where = Neighbourhood(machine)
        self._rates = rates
        self._hidden = tuple(hidden)
        self._column = {pu: column for column, pu in enumerate(machine.allowed_pus)}
        self._behind = np.zeros((len(self._hidden), len(self._column)))
        for row, resource in zip(self._behind, self._hidden, strict=True):
            row[[self._column[pu] for pu in resource.pus if pu in self._column]] = 1.0

    def rank_bytes_per_s(self, ranks: Sequence[RankCores]) -> list[float]:
        """The rate at which each rank reads while all ranks read."""
        pus = [pu for rank in ranks for pu in rank.cores]
        memories = [memory for rank in ranks for memory in [self.where.memory_of(rank)] * len(rank.cores)]
        demand = np.array([core_demand for rank in ranks for core_demand in self._demands(rank)])
        demand *= self.where.core_shares(pus)
        limits = [*self._cache_limits(pus), *self._memory_limits(pus, memories)]
        limits += self._hidden_limits(pus, demand)
        use = np.array([row for row, _ in limits], dtype=np.float64).reshape(len(limits), len(pus))
        rate = fair_rates(demand, use, np.array([capacity for _, capacity in limits]))
        ends = np.cumsum([len(rank.cores) for rank in ranks])
        return [float(part.sum()) for part in np.split(rate, ends[:-1])]

    def _demands(self, rank: RankCores) -> list[float]:
        """Bytes a second of each core alone; the nodes that it reads take turns, so their times add up."""
        memory = self.where.memory_of(rank)
        times_of_byte = {
            home: sum(part / self._reach(home, node) for node, part in memory.items())
            for home in self.where.nodes_of(rank.cores)
        }
        rate, shares = self._rates.core_read_bytes_per_s, self._rates.core_share
        return [
            rate * shares.get(pu, _WHOLE).reading / times_of_byte[self.where.node_of(pu)] for pu in rank.cores
        ]

    def _reach(self, home: int, node: int) -> float:
        """Share of its rate that a core of node `home` reaches in the memory of `node`."""
        share = self._rates.node_share.get(node, 1.0)
        if home == node:
            return share
        rating = self.where.rating(home, node)
        if rating is not None:
            return share * LOCAL_RATING / max(rating, LOCAL_RATING)
        if self.where.are_neighbours(home, node):
            return share * self._rates.remote_node_share
        return share * self._rates.remote_package_share

    def _cache_limits(self, pus: Sequence[int]) -> list[tuple[Vector, float]]:
        capacity = self._rates.l3_read_bytes_per_s
        if capacity is None:
            return []
        l3s = self.where.l3s_of(pus)
        return [
            (np.array([mine == l3 for mine in l3s], dtype=np.float64), capacity)
            for l3 in dict.fromkeys(l3s)
            if l3 is not None
        ]

    def _memory_limits(
        self, pus: Sequence[int], memories: Sequence[Mapping[int, float]]
    ) -> list[tuple[Vector, float]]:
        """The limits of each node's memory: for all cores, and for its own cores from other nodes."""
        limits = []
        homes = np.array([self.where.node_of(pu) for pu in pus])
        for node in sorted({node for memory in memories for node in memory}):
            reads = np.array([memory.get(node, 0.0) for memory in memories])
            if self._rates.numa_read_bytes_per_s is not None:
                share = self._rates.node_share.get(node, 1.0)
                limits.append((reads, share * self._rates.numa_read_bytes_per_s))
        if self._rates.link_read_bytes_per_s is not None:
            local = np.array([memory.get(home, 0.0) for memory, home in zip(memories, homes, strict=True)])
            limits += [
                (np.where(homes == home, 1.0 - local, 0.0), self._rates.link_read_bytes_per_s)
                for home in sorted({*homes.tolist()})
            ]
        return limits

    def _hidden_limits(self, pus: Sequence[int], demand: Vector) -> list[tuple[Vector, float]]:
        behind = self._behind[:, [self._column[pu] for pu in pus]]
        asked_gbps = behind @ demand / 1e9
        return [
            (row, resource.capacity_gbps(int(row.sum()), asked) * 1e9)
            for resource, row, asked in zip(self._hidden, behind, asked_gbps.tolist(), strict=True)
            if asked > 0
        ]

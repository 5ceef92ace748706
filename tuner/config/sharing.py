"""Bandwidth sharing: the rate at which the cores of a configuration read, all at once.

Every active PU wants what its core can read; cores, L3s, memories, links between NUMA nodes and hidden
resources each serve a bounded rate. The rates of all PUs rise together until something is full; those behind
it stay, the others go on: max-min fairness, as arbiters that serve in turn bring it about (Bertsekas and
Gallager, Data Networks, section 6.5.2).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from phasewise.topology import Kind, Machine
from phasewise.tuner.config.hidden import HiddenResource
from phasewise.tuner.config.rates import CoreShare, MachineRates
from phasewise.tuner.plans import RankCores

Vector = npt.NDArray[np.float64]
Matrix = npt.NDArray[np.float64]

LOCAL_RATING = 10
"""Firmware's rating of a NUMA node's distance to itself; 20 is twice as far."""

_WHOLE = CoreShare()

_EVEN = 1 + 1e-9
"""Factor within which two rates count as equal: rounding must not keep a full resource open."""


def fair_rates(demand: Vector, use: Matrix, capacity: Vector) -> Vector:
    """Max-min fair rates: rate <= demand, use @ rate <= capacity. use[c, i]: what a unit of i costs c."""
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
    """The place of each PU: the parts of a machine that limit reading, as sets of PUs."""

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
        """The L3 of each PU, by position in the machine; None where it has none."""
        return [self._l3_of.get(pu) for pu in pus]

    def node_of(self, pu: int) -> int:
        """The PU's NUMA node by number; 0 where the machine does not say."""
        return self._node_of.get(pu, 0)

    def nodes_of(self, pus: Sequence[int]) -> set[int]:
        """The NUMA nodes that these PUs lie in."""
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
        """The firmware's distance between two NUMA nodes, 10 for one node; None where it does not say."""
        return None if self._distances is None else self._distances.between(first, second)

    def core_shares(self, pus: Sequence[int]) -> list[float]:
        """The share of its core that each of these PUs has when all of them are active."""
        cores = [self._core_of.get(pu, -1 - pu) for pu in pus]
        active = Counter(cores)
        return [1 / active[core] for core in cores]

    def memory_of(self, rank: RankCores) -> dict[int, float]:
        """The NUMA nodes on which the rank's weights lie, and the share of them on each."""
        if rank.numa_node is not None:
            return {rank.numa_node: 1.0}
        nodes = [self.node_of(pu) for pu in rank.cores]
        return {node: nodes.count(node) / len(nodes) for node in sorted(set(nodes))}


def _holders(machine: Machine, kind: Kind) -> dict[int, int]:
    return {pu: index for index, node in enumerate(machine.nodes(kind)) for pu in node.cpus}


class ReadSharing:
    """The limits of a machine, ready to be asked about many configurations."""

    def __init__(self, machine: Machine, rates: MachineRates, hidden: Sequence[HiddenResource] = ()) -> None:
        self.where = Neighbourhood(machine)
        self._rates = rates
        self._hidden = tuple(hidden)
        self._column = {pu: column for column, pu in enumerate(machine.allowed_pus)}
        self._behind = np.zeros((len(self._hidden), len(self._column)))
        for row, resource in zip(self._behind, self._hidden, strict=True):
            row[[self._column[pu] for pu in resource.pus if pu in self._column]] = 1.0

    def rank_bytes_per_s(self, ranks: Sequence[RankCores]) -> list[float]:
        """The rate at which each rank reads while all of them do."""
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
        """Bytes a second of each core alone: the nodes that it reads take turns, so their times add up."""
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
        """Share of a core's rate that it reaches in the memory of `node`: by the firmware's rating if any."""
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
        """The limits of each node's memory: what it serves to all cores, and what its cores take in from
        other nodes."""
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

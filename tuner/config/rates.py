"""Rates of a machine's cores, caches and memories, for the modelled evaluator.

They are the machine's measured limits, or stated defaults: round figures of server processors of the years
2017 to 2023, good enough to rank configurations, not to predict speeds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from phasewise.topology import Machine
from phasewise.tuner.errors import EvaluationError


@dataclass(frozen=True, slots=True)
class LineLatency:
    """Nanoseconds for a cache line that another core has just written, by what both cores share."""

    l3_ns: float = 40.0
    numa_ns: float = 110.0
    package_ns: float = 150.0
    machine_ns: float = 220.0


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The share of the fastest core's rates that a slower core reaches."""

    computing: float = 1.0
    reading: float = 1.0


@dataclass(frozen=True)
class MachineRates:
    """Rates per second. A capacity that is None limits nothing."""

    flops_per_core: float
    core_read_bytes_per_s: float
    """The rate at which one core reads its own node's memory, however many of its PUs are active."""
    l3_read_bytes_per_s: float | None
    """The rate at which the cores of one L3 read together."""
    numa_read_bytes_per_s: float | None
    """The rate at which the memory of one NUMA node serves reads."""
    link_read_bytes_per_s: float | None = 40e9
    """The rate at which the cores of one NUMA node read from all other nodes together."""
    remote_node_share: float = 0.7
    """Share of `core_read_bytes_per_s` in another node of the package, where firmware rates no distances."""
    remote_package_share: float = 0.5
    """Share of `core_read_bytes_per_s` in a node of another package, where firmware rates no distances."""
    node_share: Mapping[int, float] = field(default_factory=dict)
    """For slower NUMA nodes, by number: the factor of both memory rates and of the speed of cache lines."""
    core_share: Mapping[int, CoreShare] = field(default_factory=dict)
    """Shares of slower PUs, by number: of another kind of core, or with a busy neighbour."""
    latency: LineLatency = LineLatency()
    attention_flops_per_core: float | None = None
    """Operations a second of one core in attention's scores and values; None: as in products."""
    row_bytes_per_s: float = 8e9
    """The rate at which one core normalises and rounds the float32 inputs of a product."""
    op_ns: float = 500.0
    """Time of an op in one thread besides its work and the meeting after it."""
    step_ns: float = 20_000.0
    """Time of a step besides its ops."""

    def __post_init__(self) -> None:
        names = ("flops_per_core", "core_read_bytes_per_s", "remote_node_share", "remote_package_share")
        for name in (*names, "row_bytes_per_s"):
            _check_rate(name, getattr(self, name))
        optional = ("l3_read_bytes_per_s", "numa_read_bytes_per_s", "link_read_bytes_per_s")
        for name in (*optional, "attention_flops_per_core"):
            if getattr(self, name) is not None:
                _check_rate(name, getattr(self, name))
        for node, share in self.node_share.items():
            _check_rate(f"the share of NUMA node {node}", share)
        for pu, core in self.core_share.items():
            _check_rate(f"the share of PU {pu}", min(core.computing, core.reading))


def _check_rate(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise EvaluationError(f"{name} must be more than 0 and finite, not {value!r:.40}")


def default_rates(machine: Machine, core_share: Mapping[int, CoreShare] | None = None) -> MachineRates:
    """Stated defaults: float32 multiplies at 2.5 GHz by vector width, and memories of 2020. `core_share`:
    measured shares; None: stated ones by the names of the kinds of cores."""
    return MachineRates(
        core_share=stated_shares(machine) if core_share is None else core_share,
        flops_per_core=_default_flops(machine),
        core_read_bytes_per_s=12e9,
        l3_read_bytes_per_s=None,
        numa_read_bytes_per_s=100e9,
    )


SHARE_OF_KIND = {"efficiency": CoreShare(0.5, 0.7), "low-power": CoreShare(0.3, 0.4)}
"""Shares of Intel's slower kinds of core, where nothing is measured."""
CAPACITY = re.compile(r"capacity-(\d+)")
"""The name of one of Arm's kinds of core, with its pace as rated by the firmware."""


def stated_shares(machine: Machine) -> dict[int, CoreShare]:
    """The shares of slower kinds of core, by their names; empty where all cores are alike."""
    capacities = [int(match[1]) for kind in machine.kinds if (match := CAPACITY.fullmatch(kind.name))]
    shares: dict[int, CoreShare] = {}
    for kind in machine.kinds[:-1]:
        match = CAPACITY.fullmatch(kind.name)
        ratio = max(1, int(match[1])) / max(1, *capacities) if match else None
        share = SHARE_OF_KIND.get(kind.name, CoreShare()) if ratio is None else CoreShare(ratio, ratio**0.5)
        shares |= dict.fromkeys(kind.cpus, share)
    return shares


def _default_flops(machine: Machine) -> float:
    features = machine.cpu.features
    if "avx512f" in features:
        return 160e9
    if "avx2" in features or machine.cpu.architecture in (None, "x86_64"):
        return 80e9
    return 40e9

"""Machines for a day of embedding queries, with and without their CPUs: WindVE's equations 5 and 6.

A device answers C queries at once within the promised time where alpha C + beta fits into it (equation 12);
a machine's concurrency is the sum over its accelerators and, where it helps, its CPU. N is the number of
queries that come within one promised time: at the day's peak (equation 6), on average (5), or hour by hour.
The equations know no waiting for a batch that has begun: `bench embed --rate` tells what a server keeps.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from phasewise._words import number
from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.spec_file import SpecTable, parsed_file
from phasewise.serving.embedding.depth import LatencyLine, fit
from phasewise.tuner.config.day import DayCurve, day_curve
from phasewise.workflows.capacity.settings import ProvisionWish
from phasewise.workflows.errors import UsageError

HOURS_OF_A_DAY = 24.0
Deployed = Literal["peak", "mean", "by hour"]
"""The load that the number of machines follows: equation 6, equation 5, or each part of the day its own."""
DEPLOYED: tuple[Deployed, ...] = get_args(Deployed)


@dataclass(frozen=True)
class EmbeddingMachine:
    """A machine that embeds. `cost`: of an hour, CPU included, accelerators not."""

    cost: float
    accelerators: int
    accelerator_cost: float
    accelerator: LatencyLine
    cpu: LatencyLine

    @property
    def whole_cost(self) -> float:
        return self.cost + self.accelerators * self.accelerator_cost

    def concurrency(self, slo_s: float, *, with_cpu: bool) -> int:
        """Queries at once that it answers within `slo_s`."""
        accelerated = self.accelerators * self.accelerator.largest_within(slo_s)
        return accelerated + (self.cpu.largest_within(slo_s) if with_cpu else 0)


@dataclass(frozen=True)
class EmbeddingFleet:
    """One way to deploy. `machines`: the most at once; `cost`: of a day."""

    deployed: Deployed
    uses_cpus: bool
    machines: int
    accelerators: int
    concurrency: int
    """Queries at once that one machine answers in time."""
    cost: float
    parts_over: int
    """Parts of the day with more queries than the machines answer in time."""


@dataclass(frozen=True)
class EmbeddingDay:
    """The answer: all ways, those without CPUs first of each pair."""

    day: DayCurve
    slo_s: float
    machine: EmbeddingMachine
    fleets: tuple[EmbeddingFleet, ...]

    def saved(self, deployed: Deployed) -> float:
        """The share of the cost that CPUs save."""
        idle, used = (fleet.cost for fleet in self.fleets if fleet.deployed == deployed)
        return 1 - used / idle

    @property
    def saved_at_most(self) -> float:
        """The same without whole machines: C_CPU / (C_CPU + C_NPU), section III-B."""
        idle, used = (self.machine.concurrency(self.slo_s, with_cpu=with_cpu) for with_cpu in (False, True))
        return 1 - idle / used


def provision_embeddings(day: str, wish: ProvisionWish) -> EmbeddingDay:
    """The machines of the file `wish.embeddings` for the day. ClusterError, TraceError or UsageError."""
    assert wish.embeddings is not None
    slo_s = _seconds(wish.slo)
    return embedding_day(day_curve(day), slo_s, read_embedding_machine(wish.embeddings))


def embedding_day(day: DayCurve, slo_s: float, machine: EmbeddingMachine) -> EmbeddingDay:
    """ClusterError where no accelerator answers even one query in time."""
    if machine.concurrency(slo_s, with_cpu=False) < 1:
        raise ClusterError(f"no accelerator answers a query within {number(slo_s)} s")
    return EmbeddingDay(day, slo_s, machine, tuple(_fleets(day, slo_s, machine)))


def _fleets(day: DayCurve, slo_s: float, machine: EmbeddingMachine) -> Iterator[EmbeddingFleet]:
    part_h = HOURS_OF_A_DAY / len(day.rates)
    for deployed in DEPLOYED:
        for uses_cpus in (False, True):
            concurrency = machine.concurrency(slo_s, with_cpu=uses_cpus)
            needed = [_machines(rate * slo_s, concurrency) for rate in day.rates]
            always = {"peak": max(needed), "mean": _machines(day.mean * slo_s, concurrency)}.get(deployed)
            counts = needed if always is None else [always] * len(needed)
            yield EmbeddingFleet(
                deployed,
                uses_cpus,
                max(counts),
                max(counts) * machine.accelerators,
                concurrency,
                sum(counts) * part_h * machine.whole_cost,
                sum(need > count for need, count in zip(needed, counts, strict=True)),
            )


def _machines(n_queries: float, concurrency: int) -> int:
    return max(1, math.ceil(n_queries / concurrency - 1e-9))


def read_embedding_machine(path: Path) -> EmbeddingMachine:
    """The machine of a TOML file, which may come from a stranger. ClusterError in one line."""
    name = str(path)
    table = SpecTable(parsed_file(name), name)
    machine = table.table("machine", required=True)
    accelerator, cpu = (table.table(part, required=True) for part in ("accelerator", "cpu"))
    described = EmbeddingMachine(
        machine.number("cost", above=0.0),
        machine.whole("accelerators", 1, most=1024),
        accelerator.number("cost", 0.0),
        _line(accelerator),
        _line(cpu),
    )
    for part in (table, machine, accelerator, cpu):
        part.refuse_others()
    return described


def _line(table: SpecTable) -> LatencyLine:
    """Through the device's times of batches: [queries at once, ms]."""
    curve = table.points("times_ms")
    if curve is None or len(table.fields["times_ms"]) < 2:
        raise ClusterError(f"{table.where}: times_ms needs the times of two batches: [[8, 1000], [22, 2000]]")
    return fit(curve.xs, curve.ys)


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s)\s*", text)
    seconds = float(match[1]) / (1000 if match[2] == "ms" else 1) if match else 0.0
    if seconds <= 0:
        raise UsageError(
            f"--embeddings needs a promised time of one answer: --slo 1s or --slo 500ms, not {text!r:.40}"
        )
    return seconds

"""Weights that divide work by measured core speed, for teams with cores of several kinds.

Team members take pieces of attention, experts and large products as they become free. A product that memory
limits has one piece for each member, so that the slowest core would hold up all: weights make its piece
smaller. Ranks of one plan divide columns and heads by the sum of their cores' weights. No bit of a result
depends on the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain

from phasewise.cython_kernels import division
from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.errors import TeamError
from phasewise.cython_kernels.limit_loops import MemberRates, rates_of_kinds, rates_of_members, rates_of_pus
from phasewise.topology import CpuKind, read_core_kinds
from phasewise.tuner.plans import Phase, ServicePlan

FULL = 1000
"""Weight of a core of the fastest kind."""

_log = logging.getLogger(__name__)


def weigh_by_kind(
    team: Team,
    cores: Sequence[int],
    kinds: Sequence[CpuKind],
    measure: Callable[[Team], MemberRates] = rates_of_members,
) -> None:
    """Weigh the team's members by the measured kinds of `cores`; no effect for cores of one kind."""
    numbers = kinds_of(cores, kinds)
    if len(set(numbers)) < 2:
        return
    try:
        rates = measure(team)
    except MemoryError:
        _log.warning("no memory to measure cores of several kinds: all get equal shares")
        return
    reading, computing = (
        division.weights(rates_of_kinds(each, numbers), FULL) for each in (rates.reading, rates.computing)
    )
    team.weigh(reading, computing)
    by_kind = dict(zip(numbers, zip(reading, computing, strict=True), strict=True))
    for number, (read, compute) in sorted(by_kind.items()):
        name = kinds[number].name if number < len(kinds) else "other"
        _log.info("cores of kind %s: shares of %d when reading, %d when computing", name, read, compute)


def weights_of_ranks(
    phase: Phase,
    ranks: Sequence[Sequence[int]],
    kinds: Sequence[CpuKind],
    measure: Callable[[Sequence[int]], MemberRates] = rates_of_pus,
) -> tuple[int, ...]:
    """The weight of each rank: the sum over its cores, by reading speed in decode and computing speed in
    prefill. Equal to the number of its cores where all are of one kind, or cannot be measured."""
    cores, sizes = [*chain(*ranks)], tuple(map(len, ranks))
    numbers = kinds_of(cores, kinds)
    if len(ranks) < 2 or len(set(numbers)) < 2:
        return sizes
    try:
        rates = measure(cores)
    except (MemoryError, TeamError) as error:
        _log.warning("cores of several kinds were not measured: ranks have shares by threads: %s", error)
        return sizes
    own = rates.reading if phase == "decode" else rates.computing
    return division.weights_of_ranks(sizes, rates_of_kinds(own, numbers))


def weights_here(plan: ServicePlan) -> tuple[int, ...]:
    """`weights_of_ranks` of a plan on this machine, measured once in a process. Raises TopologyError."""
    return _weights_here(plan.phase, tuple(rank.cores for rank in plan.ranks))


@cache
def _weights_here(phase: Phase, ranks: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return weights_of_ranks(phase, ranks, read_core_kinds() if len(ranks) > 1 else ())


def kinds_of(cores: Sequence[int], kinds: Sequence[CpuKind]) -> list[int]:
    """Index of each core's kind in `kinds`; for a core of unknown kind, `len(kinds)`."""
    by_core = {cpu: number for number, kind in enumerate(kinds) for cpu in kind.cpus}
    return [by_core.get(core, len(kinds)) for core in cores]

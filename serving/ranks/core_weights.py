"""Shares of products by what cores were measured to do, where a team has cores of several kinds.

The members of a team take pieces of attention, of experts and of large products as they come free. Of a
product that memory limits each has one piece, and the slowest core would hold up all: by weights its piece is
smaller. Ranks of one plan divide columns and heads by what their cores weigh together. No bit of a result
depends on either.
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
"""The weight of the fastest kind."""

_log = logging.getLogger(__name__)


def weigh_by_kind(
    team: Team,
    cores: Sequence[int],
    kinds: Sequence[CpuKind],
    measure: Callable[[Team], MemberRates] = rates_of_members,
) -> None:
    """Weigh the members of a team by the kinds of `cores`; cores of one kind weigh the same."""
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
    """The weight of each rank on these cores: the sum over its cores, when reading in decode and when
    computing in prefill. As many as its cores where these are alike, or cannot be measured."""
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
    """`weights_of_ranks` of a plan on this machine, measured once by a process. TopologyError."""
    return _weights_here(plan.phase, tuple(rank.cores for rank in plan.ranks))


@cache
def _weights_here(phase: Phase, ranks: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    return weights_of_ranks(phase, ranks, read_core_kinds() if len(ranks) > 1 else ())


def kinds_of(cores: Sequence[int], kinds: Sequence[CpuKind]) -> list[int]:
    """The number of each core's kind; a core of no known kind has the number behind the last."""
    by_core = {cpu: number for number, kind in enumerate(kinds) for cpu in kind.cpus}
    return [by_core.get(core, len(kinds)) for core in cores]

"""Shares of products by what cores were measured to do, where a team has cores of several kinds.

The members of a team take pieces of attention, of experts and of large products as they come free. Of a
product that memory limits each has one piece, and the slowest core would hold up all: by weights its piece is
smaller. No bit of a result depends on them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.limit_loops import MemberRates, rates_of_kinds, rates_of_members
from phasewise.topology import CpuKind

FULL = 1000
"""The weight of the fastest kind."""

_log = logging.getLogger(__name__)


def weigh_by_kind(
    team: Team,
    cores: Sequence[int],
    kinds: Sequence[CpuKind],
    measure: Callable[[Team], MemberRates] = rates_of_members,
) -> None:
    """Weigh the members of a team on `cores` where these are of several kinds; else all have the same."""
    numbers = kinds_of(cores, kinds)
    if len(set(numbers)) < 2:
        return
    try:
        rates = measure(team)
    except MemoryError:
        _log.warning("no memory to measure cores of several kinds: all get equal shares")
        return
    reading, computing = (weights(rates_of_kinds(each, numbers)) for each in (rates.reading, rates.computing))
    team.weigh(reading, computing)
    by_kind = dict(zip(numbers, zip(reading, computing, strict=True), strict=True))
    for number, (read, compute) in sorted(by_kind.items()):
        name = kinds[number].name if number < len(kinds) else "other"
        _log.info("cores of kind %s: shares of %d when reading, %d when computing", name, read, compute)


def kinds_of(cores: Sequence[int], kinds: Sequence[CpuKind]) -> list[int]:
    """The number of each core's kind; that behind the last for a core of none."""
    by_core = {cpu: number for number, kind in enumerate(kinds) for cpu in kind.cpus}
    return [by_core.get(core, len(kinds)) for core in cores]


def weights(rates: Sequence[float]) -> list[int]:
    """In proportion to rates, the largest FULL and none zero; where none was measured all are alike."""
    most = max(rates)
    return [max(1, round(FULL * rate / most)) if most > 0 else FULL for rate in rates]

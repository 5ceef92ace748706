"""Shares of slower cores' rates, and cores slower than others of their kind, measured while all work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from phasewise.cython_kernels.limit_loops import MemberRates, rates_of_kinds, rates_of_pus
from phasewise.topology import Machine
from phasewise.tuner.config.rates import CoreShare

Measure = Callable[[Sequence[int]], MemberRates]
"""A measurement of the rates of some PUs while all of them work."""


SLOW = 0.75
"""Share of its kind's median pace below which a core, in all of ROUNDS, counts as slow."""
ROUNDS = 3
LEAST_CORES = 3
"""The fewest cores of a kind among which a slow one can be told."""


def slow_pus(machine: Machine, measure: Measure = rates_of_pus) -> tuple[int, ...]:
    """PUs slower than others of their kind in each of ROUNDS measurements, slowest first."""
    firsts, kinds = _firsts_by_kind(machine)
    if max(kinds.count(kind) for kind in kinds) < LEAST_CORES:
        return ()
    best: dict[int, float] = {}
    for _ in range(ROUNDS):
        paces = measure(firsts).computing
        usual = rates_of_kinds(paces, kinds)
        for pu, kind, pace, of_kind in zip(firsts, kinds, paces, usual, strict=True):
            if kinds.count(kind) >= LEAST_CORES:
                best[pu] = max(best.get(pu, 0.0), pace / of_kind)
    return tuple(sorted((pu for pu, share in best.items() if share < SLOW), key=lambda pu: best[pu]))


def measured_shares(machine: Machine, measure: Measure = rates_of_pus) -> dict[int, CoreShare]:
    """Rates of each allowed PU as shares of the fastest kind's, equal within a kind; empty for one kind."""
    firsts, kinds = _firsts_by_kind(machine)
    if len(set(kinds)) < 2:
        return {}
    rates = measure(firsts)
    computing, reading = (rates_of_kinds(each, kinds) for each in (rates.computing, rates.reading))
    of_kind = {
        kind: CoreShare(own_pace / max(computing), own_reads / max(reading))
        for kind, own_pace, own_reads in zip(kinds, computing, reading, strict=True)
    }
    shares = dict(zip(firsts, (of_kind[kind] for kind in kinds), strict=True))
    return {pu: shares[core[0]] for core in machine.allowed_cores() for pu in core}


def _firsts_by_kind(machine: Machine) -> tuple[list[int], list[int]]:
    """The first allowed PU of every core, and the number of each core's kind (-1: none)."""
    number_of = {pu: number for number, kind in enumerate(machine.kinds) for pu in kind.cpus}
    firsts = [core[0] for core in machine.allowed_cores()]
    return firsts, [number_of.get(pu, -1) for pu in firsts]

"""Rates of several cores at once, and the kinds of numbers whose peak is measured (families/limits.c)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from phasewise.cython_kernels import _native

KINDS = ("f32", "f16", "bf16", "int8")

PROBE_S = 0.02
"""Seconds of one loop of a probe, long against a timer tick; a probe is three loops."""
PROBE_BYTES = 8 << 20
"""Bytes that each member reads in a probe: more than its L2, and all together more than their L3."""


@dataclass(frozen=True)
class MemberRates:
    """Bytes and operations a second of each member of a team while all of them work."""

    reading: tuple[float, ...]
    computing: tuple[float, ...]


def rates_of_members(team: _native.Team) -> MemberRates:
    """The rates of a team's members, measured on the calling thread, which the team pins.

    MemoryError where there is no room to read.
    """
    with closing(_native.Readers(team, PROBE_BYTES)) as readers:
        readers.rates(range(team.size), PROBE_S)
        reading = readers.rates(range(team.size), PROBE_S)
    return MemberRates(tuple(reading), tuple(_native.pace_of_members(team, PROBE_S)))


def rates_of_pus(pus: Sequence[int]) -> MemberRates:
    """The rates of these PUs of this machine, by a thread on each. TeamError where one cannot be had."""
    with closing(_native.Team(tuple(pus), idle_spin_us=0)) as team:
        return rates_of_members(team)


def rates_of_kinds(rates: Sequence[float], kinds: Sequence[int]) -> tuple[float, ...]:
    """The median rate of each member's kind: a disturbance of one member does not move it."""
    values, numbers = np.asarray(rates), np.asarray(kinds)
    medians = {kind: float(np.median(values[numbers == kind])) for kind in set(kinds)}
    return tuple(medians[kind] for kind in kinds)

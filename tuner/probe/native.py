"""The instruments of this machine: pinned threads of `cython_kernels`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from phasewise.cython_kernels._native import Readers, Team, pass_line

ROUNDS, TRIPS = 15, 50
"""A round of 50 trips takes 5 to 20 µs, long against the clock; the median of 15 forgets an interrupt."""

PATIENCE_S = 0.05
"""Seconds that a pair may take: a thousand times what it needs.

A host that gives less has no number for it.
"""


class NativeInstruments:
    """The instruments of this machine; for their contract see `tuner.probe.measure.Instruments`."""

    def one_way_ns(self, first: int, second: int) -> Sequence[float]:
        team = Team((first, second), idle_spin_us=0)
        try:
            return list(pass_line(team, ROUNDS, TRIPS, PATIENCE_S))
        finally:
            team.close()

    @contextmanager
    def readers(self, pus: Sequence[int], size_bytes: int) -> Iterator[Readers]:
        team = Team(tuple(pus), idle_spin_us=0)
        try:
            readers = Readers(team, size_bytes)
            try:
                yield readers
            finally:
                readers.close()
        finally:
            team.close()

"""Energy by phase: what the machine's counters say, divided by the time of steps between two readings.

Prefill and decode steps take turns within milliseconds, and counters are read a few times a second: each
phase gets the part of the energy that it had of the time, and what no step had is idle. What others compute
on the machine is counted too. On the event loop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from phasewise.serving.engine.messages import Answer, Failure, StepStats, Submit
from phasewise.serving.http.http_settings import RequestFacts
from phasewise.topology.energy import EnergyCounters
from phasewise.tuner.plans import PHASES

IDLE = "idle"
_READ_EVERY_S = 0.2


class PhaseEnergy:
    """Joules since the start, by zone and by phase. An `Observer` of the engine's client."""

    def __init__(self, counters: EnergyCounters) -> None:
        self._counters = counters
        self._read_s = time.monotonic()
        self._read_joules = 0.0
        self._step_s = dict.fromkeys(PHASES, 0.0)
        self._joules: dict[str, float] = dict.fromkeys((*PHASES, IDLE), 0.0)

    @property
    def is_measured(self) -> bool:
        return self._counters.absence is None

    def by_zone(self) -> dict[str, float]:
        """Empty where nothing can be read."""
        return self._counters.joules()

    def by_phase(self) -> dict[str, float]:
        """By phase, and `idle`. Empty where nothing can be read."""
        if not self.is_measured:
            return {}
        self._read(time.monotonic())
        return {**self._joules} if self.is_measured else {}

    def sent(self, request: Submit, facts: RequestFacts) -> None:
        """No step yet."""

    def delivered(self, outs: Sequence[Answer | Failure], stats: StepStats | None) -> None:
        if stats is None or not self.is_measured:
            return
        self._step_s[stats.phase] += stats.duration_ns / 1e9
        now_s = time.monotonic()
        if now_s - self._read_s >= _READ_EVERY_S:
            self._read(now_s)

    def forgotten(self, request_id: str) -> None:
        """Its steps were counted."""

    def _read(self, now_s: float) -> None:
        total = self._counters.total_joules()
        spent, self._read_joules = total - self._read_joules, total
        whole_s = max(now_s - self._read_s, sum(self._step_s.values()), 1e-9)
        self._read_s = now_s
        for phase in PHASES:
            self._joules[phase] += spent * self._step_s[phase] / whole_s
        self._joules[IDLE] += spent * (1 - sum(self._step_s.values()) / whole_s)
        self._step_s = dict.fromkeys(PHASES, 0.0)

"""The live view: rates and states of one server, kept as the engine delivers."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from phasewise.serving.engine.messages import Answer, EngineLoad, Failure, StepStats
from phasewise.serving.http.answers.client import Observer
from phasewise.topology.energy import EnergyCounters
from phasewise.tuner.plans import PHASES, Phase

_LAST = 64


@dataclass(frozen=True)
class MachineFacts:
    """The facts that do not change while a server runs. `machine_svg`: the machine with its plans; "": no
    picture.

    `schedules`: rows of texts, by the names that the page's table has.
    """

    machine_svg: str = ""
    schedules: tuple[dict[str, str], ...] = ()


class LiveView:
    """Counts since the start, and times of the last answers; `Metrics` keeps them."""

    def __init__(self) -> None:
        self.tokens: dict[Phase, int] = {"prefill": 0, "decode": 0}
        self.n_ended = 0
        self.ttft_ms: deque[float] = deque(maxlen=_LAST)
        self.tpot_ms: deque[float] = deque(maxlen=_LAST)

    def fields(self, load: EngineLoad | None, state: str) -> dict[str, Any]:
        """As the page wants them. Tokens are counted from the start: the page makes rates of them."""
        out: dict[str, Any] = {
            "at_s": time.monotonic(),
            "state": state,
            "prefill_tokens": self.tokens["prefill"],
            "decode_tokens": self.tokens["decode"],
            "requests_ended": self.n_ended,
            "ttft_ms": statistics.median(self.ttft_ms) if self.ttft_ms else None,
            "tpot_ms": statistics.median(self.tpot_ms) if self.tpot_ms else None,
            "running": load.n_running if load else 0,
            "waiting": load.n_waiting if load else 0,
            "kv_slots": load.kv_slots if load else 0,
            "kv_slots_used": load.kv_slots_used if load else 0,
        }
        buckets = load.pool.buckets if load and load.pool else ()
        out["buckets"] = [
            {
                "name": bucket.name,
                "bound_tokens": bucket.bound_tokens,
                "blocks_used": bucket.blocks_used,
                "slots_used": bucket.slots_used,
            }
            for bucket in buckets
        ]
        return out


IDLE = "idle"
_READ_EVERY_S = 0.2


class PhaseEnergy(Observer):
    """Joules since the start, by zone and by phase."""

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

    def delivered(self, outs: Sequence[Answer | Failure], stats: StepStats | None) -> None:
        if stats is None or not self.is_measured:
            return
        self._step_s[stats.phase] += stats.duration_ns / 1e9
        now_s = time.monotonic()
        if now_s - self._read_s >= _READ_EVERY_S:
            self._read(now_s)

    def _read(self, now_s: float) -> None:
        total = self._counters.total_joules()
        spent, self._read_joules = total - self._read_joules, total
        whole_s = max(now_s - self._read_s, sum(self._step_s.values()), 1e-9)
        self._read_s = now_s
        for phase in PHASES:
            self._joules[phase] += spent * self._step_s[phase] / whole_s
        self._joules[IDLE] += spent * (1 - sum(self._step_s.values()) / whole_s)
        self._step_s = dict.fromkeys(PHASES, 0.0)

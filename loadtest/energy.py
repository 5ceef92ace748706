"""Energy of the machine that serves, by phase, as the metrics of phasewise have it."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_PHASE = re.compile(
    r'^phasewise_energy_phase_joules_total\{phase="(prefill|decode|idle)"\} (\S{1,40})$', re.M
)


class Energy(NamedTuple):
    """Joules. `idle`: of no step."""

    prefill: float
    decode: float
    idle: float

    def since(self, before: Energy) -> Energy:
        """The energy that was spent since then."""
        return Energy(*(now - then for now, then in zip(self, before, strict=True)))


def energy_in(metrics: str) -> Energy | None:
    """The energy in a text of Prometheus's form; None where it is not there."""
    joules = dict(_PHASE.findall(metrics))
    try:
        energy = Energy(*(float(joules[phase]) for phase in Energy._fields))
    except (KeyError, ValueError):
        return None
    return energy if all(math.isfinite(joules) for joules in energy) else None

"""Probe this machine's cores for what they share, while no other phasewise process measures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from phasewise.tuner.measurement_lock import MeasurementLock
from phasewise.workflows.report import Report, silent

if TYPE_CHECKING:
    from phasewise.topology import Machine
    from phasewise.tuner.probe import Probe


def probe_machine(machine: Machine, budget_s: float, lock: MeasurementLock, report: Report = silent) -> Probe:
    """Probe for at most `budget_s`; wait for other processes that measure for as long at most."""
    from phasewise.tuner.probe import probe
    from phasewise.tuner.probe.native import NativeInstruments

    with lock.turn(budget_s) as is_alone:
        if not is_alone:
            report("another phasewise still measures on this machine: the numbers will be disturbed")
        return probe(machine, budget_s, NativeInstruments(), report)

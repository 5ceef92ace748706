"""Measurement of what a machine hides: which cores are near each other, and which take each other's
bandwidth.
"""

from phasewise.tuner.errors import ProbeError
from phasewise.tuner.probe.groups import ClusterLevel, GroupHint, LevelEvidence, Source
from phasewise.tuner.probe.measure import Instruments, probe
from phasewise.tuner.probe.result import Interference, Probe, read_groups

__all__ = [
    "ClusterLevel",
    "GroupHint",
    "Instruments",
    "Interference",
    "LevelEvidence",
    "Probe",
    "ProbeError",
    "Source",
    "probe",
    "read_groups",
]

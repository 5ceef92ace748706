"""Checks of a host for what keeps phasewise from the machine's limit, over files, each finding with evidence
and remedy.
"""

from phasewise.tuner.doctor.examine import CHECKS, examine, not_examined
from phasewise.tuner.doctor.finding import Finding, FindingEvidence, Severity
from phasewise.tuner.doctor.host import BuildFacts, Host, IsaUse, TunedCounts

__all__ = [
    "CHECKS",
    "BuildFacts",
    "Finding",
    "FindingEvidence",
    "Host",
    "IsaUse",
    "Severity",
    "TunedCounts",
    "examine",
    "not_examined",
]

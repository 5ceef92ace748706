"""A finding: what is wrong, how it is known, what it means, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Severity(IntEnum):
    """The cost of a finding. The order is the order of the report, worst last."""

    low = 1
    """Some percent, or only other programs."""
    medium = 2
    """A tenth or more, or only at some times."""
    high = 3
    """A multiple, or something that will not run."""


@dataclass(frozen=True)
class FindingEvidence:
    """The source of a finding: a file and its text, a variable, a call and its answer."""

    source: str
    value: str


@dataclass(frozen=True)
class Finding:
    """One thing that keeps the host from its limit. `remedy` is a command, a container flag, or both."""

    id: str
    severity: Severity
    title: str
    evidence: tuple[FindingEvidence, ...]
    meaning: str
    remedy: str

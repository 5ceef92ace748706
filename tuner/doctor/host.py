"""The inputs of checks (files under a root, and the few facts that no file holds), and their findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from phasewise.kerneldb.product_counts import ProductCounts
from phasewise.topology import Machine
from phasewise.topology.cpusets import parse_list
from phasewise.topology.process_limits import cgroup_files, read_text
from phasewise.tuner.conditions import Conditions, parse_ticks


class Severity(IntEnum):
    """The cost of a finding, in the order of the report, worst last."""

    low = 1
    """A loss of a few percent, or for other programs only."""
    medium = 2
    """A loss of a tenth or more, or at some times only."""
    high = 3
    """A loss by a factor, or something that will not run."""


@dataclass(frozen=True)
class FindingEvidence:
    """The source of a finding: a file and its text, a variable, or a call and its answer."""

    source: str
    value: str


@dataclass(frozen=True)
class Finding:
    """One thing that slows the host down: its evidence, meaning and remedy. `remedy`: a command, a container
    flag, or both."""

    id: str
    severity: Severity
    title: str
    evidence: tuple[FindingEvidence, ...]
    meaning: str
    remedy: str


MAX_VALUE_CHARS = 160


NONE_TUNED = ProductCounts()


@dataclass(frozen=True)
class IsaUse:
    """Instruction sets that run on the host, lowest first; the active one; that of PHASEWISE_ISA."""

    usable: tuple[str, ...]
    active: str
    forced: str | None = None


@dataclass(frozen=True)
class TunedCounts:
    """Numbers of rows that the database holds for this kind of machine."""

    name: str
    service_plans: int
    measurements: int
    products: ProductCounts = NONE_TUNED
    shipped: int = 0
    """Schedules that the package ships for cores of this kind."""
    shipped_kinds: tuple[str, ...] = ()
    """All kinds of machine for which the package ships schedules."""


@dataclass(frozen=True)
class Host:
    """A host: this one, or a snapshot of another under `root`. Unknown facts are None or empty."""

    root: Path
    machine: Machine
    environment: Mapping[str, str] = field(default_factory=dict)
    isa: IsaUse | None = None
    tuned: TunedCounts | None = None
    conditions: Conditions | None = None
    """The load measured just now; None: only sums since boot are known."""
    refused_calls: Mapping[str, str] | None = None
    """System calls that failed when tried, with the error; None: not tried."""

    def text(self, path: str) -> str | None:
        """A file's text without its last newline; None if absent or unreadable."""
        return read_text(self.root / path)

    def number(self, path: str) -> int | None:
        """The whole number that a file holds; None for anything else."""
        return whole_number(self.text(path))

    def words(self, path: str) -> dict[str, str]:
        """The values by name in a file of `name value` or `name: value` lines."""
        pairs = (line.replace(":", " ", 1).split(maxsplit=1) for line in (self.text(path) or "").splitlines())
        return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}

    def seen(self, path: str, value: str | None = None) -> FindingEvidence:
        """Evidence from a file: its whole text, or `value` as the part that matters."""
        return FindingEvidence(f"/{path}", _shown(self.text(path) or "" if value is None else value))

    def cgroup(self, controller: str, name_v2: str, name_v1: str) -> Iterator[FindingEvidence]:
        """A cgroup file of the process's group and the groups above, innermost first, in cgroup v2 or v1."""
        for path, text in (
            *cgroup_files(self.root, None, name_v2),
            *cgroup_files(self.root, controller, name_v1),
        ):
            yield FindingEvidence(f"/{path.relative_to(self.root)}", text)

    def allowed(self) -> tuple[int, ...]:
        """The CPUs that the process may use: the machine's, as far as /proc/self/status allows them."""
        listed = self.words("proc/self/status").get("Cpus_allowed_list")
        try:
            mask = parse_list(listed) if listed else -1
        except ValueError:
            mask = -1
        return tuple(cpu for cpu in self.machine.allowed_pus if mask >> cpu & 1)

    def cores(self) -> list[list[int]]:
        """The allowed CPUs of each core that has any."""
        allowed = set(self.allowed())
        cores = [[cpu for cpu in core if cpu in allowed] for core in self.machine.allowed_cores()]
        return [core for core in cores if core]

    def steal_since_boot(self) -> float | None:
        """The share of the allowed CPUs' time that the hypervisor took, since boot; None: not known."""
        try:
            ticks = parse_ticks(self.text("proc/stat") or "", self.allowed())
        except (ValueError, IndexError):
            return None
        return ticks.steal / ticks.total if ticks.total > 0 else None


def whole_number(text: str | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= 20 else None


def _shown(text: str) -> str:
    line = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return line if len(line) <= MAX_VALUE_CHARS else line[: MAX_VALUE_CHARS - 3] + "..."

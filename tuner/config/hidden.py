"""Hidden shared resources: what cores share and no system tool shows, e.g. the LLC tag array of four
neighbouring cores of a Kunpeng 920; given to the modelled evaluator in a file:

    [{"pus": [0, 1, 2, 3], "read_gbps": 20.0, "lost_per_extra_pu": 0.3}, ...]

All reads of those PUs pass through the resource, which serves `read_gbps` (10^9 bytes a second). Once the
active PUs saturate it, each further active one costs the fraction `lost_per_extra_pu` of it.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

from phasewise._files import read_input
from phasewise._json import read_json
from phasewise._words import number
from phasewise.topology import Machine
from phasewise.tuner.errors import EvaluationError
from phasewise.tuner.plans import list_cores

MAX_FILE_BYTES = 4 << 20
MAX_RESOURCES = 4096
MAX_READ_GBPS = 1e6
LEAST_SHARE = 0.05
"""Share of its rate that a resource serves however many PUs crowd it: reads slow down, they do not stop."""

FIELDS = frozenset({"pus", "read_gbps", "lost_per_extra_pu"})


@dataclass(frozen=True, slots=True)
class HiddenResource:
    """A resource that some PUs share although the tree does not show it."""

    pus: tuple[int, ...]
    read_gbps: float
    lost_per_extra_pu: float

    def __post_init__(self) -> None:
        _check_pus(self.pus)
        _check_number("read_gbps", self.read_gbps, MAX_READ_GBPS)
        _check_number("lost_per_extra_pu", self.lost_per_extra_pu, 1.0)
        if self.read_gbps == 0:
            raise EvaluationError("read_gbps must be more than 0")

    def capacity_gbps(self, active: int, asked_gbps: float) -> float:
        """The rate that it serves to `active` PUs that ask for it together."""
        if asked_gbps <= self.read_gbps:
            return self.read_gbps
        saturating = math.ceil(self.read_gbps / (asked_gbps / active))
        lost = self.lost_per_extra_pu * (active - saturating)
        return self.read_gbps * max(LEAST_SHARE, 1.0 - lost)


def read_hidden(path: str | os.PathLike[str], machine: Machine) -> tuple[HiddenResource, ...]:
    """The resources that a file lists. EvaluationError, naming file and entry, for anything else."""
    name = os.fspath(path)
    try:
        content = read_input(path, MAX_FILE_BYTES)
    except OSError as error:
        raise EvaluationError(f"{name}: {error.strerror or error}") from None
    try:
        entries = read_json(content)
    except ValueError:
        raise EvaluationError(f"{name} is not JSON: a list of hidden resources expected") from None
    if not isinstance(entries, list) or len(entries) > MAX_RESOURCES:
        raise EvaluationError(f"{name} must hold a list of at most {MAX_RESOURCES} hidden resources")
    allowed = frozenset(machine.allowed_pus)
    return tuple(_resource(entry, f"{name}, entry {n}", allowed) for n, entry in enumerate(entries, 1))


def _resource(entry: Any, where: str, machine_pus: frozenset[int]) -> HiddenResource:
    if not isinstance(entry, dict) or entry.keys() != FIELDS:
        raise EvaluationError(f"{where}: an object with exactly {', '.join(sorted(FIELDS))} expected")
    if not isinstance(entry["pus"], list):
        raise EvaluationError(f"{where}: pus must be a list of CPU numbers")
    try:
        resource = HiddenResource(tuple(entry["pus"]), entry["read_gbps"], entry["lost_per_extra_pu"])
    except EvaluationError as error:
        raise EvaluationError(f"{where}: {error}") from None
    if foreign := sorted(set(resource.pus) - machine_pus):
        raise EvaluationError(f"{where}: the machine has no PU {list_cores(foreign[:8])}")
    return resource


def _check_pus(pus: tuple[Any, ...]) -> None:
    if not pus:
        raise EvaluationError("pus is empty: name the PUs that share the resource")
    for pu in pus:
        if type(pu) is not int or pu < 0:
            raise EvaluationError(f"a PU must be a number from 0 on, not {pu!r:.40}")
    if len(set(pus)) != len(pus):
        raise EvaluationError("pus names a PU twice")


def _check_number(name: str, value: object, high: float) -> None:
    if type(value) not in (int, float) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise EvaluationError(f"{name} must be a number from 0 to {number(high)}, not {value!r:.40}")

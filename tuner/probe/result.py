"""The result of a probe, as one value; its JSON, and the groups read back from it as hints for a search."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from phasewise._files import read_input
from phasewise._json import read_json
from phasewise.tuner.errors import ProbeError
from phasewise.tuner.probe.groups import ClusterLevel, GroupHint, Matrix, Source

MAX_FILE_BYTES = 64 << 20
MAX_HINTS = 64
MAX_NUMBER = 1 << 16


@dataclass(frozen=True)
class Interference:
    """Reading by pairs. `lost[i, j]`: the share of pus[i]'s rate that is gone while pus[j] reads; NaN: not
    measured.
    """

    pus: tuple[int, ...]
    buffer_bytes: int
    alone_bytes_per_s: tuple[float | None, ...]
    lost: Matrix

    @property
    def pairs_measured(self) -> int:
        return _pairs_known(self.lost)


@dataclass(frozen=True)
class Probe:
    """The result of a probe: one PU of each core in the order of rows and columns, their pairs' figures, and
    the groups to try first."""

    pus: tuple[int, ...]
    latency_ns: Matrix
    siblings_ns: float | None
    """Nanoseconds between two PUs of one core; None without SMT."""
    interference: Mapping[Source, Interference]
    levels: tuple[ClusterLevel, ...]
    groups: tuple[GroupHint, ...]
    """The groups that are worth trying first, the best first."""
    conditions: Mapping[str, float]
    elapsed_s: float
    budget_s: float

    @property
    def pairs(self) -> int:
        return math.comb(len(self.pus), 2)

    @property
    def pairs_measured(self) -> int:
        return _pairs_known(self.latency_ns)

    def fields(self) -> dict[str, Any]:
        """The probe as JSON values; null where nothing was measured."""
        return {
            "pus": list(self.pus),
            "pairs": self.pairs,
            "pairs_measured": self.pairs_measured,
            "latency_ns": _rows(self.latency_ns),
            "siblings_ns": self.siblings_ns,
            "interference": {
                source: {
                    "pus": list(interference.pus),
                    "buffer_bytes": interference.buffer_bytes,
                    "pairs_measured": interference.pairs_measured,
                    "alone_bytes_per_s": [
                        None if rate is None else round(rate) for rate in interference.alone_bytes_per_s
                    ],
                    "lost": _rows(interference.lost),
                }
                for source, interference in self.interference.items()
            },
            "levels": [_level_fields(level) for level in self.levels],
            "groups": [_hint_fields(hint) for hint in self.groups],
            "conditions": dict(self.conditions),
            "elapsed_s": round(self.elapsed_s, 3),
            "budget_s": self.budget_s,
        }


def read_groups(path: Path) -> tuple[GroupHint, ...]:
    """The groups in a file that `topo --probe --json` wrote, best first. ProbeError, in one line, if it is
    none.
    """
    try:
        fields = read_json(read_input(path, MAX_FILE_BYTES))
    except OSError as error:
        raise ProbeError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError:
        raise ProbeError(f"{path} is not JSON: write it by `phasewise topo --probe --json`") from None
    groups = fields.get("groups") if isinstance(fields, dict) else None
    if not isinstance(groups, list):
        raise ProbeError(f"{path} has no list of groups: write it by `phasewise topo --probe --json`")
    return tuple(_hint(group, path) for group in groups[:MAX_HINTS])


def _hint(fields: Any, path: Path) -> GroupHint:
    if not isinstance(fields, dict):
        raise ProbeError(f"{path}: a group must be an object with n, t and d")
    n, t, d = (_whole_number(fields.get(name), path) for name in ("n", "t", "d"))
    return GroupHint(n, t, d)


def _whole_number(value: Any, path: Path) -> int:
    if type(value) is int and 1 <= value <= MAX_NUMBER:
        return value
    raise ProbeError(f"{path}: a group's n, t and d must be numbers from 1 to {MAX_NUMBER}")


def _hint_fields(hint: GroupHint) -> dict[str, Any]:
    return {"group": hint.notation, **asdict(hint)}


def _level_fields(level: ClusterLevel) -> dict[str, Any]:
    return {
        "clusters": [list(cluster) for cluster in level.clusters],
        "evidence": asdict(level.evidence),
        "known_as": level.known_as,
        "group": None if level.hint is None else level.hint.notation,
        "why_not": level.why_not,
    }


def _rows(matrix: Matrix) -> list[list[float | None]]:
    return [[None if math.isnan(value) else round(float(value), 4) for value in row] for row in matrix]


def _pairs_known(matrix: Matrix) -> int:
    """The number of pairs that were measured; both directions of a pair are measured together."""
    n = len(matrix)
    return sum(not math.isnan(matrix[i, j]) for i in range(n) for j in range(i + 1, n))

"""Checks that run inside a machine: functions that return figures or raise, and the way they report."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
Check = Callable[[], Figures]

CHECKS: dict[str, dict[str, Check]] = {}
"""By the name of the machine, in the order in which they run there."""


def check(*machines: str) -> Callable[[Check], Check]:
    """Let a function run inside these machines, under its name."""

    def add(function: Check) -> Check:
        for machine in machines:
            CHECKS.setdefault(machine, {})[function.__name__] = function
        return function

    return add


@dataclass(frozen=True)
class CheckReport:
    """The line of one check. `why` is empty where it holds."""

    name: str
    why: str
    seconds: float
    figures: Figures = field(default_factory=dict)

    def line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, line: str) -> CheckReport:
        return cls(**json.loads(line))


def run_all(machine: str, report: Path) -> None:
    """Every check of a machine, whatever the others say."""
    with report.open("w") as out:
        for name, function in CHECKS[machine].items():
            began_s, why, figures = time.monotonic(), "", Figures()
            try:
                figures = function()
            except BaseException:
                why = traceback.format_exc()
            print(
                CheckReport(name, why, round(time.monotonic() - began_s, 1), figures).line(),
                file=out,
                flush=True,
            )

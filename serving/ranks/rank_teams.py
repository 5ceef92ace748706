"""Thread teams for the phases, and which of a program's tables of schedules each phase runs by."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import get_args

from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.errors import ProgramError, TeamError
from phasewise.serving.errors import RanksError
from phasewise.tuner.plans import Phase

TeamCores = tuple[int, ...]

TABLES: Mapping[Phase, int] = {phase: table for table, phase in enumerate(get_args(Phase))}


def open_teams(cores: Mapping[Phase, TeamCores], pinned: bool = True) -> dict[Phase, Team]:
    """A team for each phase; phases on the same cores share one. RanksError if a core cannot be had.

    Not pinned: as many threads, which the system may move.
    """
    teams: dict[TeamCores, Team] = {}
    try:
        for members in cores.values():
            if members not in teams:
                teams[members] = Team(members) if pinned else Team(None, len(members))
    except TeamError as error:
        for team in teams.values():
            team.close()
        raise RanksError(str(error)) from error
    return {phase: teams[members] for phase, members in cores.items()}


@contextmanager
def keeping_affinity() -> Iterator[None]:
    """A thread that runs a step is pinned; afterwards the calling thread may run where it could before."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def touch_memory(program: Program, teams: Mapping[Phase, Team]) -> None:
    """All that a program runs in is there from now on, near the cores that decode, or those that prefill.

    RanksError where the system has not what it granted.
    """
    team = teams.get("decode") or teams["prefill"]
    try:
        with keeping_affinity():
            program.touch(team)
    except ProgramError as error:
        raise RanksError(str(error)) from error

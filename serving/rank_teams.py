"""Thread teams for the phases, and which of a program's tables of schedules each phase runs by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from phasewise.cython_kernels._native import Team
from phasewise.cython_kernels.errors import TeamError
from phasewise.serving.batch import Phase
from phasewise.serving.errors import RanksError

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

"""Thread teams, and the schedule tables by which they run: prefill's, decode's, and one for each further band
of sequences in decode's plan."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import get_args

from phasewise.cython_kernels._native import Program, Team
from phasewise.cython_kernels.errors import ProgramError, TeamError
from phasewise.cython_kernels.schedules import ScheduleLookup
from phasewise.serving.errors import RanksError
from phasewise.serving.ranks.core_weights import weigh_by_kind
from phasewise.topology import TopologyError, read_core_kinds
from phasewise.tuner.plans import MAX_BANDS, PHASES, Phase, ServicePlan, list_cores

_log = logging.getLogger(__name__)

TeamCores = tuple[int, ...]

TABLES: Mapping[Phase, int] = {phase: table for table, phase in enumerate(get_args(Phase))}


MOST_TABLES = len(TABLES) + MAX_BANDS


def plans_by_table(plans: Mapping[Phase, ServicePlan]) -> dict[int, ServicePlan]:
    """The plan, without bands, of each schedule table."""
    by_table = {TABLES[phase]: plan.each[0] for phase, plan in plans.items()}
    if "decode" in plans:
        by_table |= dict(enumerate(plans["decode"].each[1:], start=len(TABLES)))
    return by_table


def starts_of(plans: Mapping[Phase, ServicePlan]) -> tuple[int, ...]:
    """Number of sequences from which a decode step uses each further schedule table."""
    return plans["decode"].starts if "decode" in plans else ()


def lookups_by_table(schedules: Mapping[Phase, ScheduleLookup] | None) -> list[ScheduleLookup]:
    """Schedule lookup of each table; empty: all use default schedules."""
    if not schedules:
        return []
    return [*(schedules[phase] for phase in PHASES), *schedules["decode"].bands]


def open_teams(cores: Mapping[int, TeamCores], pinned: bool = True) -> dict[int, Team]:
    """A team for each schedule table; tables on the same cores share one. `pinned` False: the system may move
    the threads. RanksError: a core cannot be used."""
    teams: dict[TeamCores, Team] = {}
    try:
        for members in cores.values():
            if members not in teams:
                teams[members] = weighed_team(members) if pinned else Team(None, len(members))
    except (TeamError, TopologyError) as error:
        for team in teams.values():
            team.close()
        raise RanksError(str(error)) from error
    return {table: teams[members] for table, members in cores.items()}


def weighed_team(cores: Sequence[int]) -> Team:
    """A team with a thread on each core, weighed by kinds of cores, for engines and timing of schedules."""
    team = Team(cores)
    if len(cores) > 1 and (kinds := read_core_kinds()):
        _on_a_thread_that_ends(lambda: weigh_by_kind(team, cores, kinds))
    return team


def tell_if_moved(team: Team) -> bool:
    """Warn, and return True, if a thread of the team was seen on another core than its own."""
    if not team.misplaced():
        return False
    tell_moved(team.cpus or (), team.observed_cpus())
    return True


def tell_moved(planned: Sequence[int], seen: Sequence[int]) -> None:
    """Warn that threads run on other cores than planned."""
    _log.warning(
        "threads planned for cores %s were seen on %s: another program or a cpuset moves them",
        list_cores(planned),
        list_cores(seen),
    )


def _on_a_thread_that_ends(call: Callable[[], None]) -> None:
    """Call a function that runs a team, on a temporary thread: a team restores its borrowed thread's affinity
    when it is closed, which on the process's first thread would undo a `taskset` in between."""
    with ThreadPoolExecutor(1) as beside:
        beside.submit(call).result()


@contextmanager
def keeping_affinity() -> Iterator[None]:
    """Restore the calling thread's affinity after the block, within which a step may pin the thread."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def touch_memory(program: Program, teams: Mapping[int, Team]) -> None:
    """Touch all memory of a program from the cores that decode, else those that prefill. RanksError: the
    system lacks memory that it had granted."""
    team = teams.get(TABLES["decode"]) or teams[TABLES["prefill"]]
    try:
        _on_a_thread_that_ends(lambda: program.touch(team))
    except ProgramError as error:
        raise RanksError(str(error)) from error

"""Thread teams, and the table of a program's schedules by which each runs: prefill's, decode's, and behind
these one for each band of sequences of decode's plan.
"""

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
    """The plan, without bands, that each table's steps run by."""
    by_table = {TABLES[phase]: plan.each[0] for phase, plan in plans.items()}
    if "decode" in plans:
        by_table |= dict(enumerate(plans["decode"].each[1:], start=len(TABLES)))
    return by_table


def starts_of(plans: Mapping[Phase, ServicePlan]) -> tuple[int, ...]:
    """The sequences from which decode runs by each table behind the phases'."""
    return plans["decode"].starts if "decode" in plans else ()


def lookups_by_table(schedules: Mapping[Phase, ScheduleLookup] | None) -> list[ScheduleLookup]:
    """The lookup of each table; none where everything runs by default schedules."""
    if not schedules:
        return []
    return [*(schedules[phase] for phase in PHASES), *schedules["decode"].bands]


def open_teams(cores: Mapping[int, TeamCores], pinned: bool = True) -> dict[int, Team]:
    """A team for each table; tables on the same cores share one. RanksError if a core cannot be had. Not
    pinned: as many threads, which the system may move."""
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
    """A team with a thread on each core, weighed where these are of several kinds: the one that engines run
    on, and that schedules are timed on."""
    team = Team(cores)
    if len(cores) > 1 and (kinds := read_core_kinds()):
        _on_a_thread_that_ends(lambda: weigh_by_kind(team, cores, kinds))
    return team


def tell_if_moved(team: Team) -> bool:
    """Warn, and return True, where a thread of the team was seen on another core than its own."""
    if not team.misplaced():
        return False
    tell_moved(team.cpus or (), team.observed_cpus())
    return True


def tell_moved(planned: Sequence[int], seen: Sequence[int]) -> None:
    """Warn that a thread runs on another core than its own."""
    _log.warning(
        "threads planned for cores %s were seen on %s: another program or a cpuset moves them",
        list_cores(planned),
        list_cores(seen),
    )


def _on_a_thread_that_ends(call: Callable[[], None]) -> None:
    """A call that runs an engine's team. The team borrows the thread, and gives it its former affinity back
    when it is closed: of a process's first thread that would undo a `taskset` in between."""
    with ThreadPoolExecutor(1) as beside:
        beside.submit(call).result()


@contextmanager
def keeping_affinity() -> Iterator[None]:
    """A thread that runs a step is pinned; afterwards the calling thread may run where it could before."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def touch_memory(program: Program, teams: Mapping[int, Team]) -> None:
    """Touch all memory of a program, near the cores that decode, or those that prefill. RanksError where the
    system lacks memory that it has granted."""
    team = teams.get(TABLES["decode"]) or teams[TABLES["prefill"]]
    try:
        _on_a_thread_that_ends(lambda: program.touch(team))
    except ProgramError as error:
        raise RanksError(str(error)) from error

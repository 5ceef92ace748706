"""Beyond symmetric trees: unequal numbers of cores by rank, where the machine is unequal.

A tree keeps equal parts of a machine. What it left out (cores whose likes are offline, another kind of core)
may still be of use, and a slow core (one with a busy neighbour) may be removed from its rank alone. So the
best of a walk for each number of ranks is followed by steps to its neighbours, as long as one is better: a
rank without its slowest cores, without those of a kind, without one or half of its others; with one, half or
all of the cores that its nodes have besides; with one rank more; and one rank on cores of a kind alone.

A generator as the walk is: it knows no clock, budget or evaluator. On a machine of equal parts where no core
is slow it asks nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TypeAlias

from phasewise._words import counted
from phasewise.tuner.config.frontier import Candidate
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.walk import CandidateBatch, Decision
from phasewise.tuner.plans import list_cores
from phasewise.tuner.topotree import Configuration

MOST_STEPS = 64
"""Most steps from one configuration to a better one; each asks for a handful of configurations for each
rank."""

Scored: TypeAlias = tuple[Configuration, float]
Refining: TypeAlias = Generator[CandidateBatch, Sequence[float], tuple[Decision, ...]]


def refine(space: ConfigSpace, answers: Mapping[str, Scored]) -> Refining:
    """Ask for neighbours of the best configuration of each number of ranks until none is better.

    answers: what has been answered so far, by the configurations' keys.
    """
    scored, uneven = dict(answers), space.uneven
    for n_ranks in sorted({len(configuration.ranks) for configuration, _ in answers.values()}):
        best = min((each for each in scored.values() if len(each[0].ranks) == n_ranks), key=_cost)
        for _ in range(MOST_STEPS):
            near = {each.key: each for each in uneven.neighbours(best[0])} if uneven else {}
            fresh = [each for key, each in near.items() if key not in scored and space.allows(each)]
            if fresh:
                costs = yield CandidateBatch(tuple(_candidate(space, each, best[0]) for each in fresh), ())
                scored |= {each.key: (each, cost) for each, cost in zip(fresh, costs, strict=True)}
            nearest = min((scored[key] for key in near if key in scored), key=_cost, default=best)
            if nearest[1] >= best[1]:
                break
            best = nearest
    return ()


def _candidate(space: ConfigSpace, configuration: Configuration, rival: Configuration) -> Candidate:
    return Candidate(configuration, space.tree, None, rival, _words(configuration, rival))


def _words(configuration: Configuration, rival: Configuration) -> str:
    """The cores in which a configuration differs from its rival, in words."""
    own, others = _all(configuration), _all(rival)
    lost, gained = sorted(others - own), sorted(own - others)
    parts = [f"without {counted(len(lost), 'core')} {list_cores(lost)}"] if lost else []
    parts += [f"with {counted(len(gained), 'core')} {list_cores(gained)}"] if gained else []
    return ", ".join(parts)


def _all(configuration: Configuration) -> set[int]:
    return {pu for rank in configuration.ranks for pu in rank.cores}


def _cost(scored: Scored) -> float:
    return scored[1]

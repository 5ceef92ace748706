"""Configuration search, as a generator that asks for configurations' costs and is sent answers.

It knows no clock, budget, database or evaluator. Given the same answers it asks the same questions, so
replaying stored answers resumes it, and several processes that share their answers walk in step.

The walk follows strands: one cross-section of a tree through the removals of that tree. A strand begins at
every cross-section of every grouping, where all PUs are active. Three rules keep most of the space from being
asked for:

- *Pruning*, the transformation tree (section 5.2 of the paper): a removal that does not beat the tree that it
  was removed from loses its descendants. A tree is judged on each cross-section, and is lost when it beats
  its parent on none.
- *Hashing*: a cross-section that means a configuration asked before is judged by that answer; the same
  cross-section of an equal tree is followed once.
- *Patience*: configurations with the same number of ranks on the same NUMA nodes are a group. A group whose
  results stop improving is given up, sooner if they are far from the best.

First comes a survey: the cross-sections of the fundamental tree, and of the best of them the first removal at
each depth; then, for each grouping by one latent level, the first removal below that level. A crowded latent
resource shows at once, since its own grouping relieves it fully and others in part. After the survey, the
configuration with the cheapest parent is asked for next; of equals, the removal of one child or of half of
them. Groupings by two and more latent levels follow, generation by generation, and patience begins anew with
each.

Without pruning or patience, the walk asks for a superset of what it asks for with them.

`refine` goes beyond symmetric trees, to unequal numbers of cores by rank, where the machine is unequal. Cores
that a tree left out (asymmetric parts, another kind of core) may be of use, and a slow core may be removed
from its rank alone. So the best configuration of each number of ranks is followed by steps to its neighbours
while one is better: a rank without its slowest cores, without those of a kind, without one or half of its
others; with one, half or all of the further cores of its nodes; with one rank more; one rank on cores of a
kind alone. On a machine of equal parts without slow cores it asks nothing.

`machine_beside` is for decode plans for more sequences beside a plan for fewer: the same ranks on the same
NUMA nodes, other cores. The engine changes teams between two steps at almost no cost; ranks, and the nodes of
their memory, would have to start anew."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from phasewise._words import counted
from phasewise.topology import Kind, Machine
from phasewise.tuner.config.frontier import (
    Candidate,
    Decision,
    Frontier,
    Interest,
    PrunedTree,
    Rules,
    Stopped,
)
from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.plans import ServicePlan, list_cores
from phasewise.tuner.topotree import Configuration

__all__ = ["Candidate", "CandidateBatch", "Decision", "PrunedTree", "Rules", "Stopped", "Walk", "walk"]

SURVEYED_GENERATIONS = 2
"""Generations that belong to the survey: groupings without a latent level, and with one."""


@dataclass(frozen=True)
class CandidateBatch:
    """Configurations to evaluate, in any order. The answer is a cost for each, in this order; inf: cannot
    run."""

    candidates: tuple[Candidate, ...]
    decisions: tuple[Decision, ...]
    """The decisions since the last batch."""


Walk: TypeAlias = Generator[CandidateBatch, Sequence[float], tuple[Decision, ...]]
"""A generator of batches that is sent their costs, and returns the last decisions."""


def walk(space: ConfigSpace, rules: Rules) -> Walk:
    """Search the space until nothing is left that the rules would ask for."""
    frontier = Frontier(space, rules)
    for generation, roots in enumerate(space.generations(rules.seed), start=1):
        frontier.open(roots, is_surveyed=generation <= SURVEYED_GENERATIONS)
        # The costs of the plain tree say which cross-sections of groupings are worth a survey.
        is_survey = generation < SURVEYED_GENERATIONS
        yield from _ask_all(frontier, Interest.SURVEY if is_survey else Interest.HOPEFUL)
    yield from _ask_all(frontier, Interest.HOPELESS)
    return frontier.decided()


def _ask_all(frontier: Frontier, least: Interest) -> Generator[CandidateBatch, Sequence[float], None]:
    while batch := frontier.next_batch(least):
        frontier.take((yield CandidateBatch(tuple(batch), frontier.decided())))


MOST_STEPS = 64
"""The most steps from one configuration to a better one; each step asks for a few configurations per rank."""

Scored: TypeAlias = tuple[Configuration, float]
Refining: TypeAlias = Generator[CandidateBatch, Sequence[float], tuple[Decision, ...]]


def refine(space: ConfigSpace, answers: Mapping[str, Scored]) -> Refining:
    """Ask for neighbours of the best configuration of each number of ranks until none is better. `answers`:
    the scored configurations so far, by key."""
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


BAND_RULES = Rules(patience=None, share=0.3)
"""Rules of the search for a plan's band: no group is given up, since there is only one."""


def machine_beside(machine: Machine, plan: ServicePlan) -> Machine:
    """The machine restricted to the PUs of the nodes that hold the plan's ranks."""
    used = set(plan.cores)
    holders = [set(node.cpus) for node in machine.nodes(Kind.NUMA) if used & set(node.cpus)]
    near = set().union(*holders) if used <= set().union(*holders) else set(machine.allowed_pus)
    return replace(machine, allowed_pus=tuple(pu for pu in machine.allowed_pus if pu in near))

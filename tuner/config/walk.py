"""Configuration search, as a generator that asks what configurations cost and is sent answers.

It knows no clock, budget, database or evaluator. Given the same answers it asks the same questions, so
replaying what was stored resumes it, and several processes that share their answers walk in step.

What is walked are strands: one cross-section of a tree, followed through the removals of that tree. A strand
begins at every cross-section of every grouping, where all PUs are active. Three rules keep most of the space
from being asked for, each a switch:

- *Pruning*, the transformation tree (section 5.2 of the paper): a removal that does not beat what it was
  removed from loses its descendants. A tree has as many costs as cross-sections, so it is judged on each, and
  is lost when it beats its parent on none.
- *Hashing*: a cross-section that means a configuration asked before is judged by that answer; the same
  cross-section of an equal tree is followed once.
- *Patience*: configurations with the same number of ranks on the same NUMA nodes are a group. A group whose
  results stop improving is given up, sooner if they are far from the best.

The order decides what that leaves to be asked. First a survey: the cross-sections of the fundamental tree,
and of the best of them the first removal at each depth; then, for each grouping by one latent level, the
first removal below that level. A latent resource that is crowded shows at once, since its own grouping
relieves it fully and others in part. After the survey, the configuration with the cheapest parent is
asked for next; of equals, the removal of one child or of half of them. Groupings by two latent levels
and more follow, generation by generation, and patience begins anew with each.

With a rule switched off, all is asked for that would be asked for with it, and more.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

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

__all__ = ["Candidate", "CandidateBatch", "Decision", "PrunedTree", "Rules", "Stopped", "Walk", "walk"]

SURVEYED_GENERATIONS = 2
"""Generations that belong to the survey: groupings without a latent level, and with one."""


@dataclass(frozen=True)
class CandidateBatch:
    """Configurations to evaluate, in any order.

    The answer is a cost for each, in this order; inf: it cannot run.
    """

    candidates: tuple[Candidate, ...]
    decisions: tuple[Decision, ...]
    """The decisions since the last batch."""


Walk: TypeAlias = Generator[CandidateBatch, Sequence[float], tuple[Decision, ...]]
"""Generator of batches; it is sent their costs, and returns the last decisions."""


def walk(space: ConfigSpace, rules: Rules) -> Walk:
    """Search the space until nothing is left that the rules would ask for."""
    frontier = Frontier(space, rules)
    for generation, roots in enumerate(space.generations(rules.seed), start=1):
        frontier.open(roots, is_surveyed=generation <= SURVEYED_GENERATIONS)
        # What is known of the plain tree says which cross-sections of groupings are worth a survey.
        is_survey = generation < SURVEYED_GENERATIONS
        yield from _ask_all(frontier, Interest.SURVEY if is_survey else Interest.HOPEFUL)
    yield from _ask_all(frontier, Interest.HOPELESS)
    return frontier.decided()


def _ask_all(frontier: Frontier, least: Interest) -> Generator[CandidateBatch, Sequence[float], None]:
    while batch := frontier.next_batch(least):
        frontier.take((yield CandidateBatch(tuple(batch), frontier.decided())))

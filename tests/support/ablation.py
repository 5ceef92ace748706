"""Savings of a walk's rules, and their cost, on costs that are known for every configuration.

After Tables 2 and 3 of the paper: each rule off in turn, and how many of the best to hand on. Brute force
over the whole space is the oracle.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from phasewise.tuner.config.space import ConfigSpace
from phasewise.tuner.config.walk import Rules, walk
from phasewise.tuner.topotree import Configuration

Cost: TypeAlias = Callable[[Configuration], float]
"""Milliseconds."""

WITHIN = 1.01
"""A plan this close to the best one is as good as found."""

TUNED_SPREAD = 0.05
"""Tuned kernels may move a configuration so far, either way, from its cost with the default schedules."""


@dataclass(frozen=True)
class Walked:
    """One walk to its end, or to `most` evaluations."""

    costs_ms: tuple[float, ...]
    """In the order asked; a configuration that was asked twice is in it twice."""
    scored: Mapping[str, tuple[Configuration, float]]
    """By key."""
    is_complete: bool

    @property
    def evaluations(self) -> int:
        return len(self.costs_ms)

    @property
    def best_ms(self) -> float:
        return min(self.costs_ms, default=math.inf)

    @property
    def best(self) -> Configuration:
        """The first of the best."""
        return min(self.scored.values(), key=lambda scored: scored[1])[0]

    def first_within(self, cost_ms: float) -> int | None:
        """After how many evaluations a plan as cheap as this was known."""
        return next(
            (number for number, reached_ms in enumerate(self.costs_ms, start=1) if reached_ms <= cost_ms),
            None,
        )

    def top(self, k: int) -> list[Configuration]:
        """The k of least cost."""
        ranked = sorted(self.scored.values(), key=lambda scored: scored[1])
        return [configuration for configuration, _ in ranked[:k]]


def walked(space: ConfigSpace, cost: Cost, rules: Rules, most: int | None = None) -> Walked:
    """Walk with a function for an evaluator."""
    costs_ms: list[float] = []
    by_key: dict[str, tuple[Configuration, float]] = {}
    walking = walk(space, rules)
    try:
        ask = next(walking)
        while most is None or len(costs_ms) < most:
            answers = [cost(candidate.configuration) for candidate in ask.candidates]
            costs_ms += answers
            for candidate, answer in zip(ask.candidates, answers, strict=True):
                by_key[candidate.configuration.key] = candidate.configuration, answer
            ask = walking.send(answers)
    except StopIteration:
        return Walked(tuple(costs_ms), by_key, is_complete=True)
    return Walked(tuple(costs_ms), by_key, is_complete=False)


def brute_force(space: ConfigSpace, cost: Cost) -> Walked:
    """Every configuration of the space."""
    configurations = [space.configuration(partition) for partition in space.partitions()]
    costs_ms = tuple(cost(configuration) for configuration in configurations)
    scored = zip(configurations, costs_ms, strict=True)
    return Walked(
        costs_ms,
        {configuration.key: (configuration, cost_ms) for configuration, cost_ms in scored},
        is_complete=True,
    )


def switches(rules: Rules) -> dict[str, Rules]:
    """The rules, and the rules with one of them off; without the limit, which would hide the differences."""
    free = replace(rules, share=None)
    return {
        "all rules": rules,
        "no limit": free,
        "no pruning": replace(free, pruning=False),
        "no patience": replace(free, patience=None),
    }


def tuned(cost: Cost) -> Cost:
    """The cost with tuned kernels, made up: by at most TUNED_SPREAD more or less, always the same."""

    def of(configuration: Configuration) -> float:
        digest = hashlib.blake2b(configuration.key.encode(), digest_size=4).digest()
        return cost(configuration) * (1 + TUNED_SPREAD * (int.from_bytes(digest) / 2**31 - 1))

    return of


def erring(cost: Cost, modelled_over_timed: Sequence[float], draw: str) -> Cost:
    """The time of a configuration whose modelled cost errs as one of these, by the draw and its key."""

    def of(configuration: Configuration) -> float:
        digest = hashlib.blake2b(f"{draw} {configuration.key}".encode(), digest_size=8).digest()
        return cost(configuration) / modelled_over_timed[int.from_bytes(digest) % len(modelled_over_timed)]

    return of


def top_k_losses(result: Walked, final: Cost, ks: Sequence[int]) -> dict[int, float]:
    """By k: how much worse, in the end, the best of the first k is than the best of all tried."""
    best_ms = min(final(configuration) for configuration, _ in result.scored.values())
    return {k: min(final(configuration) for configuration in result.top(k)) / best_ms - 1 for k in ks}

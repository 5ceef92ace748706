"""The search over parameters of users' kernels, held against every point of drawn spaces."""

from __future__ import annotations

import itertools
import math
from functools import partial
from random import Random

import pytest

from phasewise.tuner.search.parameters import FEWEST, SHARE, Point, most_asked, search_parameters
from phasewise.tuner.search.protocol import drive

SPACES = (
    ((1, 2, 4), (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8)),
    ((1, 2, 4, 8), (1, 2, 3, 4, 6, 8), (0, 128, 256, 512, 1024), (1, 2, 4)),
    ((1, 2), (1, 2, 4, 8, 16), (0, 1), (16, 32, 64, 128, 256), (1, 2, 4, 8, 16)),
)
WITHIN = 0.03


def _landscape(values: tuple[tuple[int, ...], ...], dice: Random) -> dict[Point, float]:
    """Nanoseconds of each point: parameters act apart, two of them together a little."""
    own = [{value: math.exp(dice.uniform(0, 0.7)) for value in choices} for choices in values]
    first, second = dice.sample(range(len(values)), 2)
    together = {
        pair: math.exp(dice.uniform(0, 0.08)) for pair in itertools.product(values[first], values[second])
    }
    return {
        point: 1000
        * math.prod(own[axis][value] for axis, value in enumerate(point))
        * together[point[first], point[second]]
        for point in itertools.product(*values)
    }


def _timed(cost: dict[Point, float], asked: set[Point], dice: Random, points: list[Point]) -> list[int]:
    asked.update(points)
    return [round(cost[point] * math.exp(dice.gauss(0, 0.002))) for point in points]


@pytest.mark.parametrize("space", SPACES)
def test_a_search_is_near_the_best_of_all_points_for_a_small_share_of_them(
    space: tuple[tuple[int, ...], ...],
) -> None:
    """Within 3 % of exhaustive in at most 15 % of its evaluations, in nine of ten landscapes with noise."""
    near = 0
    for seed in range(20):
        dice = Random(seed)
        cost = _landscape(space, dice)
        asked: set[Point] = set()

        chosen = drive(search_parameters(space), partial(_timed, cost, asked, dice))

        assert len(asked) <= SHARE * len(cost)
        near += cost[chosen] <= (1 + WITHIN) * min(cost.values())
    assert near >= 18


def test_given_the_same_answers_a_search_asks_the_same() -> None:
    """So that replaying what was stored resumes it."""
    space = SPACES[0]
    cost = _landscape(space, Random(3))
    runs: list[list[list[Point]]] = [[], []]
    for run in runs:

        def timed(points: list[Point], run: list[list[Point]] = run) -> list[int]:
            run.append(list(points))
            return [round(cost[point]) for point in points]

        drive(search_parameters(space), timed)
    assert runs[0] == runs[1]


def test_a_kernel_without_parameters_is_asked_for_once() -> None:
    assert drive(search_parameters(()), lambda points: [1 for _ in points]) == ()
    assert most_asked(()) == 1


def test_a_small_space_is_searched_whole() -> None:
    assert most_asked(((1, 2), (1, 2))) == 4 <= FEWEST

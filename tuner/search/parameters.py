"""A search over a few integers, each from a short list: the parameters of a user's kernel.

Parameters of loops act nearly independently. So the search goes along one parameter after another from the
best choice so far, and again while that gains; then it combines the best values of two parameters, and at
last tries random choices near the best. It asks and is answered, as the other searches (decision 0009): every
batch times the best choice so far again, and the others count by their ratio to it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from random import Random
from typing import TypeAlias

Point: TypeAlias = tuple[int, ...]
"""A choice: one value for each parameter."""
PointSearch: TypeAlias = Generator[list[Point], list[int], Point]
"""A search that asks for points, is sent nanoseconds for each in order, and returns the best point."""

SHARE = 0.15
"""The largest share of all points that is asked for, without repeats of the best point."""
FEWEST = 8
BATCH = 6
GAIN = 0.005
"""A point replaces the best one if it is faster by this share."""


def most_asked(values: Sequence[Sequence[int]]) -> int:
    """The largest number of different points that a search of this space asks for."""
    size = math.prod(map(len, values))
    return min(size, max(FEWEST, int(SHARE * size)))


def search_parameters(values: Sequence[Sequence[int]], seed: int = 0) -> PointSearch:
    """Find a fast point of the space that the lists span; the first values are the default."""
    search = _Descent(values, Random(seed))
    yield from search.run()
    return search.best


class _Descent:
    def __init__(self, values: Sequence[Sequence[int]], dice: Random) -> None:
        self._values = values
        self._dice = dice
        self._left = most_asked(values)
        self.best: Point = tuple(axis_values[0] for axis_values in values)
        self._cost: dict[Point, float] = {}
        """Time of each answered point, relative to the first best point's."""

    def run(self) -> Generator[list[Point], list[int], None]:
        yield from self._ask([self.best])
        while self._left > 0:
            before = self.best
            for axis in self._axes():
                yield from self._ask(self._along(axis))
            if self.best == before:
                yield from self._ask(self._pairs())
            if self.best == before:
                drawn = self._drawn()
                if not drawn:
                    return
                yield from self._ask(drawn)

    def _axes(self) -> list[int]:
        """The parameters with several values, those with few values first, since they cost least."""
        return sorted(
            (axis for axis, axis_values in enumerate(self._values) if len(axis_values) > 1), key=self._length
        )

    def _length(self, axis: int) -> int:
        return len(self._values[axis])

    def _along(self, axis: int) -> list[Point]:
        best = self.best
        return [(*best[:axis], value, *best[axis + 1 :]) for value in self._values[axis]]

    def _pairs(self) -> list[Point]:
        """Points with two parameters changed together, each to its best value other than the present."""
        changed: list[tuple[int, int]] = []
        for axis in self._axes():
            others = [point for point in self._along(axis) if point != self.best and point in self._cost]
            if others:
                changed.append((axis, min(others, key=lambda point: self._cost[point])[axis]))
        points = []
        for (first_axis, value), (second_axis, second) in itertools.combinations(changed, 2):
            point = list(self.best)
            point[first_axis], point[second_axis] = value, second
            points.append(tuple(point))
        return points

    def _drawn(self) -> list[Point]:
        """Random points that differ from the best in two parameters, then in any."""
        axes = self._axes()
        points: list[Point] = []
        for attempt in range(200):
            point = list(self.best)
            for axis in self._dice.sample(axes, min(len(axes), 2 if attempt < 100 else len(axes))):
                point[axis] = self._dice.choice(self._values[axis])
            if tuple(point) not in self._cost and tuple(point) not in points:
                points.append(tuple(point))
            if len(points) == BATCH:
                break
        return points

    def _ask(self, points: Sequence[Point]) -> Generator[list[Point], list[int], None]:
        new = [point for point in dict.fromkeys(points) if point not in self._cost][: self._left]
        self._left -= len(new)
        for start in range(0, len(new), BATCH):
            batch = new[start : start + BATCH]
            leader = self.best
            asked = batch if leader in batch else [leader, *batch]
            answers = dict(zip(asked, (yield asked), strict=True))
            base = self._cost.get(leader, 1.0)
            for point in batch:
                self._cost[point] = base * answers[point] / answers[leader]
            quickest = min(batch, key=lambda point: self._cost[point])
            if self._cost[quickest] < (1 - GAIN) * self._cost[self.best]:
                self.best = quickest

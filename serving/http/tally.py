"""A histogram in the hands of one thread, for what is observed with every token.

prometheus_client's own takes two locks for each value, and walks over the bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class Tally:
    """How many values are above the bound before and no larger than the next, and the sum of all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        names = map(floatToGoString, (*self._bounds, float("inf")))
        family.add_metric(labels, list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class Tallies(Collector):
    """One metric. `tallies`: by the values of its labels, which are those of `label_names`."""

    def __init__(
        self, name: str, meaning: str, label_names: Sequence[str], tallies: Mapping[tuple[str, ...], Tally]
    ) -> None:
        self._described = (name, meaning, label_names)
        self._tallies = tallies

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, meaning, label_names = self._described
        family = HistogramMetricFamily(name, meaning, labels=label_names)
        for labels, tally in self._tallies.items():
            tally.add_to(family, labels)
        yield family

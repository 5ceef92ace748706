"""A histogram that one thread writes, for values observed with every token.

prometheus_client's histogram takes two locks for each value and scans the bounds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LocalHistogram:
    """Counts of values per bucket (above the previous bound, at most the next), and the sum of all values."""

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


class HistogramsByLabels(dict[tuple[str, ...], LocalHistogram]):
    """Histograms by the values of labels; one that is asked for first is made."""

    def __init__(self, bounds: Sequence[float]) -> None:
        super().__init__()
        self._bounds = bounds

    def __missing__(self, labels: tuple[str, ...]) -> LocalHistogram:
        histogram = self[labels] = LocalHistogram(self._bounds)
        return histogram


class LocalHistograms(Collector):
    """One metric of several histograms, which are keyed by the values of the labels `label_names`."""

    def __init__(
        self,
        name: str,
        meaning: str,
        label_names: Sequence[str],
        histograms: Mapping[tuple[str, ...], LocalHistogram],
    ) -> None:
        self._described = (name, meaning, label_names)
        self._tallies = histograms

    def collect(self) -> Iterator[HistogramMetricFamily]:
        name, meaning, label_names = self._described
        family = HistogramMetricFamily(name, meaning, labels=label_names)
        for labels, histogram in self._tallies.items():
            histogram.add_to(family, labels)
        yield family

"""The cost of a decode step of m rows on this machine: recorded times first, then what the steps took."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping

_NEW = 0.125  # weight of a new time beside those before it, and beside what neighbours predict 1 / (n + 1)
_OUTLIER = 2.0  # times longer than expected count as this many times
_FORGOTTEN_AFTER = 512  # steps without one of this number of rows
_ROW_COST = 0.04  # of a step of the fewest rows, for each further row, where nothing is known


class StepCosts:
    """Nanoseconds by number of rows. `recorded`: of steps timed beforehand, of which only ratios count."""

    def __init__(self, recorded: Mapping[int, float] | None = None) -> None:
        self._recorded = sorted((recorded or {}).items())
        self._ns: dict[int, float] = {}
        self._n_seen: dict[int, int] = {}
        self._seen_at: dict[int, int] = {}
        self._rows: list[int] = []
        self._n_steps = 0

    @property
    def is_known(self) -> bool:
        """True if any step has been seen."""
        return bool(self._rows)

    @property
    def most_rows(self) -> int:
        """Rows that may be tried: twice as many as any step has had, or as were timed beforehand."""
        return max(2 * self._rows[-1] if self._rows else 0, *(rows for rows, _ in self._recorded), 0)

    def observe(self, n_rows: int, duration_ns: float) -> None:
        """A step took so long."""
        self._n_steps += 1
        before = self._ns.get(n_rows)
        if before is None:
            expected = self.cost_ns(n_rows) if self._rows else duration_ns
            self._rows.insert(bisect_left(self._rows, n_rows), n_rows)
            self._n_seen[n_rows] = 0
        else:
            expected = before
        self._n_seen[n_rows] += 1
        duration_ns = min(duration_ns, _OUTLIER * expected)
        weight = max(_NEW, 1 / (1 + self._n_seen[n_rows]))
        self._ns[n_rows] = expected + weight * (duration_ns - expected)
        self._seen_at[n_rows] = self._n_steps
        if self._n_steps % _FORGOTTEN_AFTER == 0:
            self._forget_old()

    def cost_ns(self, n_rows: int) -> float:
        """Expected nanoseconds of a step of `n_rows` rows, at least one step having been seen.

        Between numbers of rows that were seen: linear. Beyond them: in proportion to the recorded times, else
        as the last two numbers of rows differ, else by a guess at what a row costs.
        """
        rows, costs_ns = self._rows, self._ns
        seen_ns = costs_ns.get(n_rows)
        if seen_ns is not None:
            return seen_ns
        index = bisect_left(rows, n_rows)
        if index == 0:
            return costs_ns[rows[0]] * self._shape(n_rows) / self._shape(rows[0])
        if index == len(rows) and (len(rows) == 1 or self._recorded):
            return costs_ns[rows[-1]] * self._shape(n_rows) / self._shape(rows[-1])
        index = min(index, len(rows) - 1)
        low, high = rows[index - 1], rows[index]
        if n_rows > high:
            return costs_ns[high] + max(0.0, costs_ns[high] - costs_ns[low]) * (n_rows - high) / (high - low)
        return costs_ns[low] + (costs_ns[high] - costs_ns[low]) * (n_rows - low) / (high - low)

    def _shape(self, n_rows: int) -> float:
        """A cost of which only ratios count."""
        points = self._recorded
        if len(points) < 2:
            return 1 + _ROW_COST * (n_rows - 1)
        index = min(max(1, bisect_left(points, (n_rows,))), len(points) - 1)
        (low, low_ns), (high, high_ns) = points[index - 1], points[index]
        slope = max(0.0, (high_ns - low_ns) / (high - low))
        return max(low_ns + slope * (n_rows - low), low_ns * 0.5)

    def _forget_old(self) -> None:
        for n_rows in list(self._rows):
            if self._seen_at[n_rows] <= self._n_steps - _FORGOTTEN_AFTER and len(self._rows) > 1:
                self._rows.remove(n_rows)
                del self._ns[n_rows], self._n_seen[n_rows], self._seen_at[n_rows]

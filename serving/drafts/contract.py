"""The contract between the engine and a source of drafts: a draft, the share of drafts of a kind that were
right, and the time that a step takes by its rows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from phasewise.serving.batch import Batch
from phasewise.serving.sampling.sampling import FloatVector, Sampler
from phasewise.serving.scheduling.request import DraftRoom

_KEPT_OF_COUNTS = 0.98  # what a count keeps of its weight with each trial of its kind
_PRIOR_TRIALS = 8.0  # of a request: how much the rates of all requests count beside its own
_FIRST_TRIALS = 10.0  # how much the first guess counts


class Agreement:
    """Rates at which drafts were right, by kind: a small integer; kinds beyond the last count as the last. A
    request's rates begin with those of all requests, its `parent`.

    `first_rates`: rates that are guessed before any draft. `fading`: True if the guess loses weight with each
    trial, as trials do, so that drafts that are nearly always right are known as such; else the guess keeps
    its weight, and what seldom repeats is drafted with more care."""

    def __init__(
        self, first_rates: tuple[float, ...], parent: Agreement | None = None, *, fading: bool = False
    ) -> None:
        self._first_rates = first_rates
        self._parent = parent
        self._first_trials = [_FIRST_TRIALS] * len(first_rates)
        self._fading = _KEPT_OF_COUNTS if fading else 1.0
        self._right = [0.0] * len(first_rates)
        self._trials = [0.0] * len(first_rates)

    def of_request(self) -> Agreement:
        """The agreement of a new request, with this one as its parent."""
        return Agreement(self._first_rates, self)

    def rate(self, kind: int) -> float:
        """Share of the drafts of this kind that were right, the recent ones counting more."""
        kind = self._kind(kind)
        if self._parent is None:
            prior, weight = self._first_rates[kind], self._first_trials[kind]
        else:
            prior, weight = self._parent.rate(kind), _PRIOR_TRIALS
        return (self._right[kind] + weight * prior) / (self._trials[kind] + weight)

    def saw(self, kind: int, *, right: bool) -> None:
        """Count one draft of this kind. `right`: True if the drafted token came."""
        kind = self._kind(kind)
        self._right[kind] = _KEPT_OF_COUNTS * self._right[kind] + right
        self._trials[kind] = _KEPT_OF_COUNTS * self._trials[kind] + 1
        self._first_trials[kind] *= self._fading
        if self._parent is not None:
            self._parent.saw(kind, right=right)

    def _kind(self, kind: int) -> int:
        return min(kind, len(self._first_rates) - 1)


_NEW = 0.125  # weight of a new time beside those before it, and beside what neighbours predict 1 / (n + 1)
_OUTLIER = 2.0  # times longer than expected count as this many times
_FORGOTTEN_AFTER = 512  # steps without one of this number of rows
_ROW_COST = 0.04  # of a step of the fewest rows, for each further row, where nothing is known


class StepCosts:
    """Nanoseconds of a step by its number of rows. `recorded`: nanoseconds by rows that were timed
    beforehand, of which only ratios count."""

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
        as the last two numbers of rows differ, else by a guess at what a row costs."""
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
        """Relative cost of a step, of which only ratios count."""
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


MOST_DRAFTED = 15
"""Drafts of one sequence in one step: with the token before them 16 rows."""


class Draft(NamedTuple):
    """Tokens that an answer may go on with."""

    token_ids: tuple[int, ...] = ()
    chances: tuple[FloatVector, ...] = ()
    """For each token, the probabilities [vocab] that it was drawn from, where it was drawn by chance."""


NO_DRAFT = Draft()


Known = TypeVar("Known")


class DraftMemory(Generic[Known]):
    """A Drafter's step costs and request records. `begun`: makes the record of a new request by its id."""

    def __init__(self, costs: StepCosts, begun: Callable[[str], Known]) -> None:
        self._costs = costs
        self._begun = begun
        self._known: dict[str, Known] = {}

    def observe(self, batch: Batch, duration_ns: int) -> None:
        self._costs.observe(batch.n_tokens, duration_ns)

    def ended(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def lost(self) -> None:
        self._known.clear()

    def _of(self, request_id: str) -> Known:
        if request_id not in self._known:
            self._known[request_id] = self._begun(request_id)
        return self._known[request_id]


class Drafter(Protocol):
    """A source of drafts. Each call reads the new tokens of its sequences; one thread makes all calls."""

    def observe(self, batch: Batch, duration_ns: int) -> None:
        """Note the duration of a decode step, the check of its drafts included, drafting left out."""
        ...

    def computed(self, batch: Batch) -> None:
        """Note that a prefill batch was computed, its copies included."""
        ...

    def draft(self, batch: Batch, rooms: Sequence[DraftRoom], samplers: Sequence[Sampler]) -> list[Draft]:
        """Make a draft of at most its room for each slice of a decode batch; NO_DRAFT where none pays."""
        ...

    def ended(self, request_id: str) -> None:
        """Forget a request; an unknown id is ignored."""
        ...

    def lost(self) -> None:
        """Keys and values are lost: forget every request."""
        ...

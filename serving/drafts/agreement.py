"""The share of recent drafts of a kind that were right."""

from __future__ import annotations

_KEPT = 0.98  # what a count keeps of its weight with each trial of its kind
_PRIOR_TRIALS = 8.0  # of a request: how much the rates of all requests count beside its own
_FIRST_TRIALS = 10.0  # how much the first guess counts


class Agreement:
    """Rates by kind (a small integer; those beyond the last are as the last). A request's own begins with
    that of all requests, its `parent`.

    fading: the first guess loses its weight with each trial, as trials do, so that drafts that are nearly
    always right are known as such; else it stays, and what seldom repeats is drafted with more care.
    """

    def __init__(
        self, first_rates: tuple[float, ...], parent: Agreement | None = None, *, fading: bool = False
    ) -> None:
        self._first_rates = first_rates
        self._parent = parent
        self._first_trials = [_FIRST_TRIALS] * len(first_rates)
        self._fading = _KEPT if fading else 1.0
        self._right = [0.0] * len(first_rates)
        self._trials = [0.0] * len(first_rates)

    def of_request(self) -> Agreement:
        """A new request's."""
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
        """One draft of this kind, and whether it was the token that came."""
        kind = self._kind(kind)
        self._right[kind] = _KEPT * self._right[kind] + right
        self._trials[kind] = _KEPT * self._trials[kind] + 1
        self._first_trials[kind] *= self._fading
        if self._parent is not None:
            self._parent.saw(kind, right=right)

    def _kind(self, kind: int) -> int:
        return min(kind, len(self._first_rates) - 1)

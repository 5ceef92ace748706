"""The time that recent answers took beyond their forecasts. Pure: the caller gives seconds."""

from __future__ import annotations

RECENT_BATCHES = 128
"""The number of batches whose errors are kept. If errors are exchangeable, the next error exceeds the largest
of n with a chance of 1 in n + 1."""
FEWEST_BATCHES = 16
RECENT_S = 20.0
"""Seconds after which errors are forgotten if `FEWEST_BATCHES` are newer: a host that was busy for a moment
does not slow down a device whose 128 batches take minutes."""
FIRST_SHARE = 0.1
"""The share of the promised time that counts as the error before any input has been answered."""
MOST_SHARE = 0.5
"""The largest correction, as a share of the promised time: a device with a larger one would get no inputs,
and so could not show that it is quick again."""


class Lateness:
    """The largest recent error of one kind of forecast. `slo_s`: the promised time of an answer, or inf."""

    def __init__(self, slo_s: float) -> None:
        self._first_s, self._most_s = FIRST_SHARE * slo_s, MOST_SHARE * slo_s
        self._errors: dict[int, tuple[float, float]] = {}
        """For each batch its largest error and the time of its first error, the oldest batch first."""
        self.correction_s = self._first_s
        """The seconds to add to a forecast."""

    def seen(self, batch: int, error_s: float, now_s: float) -> None:
        """Record that an answer of this batch took `error_s` longer than forecast (negative: shorter).
        `batch`: the batch's number, which grows along a device."""
        largest_s, since_s = self._errors.get(batch, (error_s, now_s))
        self._errors[batch] = max(error_s, largest_s), since_s
        while self._forgets_oldest(now_s):
            del self._errors[next(iter(self._errors))]
        largest_s = max(error_s for error_s, _ in self._errors.values())
        if len(self._errors) < RECENT_BATCHES:
            largest_s = max(self._first_s, largest_s)
        self.correction_s = min(self._most_s, max(0.0, largest_s))

    def _forgets_oldest(self, now_s: float) -> bool:
        _, since_s = next(iter(self._errors.values()))
        is_old = now_s - since_s > RECENT_S and len(self._errors) > FEWEST_BATCHES
        return is_old or len(self._errors) > RECENT_BATCHES

"""The time that recent answers took beyond their forecasts. Pure: the caller gives seconds."""

from __future__ import annotations

RECENT_BATCHES = 128
"""If errors are exchangeable, the next one exceeds the largest of n with a chance of 1 in n + 1: of
answers that end as late as they may, one in a hundred is late with 99 of them.
"""
FEWEST_BATCHES = 16
RECENT_S = 20.0
"""Errors older than this are forgotten where `FEWEST_BATCHES` are newer: a host that was busy for a moment
does not hold back a device that has little to do, whose 128 batches take minutes.
"""
FIRST_SHARE = 0.1
"""The share of the promised time that counts as the error before anything has been answered."""
MOST_SHARE = 0.5
"""The largest error that is heeded, as a share of the promised time: a device with a larger correction would
have nothing to do, and would never be seen to have become quick again.
"""


class Lateness:
    """The largest recent error of one kind of forecast. `slo_s`: the promise, inf for none."""

    def __init__(self, slo_s: float) -> None:
        self._first_s, self._most_s = FIRST_SHARE * slo_s, MOST_SHARE * slo_s
        self._errors: dict[int, tuple[float, float]] = {}
        """The largest error of each batch and when its first was seen, the oldest batch first."""
        self.correction_s = self._first_s
        """The time to add to a forecast."""

    def seen(self, batch: int, error_s: float, now_s: float) -> None:
        """An answer of this batch took `error_s` longer than forecast; less than 0: shorter.

        batch: its number; those of one device grow.
        """
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

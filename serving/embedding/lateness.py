"""Errors of late: the time that answers took beyond their forecasts. Pure: the caller gives seconds."""

from __future__ import annotations

BATCHES_OF_LATE = 128
"""If errors are exchangeable, the next one exceeds the largest of n with a chance of 1 in n + 1: of
answers that end as late as they may, one in a hundred is late with 99 of them.
"""
FIRST_SHARE = 0.1
"""The share of the promised time that counts as the error before anything has been answered."""
MOST_SHARE = 0.5
"""The largest error that is heeded, as a share of the promised time: a device that is heeded more than that
would have nothing to do, and would never be seen to have become quick again.
"""


class Lateness:
    """The largest error of late of one kind of forecast. `slo_s`: the promise, inf for none."""

    def __init__(self, slo_s: float) -> None:
        self._first_s, self._most_s = FIRST_SHARE * slo_s, MOST_SHARE * slo_s
        self._errors: dict[int, float] = {}
        """The largest error of each batch's answers, the oldest first."""
        self.correction_s = self._first_s
        """The time to add to a forecast."""

    def seen(self, batch: int, error_s: float) -> None:
        """An answer of this batch took so much longer than forecast; less than 0: shorter.

        batch: its number; those of one device grow.
        """
        self._errors[batch] = max(error_s, self._errors.get(batch, error_s))
        if len(self._errors) > BATCHES_OF_LATE:
            del self._errors[next(iter(self._errors))]
        is_full = len(self._errors) == BATCHES_OF_LATE
        largest_s = max(self._errors.values()) if is_full else max(self._first_s, *self._errors.values())
        self.correction_s = min(self._most_s, max(0.0, largest_s))

"""Requests in shadow, those of batches: what they may have of the time beside interactive requests.

Pure: times in, numbers out. The time from one token of an interactive answer to the next, a gap, is its
decode step and the prompts that others have computed before it. A gap that is shorter than `USUAL` of the
mean may be filled with rows and prompts of shadows up to there; a longer one has no room for them. So quiet
moments become a little like usual ones, and busy moments, which make the 90th percentile, stay as they are.

Shadows delay answers, so more answers run at a time, and gaps seem longer than they were without shadows.
The mean is therefore taken over what gaps would be if as many answers ran as without that delay (by Little's
law): else it would grow with what it allows. Decision 0098 has the figures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import NamedTuple

USUAL = 0.6
"""Part of the mean gap up to which shadows fill: a larger one gives batches more, and others longer waits."""
ALONE_NS = 30_000_000
"""Time of a step of shadows' prompts where nobody else computes: whoever comes waits for its end."""
LEAST_CHUNK = 16
"""Prompt tokens of a step beside others: a panel of keys and values."""
_WINDOW_TOKENS = 20_000


class ShadowRoom(NamedTuple):
    """The part of the next step that requests in shadow may have beside others; None: all that is left."""

    rows: int | None = None
    chunk_tokens: int | None = None


UNBOUNDED = ShadowRoom()
NO_ROOM = ShadowRoom(0, 0)


class ShadowPacing:
    """Learns how long gaps between tokens are without requests in shadow, and tells the room that is left for
    these.
    """

    def __init__(self) -> None:
        self._mean_ns = self._mean_real_ns = 0.0
        self._n_tokens = 0.0
        self._own_ns = self._shadow_ns = 0.0  # prompts since the last decode step, by whose they were
        self._saved_ns = 0.0

    def observe_prompts(self, duration_ns: int, *, in_shadow: bool) -> None:
        """Learn that a prefill step took this long."""
        if in_shadow:
            self._shadow_ns += duration_ns
        else:
            self._own_ns += duration_ns

    def observe_decode(
        self, n_own: int, duration_ns: int, costs_ns: Mapping[int, float], token_ns: float
    ) -> None:
        """A decode step with rows of so many interactive answers took this long. Others as `room` has them.

        The room of a gap may be saved up, or owed: no more than for the least chunk of a prompt.
        """
        own_prompts_ns, real_ns = self._own_ns, self._own_ns + self._shadow_ns + duration_ns
        self._own_ns = self._shadow_ns = 0.0
        if not n_own:
            self._saved_ns = 0.0
            return
        own_ns = own_prompts_ns + decode_ns(costs_ns, n_own)
        most_ns = max(own_ns, 1.5 * LEAST_CHUNK * token_ns)
        saved_ns = self._saved_ns + max(own_ns, USUAL * self._mean_ns) - real_ns
        self._saved_ns = max(-most_ns, min(saved_ns, most_ns))
        delayed = min(1.0, self._mean_ns / self._mean_real_ns) if self._mean_real_ns else 1.0
        undelayed_ns = own_prompts_ns + decode_ns(costs_ns, max(1, round(n_own * delayed)))
        self._n_tokens = min(self._n_tokens + n_own, _WINDOW_TOKENS)
        part = n_own / self._n_tokens
        self._mean_ns += part * (undelayed_ns - self._mean_ns)
        self._mean_real_ns += part * (real_ns - self._mean_real_ns)

    def room(self, costs_ns: Mapping[int, float], n_own: int, token_ns: float) -> ShadowRoom:
        """The room beside so many interactive answers. costs_ns: of decode steps, by rows. token_ns: of
        one of a prompt."""
        if not (n_own and costs_ns):
            return NO_ROOM
        own_ns = self._own_ns + decode_ns(costs_ns, n_own)
        left_ns = self._saved_ns + max(own_ns, USUAL * self._mean_ns) - own_ns - self._shadow_ns
        if left_ns <= 0:
            return NO_ROOM
        n_tokens = 0 if self._shadow_ns else int(left_ns / token_ns)
        return ShadowRoom(rows_within(costs_ns, n_own, left_ns), n_tokens if n_tokens >= LEAST_CHUNK else 0)


def decode_ns(costs_ns: Mapping[int, float], n_rows: int) -> float:
    """The time of a decode step, between those of the nearest numbers of rows that were seen; beyond them in
    proportion to the rows."""
    measured = sorted(costs_ns)
    index = bisect_left(measured, n_rows)
    if index == len(measured):
        return costs_ns[measured[-1]] * n_rows / measured[-1]
    above = measured[index]
    if above == n_rows or index == 0:
        return costs_ns[above]
    below = measured[index - 1]
    part = (n_rows - below) / (above - below)
    return costs_ns[below] + part * (costs_ns[above] - costs_ns[below])


def rows_within(costs_ns: Mapping[int, float], n_rows: int, left_ns: float) -> int:
    """The most further rows that make a step longer by no more than `left_ns`. Beyond the most that were seen
    one more is tried."""
    most, alone_ns = max(costs_ns), decode_ns(costs_ns, n_rows)
    further = 0
    while n_rows + further < most and decode_ns(costs_ns, n_rows + further + 1) - alone_ns <= left_ns:
        further += 1
    return further + (n_rows + further >= most)

"""Choice of the number of drafts that one step checks: as many as give the most expected tokens in a
nanosecond. Where computed drafts do not pay, they are tried again from time to time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from phasewise.serving.drafts.contract import MOST_DRAFTED, StepCosts

LEAST_GAIN = 1.02
"""Drafts are checked where they promise at least this multiple of the tokens of a step without them."""


def fixed_lengths(rooms: Sequence[int], length: int, most_rows: int) -> list[int]:
    """Give each sequence `length` drafts, fewer where its room or, after earlier sequences, the step ends."""
    left, lengths = most_rows - len(rooms), []
    for room in rooms:
        lengths.append(max(0, min(length, room, left)))
        left -= lengths[-1]
    return lengths


def choose_lengths(
    chances: Sequence[Sequence[float]], cost_ns: Callable[[int], float], most_rows: int
) -> list[int]:
    """Choose the number of drafts of each sequence that give the most expected tokens in a nanosecond; all
    zeros where the gain over no drafts is below LEAST_GAIN.

    `chances`: for each sequence and draft the probability that the draft and all before it are right, never
    rising: the likeliest drafts go first. `cost_ns`: nanoseconds of a step by its number of rows."""
    n_plain = len(chances)
    lengths = [0] * n_plain
    if n_plain >= most_rows or not any(chances):
        return lengths
    plain_rate = n_plain / cost_ns(n_plain)
    best_rate, best_lengths = LEAST_GAIN * plain_rate, list(lengths)
    tokens = float(n_plain)
    next_ones = [(-own[0], i) for i, own in enumerate(chances) if own]
    heapify(next_ones)
    for n_rows in range(n_plain + 1, most_rows + 1):
        if not next_ones:
            break
        chance, i = heappop(next_ones)
        tokens -= chance
        lengths[i] += 1
        if lengths[i] < len(chances[i]):
            heappush(next_ones, (-chances[i][lengths[i]], i))
        rate = tokens / cost_ns(n_rows)
        if rate > best_rate:
            best_rate, best_lengths = rate, list(lengths)
    return best_lengths


_ROWS_AT_THE_PRICE_OF_ONE = 16  # of a decode step, where many are computed at once
_TRIAL_SHARE = 0.01  # of the time without drafts may go to trying whether they pay again


class Drafting(NamedTuple):
    """A sequence that may be drafted."""

    most: int
    """Drafts that the sequence has room for."""
    rate: Callable[[int], float]
    """The share of right drafts at a place of the draft (0, 1, ..), given that all before were right."""
    n_late: int
    """Tokens that the draft model or head must compute before it can draft."""


class DraftGain:
    """Chooses the length of computed drafts, one for all sequences of a step. `costs`: of the served model's
    steps, of at most `most_rows` rows. `n_tokens`: as `DraftSource.n_tokens`."""

    def __init__(self, costs: StepCosts, most_rows: int, n_tokens: int | None) -> None:
        self._costs = costs
        self._most_rows = most_rows
        self._n_tokens = n_tokens
        self._saved_ns = 0.0  # for the next trial
        self._is_trying = False
        self.draft_costs = StepCosts()
        """Nanoseconds of drafting one token for each sequence, by the number of sequences."""
        self.pays = True
        """False if no drafts paid in the last step."""
        self.expected = 1.0
        """Expected tokens in a nanosecond at the chosen length, as a multiple of those without drafts."""

    def length(self, rows: Sequence[Drafting]) -> int:
        """Drafts of each sequence that give the most tokens in a nanosecond; 0: none pay."""
        if 2 * len(rows) > self._most_rows:
            return 0
        if self._n_tokens is not None:
            return min(self._n_tokens, self._most_rows // len(rows) - 1)
        if not self._costs.is_known:
            return 0
        if not self.draft_costs.is_known:
            return 1
        most_rows = min(self._most_rows, self._costs.most_rows)
        most = min(MOST_DRAFTED, most_rows // len(rows) - 1)
        plain_ns, draft_ns = self._costs.cost_ns(len(rows)), self.draft_costs.cost_ns(len(rows))
        plain_rate = len(rows) / plain_ns
        best_rate, best = LEAST_GAIN * plain_rate, 0
        chances, tokens, n_rows = [1.0] * len(rows), float(len(rows)), len(rows)
        for length in range(1, most + 1):
            for i, row in enumerate(rows):
                if length <= row.most:
                    chances[i] *= row.rate(length - 1)
                    tokens += chances[i]
                    n_rows += 1
            rate = tokens / (self._costs.cost_ns(n_rows) + length * draft_ns)
            if rate > best_rate:
                best_rate, best = rate, length
        self.pays = best > 0
        self.expected = best_rate / plain_rate if best else 1.0
        return best or self._trial(rows, plain_ns, draft_ns)

    def tried(self) -> None:
        """Note that drafts were made: a trial that was due is over."""
        self._is_trying = False

    def _trial(self, rows: Sequence[Drafting], plain_ns: float, draft_ns: float) -> int:
        """1 where enough time was saved to pay for a trial, and until the trial has been made; else 0."""
        if self._is_trying:
            return 1
        self._saved_ns += _TRIAL_SHARE * plain_ns
        n_late = max(0, sum(row.n_late for row in rows))
        price_ns = (
            self._costs.cost_ns(2 * len(rows))
            - plain_ns
            + draft_ns * (1 + n_late / _ROWS_AT_THE_PRICE_OF_ONE)
        )
        if self._saved_ns < price_ns:
            return 0
        self._saved_ns, self._is_trying = 0.0, True
        return 1

"""The number of drafts of each sequence that one step checks: as many as raise the tokens that come in its
time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

LEAST_GAIN = 1.02
"""Drafts are checked where they promise at least this multiple of the tokens of a step without them."""


def fixed_lengths(rooms: Sequence[int], length: int, most_rows: int) -> list[int]:
    """`length` drafts of each sequence, fewer where its room or the rows of the step end; the first first."""
    left, lengths = most_rows - len(rooms), []
    for room in rooms:
        lengths.append(max(0, min(length, room, left)))
        left -= lengths[-1]
    return lengths


def choose_lengths(
    chances: Sequence[Sequence[float]], cost_ns: Callable[[int], float], most_rows: int
) -> list[int]:
    """The number of its drafts that each sequence takes along.

    chances: for each sequence and draft the probability that it and all before it are right, never rising.
    cost_ns: of a step, by its number of rows. The likeliest drafts go first; of all numbers of them the one
    counts that gives the most expected tokens in a nanosecond. All zeros where that is hardly more than
    without.
    """
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

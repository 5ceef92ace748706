"""Two laws of products, for the time t(m) of m rows: no cliff between one number of rows and another.

- More rows never cost less: t(m) is at most t(m') for every m' above m.
- No product is slower than two smaller ones: t(a + b) is at most t(a) + t(b).

Both to within an allowance. They hold of any numbers of rows that were timed, not of all of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

Times: TypeAlias = Mapping[int, float]
"""Time of a product by its number of rows."""

MOST_ROWS = 64
"""Most rows for which the laws are asked: one row more is one more sequence, or one more token of a draft."""

ALLOWANCE = 0.05
"""Excess over a ratio of 1 that is allowed: two timings of one product differ by as much on a quiet
machine."""


class Breach(NamedTuple):
    """The largest ratio of a law's two sides, and the numbers of rows on them."""

    ratio: float
    dearer: int
    others: tuple[int, ...]

    def __str__(self) -> str:
        against = f" against {' + '.join(map(str, self.others))}" if self.others else ""
        return f"{self.ratio:.2f} ({self.dearer}{against})"


def more_rows_cost_less(times: Times) -> Breach:
    """The largest breach of the first law: a product that takes longer than one with more rows."""
    return max(_beside_more(times), default=Breach(0.0, 0, ()))


def slower_than_two(times: Times) -> Breach:
    """The largest breach of the second law: a product that takes longer than two that share out its rows."""
    return max(_beside_two(times), default=Breach(0.0, 0, ()))


LAWS: Sequence[Callable[[Times], Breach]] = (more_rows_cost_less, slower_than_two)


def breaking(times: Times, allowance: float = ALLOWANCE) -> tuple[int, ...]:
    """The numbers of rows whose products are too slow by a law, ascending."""
    both = (*_beside_more(times), *_beside_two(times))
    return tuple(sorted({breach.dearer for breach in both if breach.ratio > 1 + allowance}))


def _beside_more(times: Times) -> Iterator[Breach]:
    return (Breach(times[m] / times[more], m, (more,)) for m in times for more in times if more > m)


def _beside_two(times: Times) -> Iterator[Breach]:
    cuts = ((a, m - a) for m in times for a in times if a <= m - a and m - a in times)
    return (Breach(times[a + b] / (times[a] + times[b]), a + b, (a, b)) for a, b in cuts)

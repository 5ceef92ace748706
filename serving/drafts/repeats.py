"""Prompt lookup: places where the last tokens of a sequence occurred in it before, whose next tokens may
follow again.

Prompt lookup (Saxena 2023) with the longest match that two n-gram tables find.
"""

from __future__ import annotations

from collections.abc import Iterable

_ORDERS = (6, 2)
"""n of the n-grams that are looked up, the longest first."""

MOST_MATCHED = 32
"""A match is counted up to this length."""


class Repeats:
    """Fed with the tokens of one sequence; knows one earlier place that ended like the sequence ends now."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._after: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _ORDERS)
        self._next: int | None = None  # index of the token that followed the match
        self._matched = 0

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def n_matched(self) -> int:
        """Tokens that the match is long, at most MOST_MATCHED; 0: there is none."""
        return self._matched

    @property
    def expected(self) -> int | None:
        """The token that followed the match."""
        return None if self._next is None else self._tokens[self._next]

    def extend(self, token_ids: Iterable[int]) -> None:
        """Tokens that are new, of which only the end is looked up."""
        *first, last = token_ids
        tokens = self._tokens
        for token_id in first:
            tokens.append(token_id)
            self._enter()
        self._next, self._matched = None, 0
        self.push(last)

    def push(self, token_id: int) -> None:
        """One more token. The match goes on if it is the expected one; a longer match takes its place."""
        if self._next is not None and self._tokens[self._next] == token_id:
            self._next += 1
            self._matched = min(self._matched + 1, MOST_MATCHED)
        else:
            self._next, self._matched = None, 0
        self._tokens.append(token_id)
        if self._matched < _ORDERS[0]:
            self._look_up()
        self._enter()

    def following(self, most: int) -> tuple[int, ...]:
        """Up to `most` tokens that followed the match; a match that overlaps the end repeats itself."""
        start, tokens = self._next, self._tokens
        if start is None:
            return ()
        continuation = tokens[start : start + most]
        period = len(continuation)
        while len(continuation) < most:
            continuation.append(continuation[len(continuation) - period])
        return tuple(continuation)

    def _look_up(self) -> None:
        for order, after in zip(_ORDERS, self._after, strict=True):
            place = after.get(tuple(self._tokens[-order:]))
            if place is not None:
                matched = self._common(place)
                if matched > self._matched:
                    self._next, self._matched = place, matched
                return

    def _common(self, place: int) -> int:
        """The number of tokens before `place` that are those at the end."""
        tokens, end = self._tokens, len(self._tokens)
        n = 0
        while n < min(place, MOST_MATCHED) and tokens[place - 1 - n] == tokens[end - 1 - n]:
            n += 1
        return n

    def _enter(self) -> None:
        end = len(self._tokens)
        for order, after in zip(_ORDERS, self._after, strict=True):
            if end >= order:
                after[tuple(self._tokens[end - order :])] = end

"""The time of one step of a machine: piecewise linear curves, as in the paper's performance model
(Splitwise V-B), from a table of one's own or from timed steps.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phasewise.cluster.errors import ClusterError

MAX_POINTS = 4096


class Curve:
    """Straight lines through points, the first and last of them prolonged. x ascends."""

    __slots__ = ("_cache", "xs", "ys")

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(points)
        if not ordered:
            raise ClusterError("a curve of step times needs at least one point")
        if len(ordered) == 1:  # the same everywhere
            ordered.append((ordered[0][0] + 1.0, ordered[0][1]))
        self.xs = tuple(float(x) for x, _ in ordered)
        self.ys = tuple(float(y) for _, y in ordered)
        if any(not math.isfinite(value) for value in (*self.xs, *self.ys)):
            raise ClusterError("a curve of step times has a point that is not finite")
        if len(set(self.xs)) != len(self.xs):
            raise ClusterError("a curve of step times has two points at the same number of tokens")
        self._cache: dict[int, float] = {}

    def at(self, x: int) -> float:
        cached = self._cache.get(x)
        if cached is None:
            xs, ys = self.xs, self.ys
            high = min(max(bisect_left(xs, x), 1), len(xs) - 1)
            low = high - 1
            slope = (ys[high] - ys[low]) / (xs[high] - xs[low])
            cached = self._cache[x] = slope * (x - xs[low]) + ys[low]
        return cached


class PromptPart(NamedTuple):
    """Tokens of one prompt that a step computes, and those that were computed before."""

    n_tokens: int
    n_before: int = 0

    @property
    def n_pairs(self) -> int:
        """Pairs of a token of the part and one before it."""
        return self.n_tokens * self.n_before + self.n_tokens * (self.n_tokens - 1) // 2


@dataclass(frozen=True)
class StepTimes:
    """Seconds a step, of one model on one machine."""

    prefill: Curve
    """Seconds of a step by its prompt tokens: of one prompt, from its first token on."""
    decode: Curve
    """Seconds of a step by tokens of context that all its sequences read together."""
    decode_sequences: Curve | None = None
    """Seconds of a step by its sequences, on top of `decode`."""
    prefill_context_s: float = 0.0
    """Seconds for each pair of a prompt token and a token before the step that it attends to."""
    after_prefill_s: tuple[float, ...] = ()
    """The extra time of the first decode steps after a prefill step, by their number since it."""
    rows_at_once: int | None = None
    """The most prompt tokens that are computed at once: larger steps go in pieces of so many. None: all."""

    def prefill_s(self, n_tokens: int, n_before: int = 0) -> float:
        """Seconds of a prefill step of one prompt."""
        return self.prompts_s([PromptPart(n_tokens, n_before)])

    def prompts_s(self, prompts: Iterable[PromptPart]) -> float:
        """Seconds of a prefill step. Tokens attend to those before them in their own prompts, and to no
        others."""
        return sum(map(self._piece_s, pieces(prompts, self.rows_at_once)))

    def _piece_s(self, prompts: Sequence[PromptPart]) -> float:
        n_tokens = sum(part.n_tokens for part in prompts)
        n_more = sum(part.n_pairs for part in prompts) - PromptPart(n_tokens).n_pairs
        return _positive(self.prefill.at(n_tokens) + self.prefill_context_s * n_more)

    def decode_s(self, n_sequences: int, context_tokens: int, since_prefill: int | None = None) -> float:
        """Seconds of a decode step. since_prefill: decode steps between the last prefill step and it; None:
        many."""
        extra = self.decode_sequences.at(n_sequences) if self.decode_sequences is not None else 0.0
        if since_prefill is not None and since_prefill < len(self.after_prefill_s):
            extra += self.after_prefill_s[since_prefill]
        return _positive(self.decode.at(context_tokens) + extra)


def pieces(prompts: Iterable[PromptPart], most_tokens: int | None) -> Iterator[list[PromptPart]]:
    """The parts of a step as engines compute them: runs of `most_tokens` at most, cut where one is full."""
    if most_tokens is None:
        yield list(prompts)
        return
    piece, room = list[PromptPart](), most_tokens
    for part in prompts:
        n_left, n_before = part
        while n_left:
            n_tokens = min(n_left, room)
            piece.append(PromptPart(n_tokens, n_before))
            n_left, n_before, room = n_left - n_tokens, n_before + n_tokens, room - n_tokens
            if not room:
                yield piece
                piece, room = [], most_tokens
    if piece:
        yield piece


def _positive(seconds: float) -> float:
    """The seconds, or next to nothing in place of a prolonged line's zero or less."""
    return seconds if seconds > 0 else 1e-9

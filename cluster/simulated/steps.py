"""Model of the time of one step of a machine: piecewise linear curves, as in the paper's performance model
(Splitwise V-B), from a table or from timed steps."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple

from phasewise.cluster.errors import ClusterError
from phasewise.serving.batch import STEP_TOKENS

MAX_POINTS = 4096


class Curve:
    """Piecewise linear curve through points with ascending x; the first and last lines are prolonged."""

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
    """The tokens of one prompt that a step computes, and the prompt's tokens that were computed before."""

    n_tokens: int
    n_before: int = 0

    @property
    def n_pairs(self) -> int:
        """Pairs of a token of the part and an earlier token of its prompt."""
        return self.n_tokens * self.n_before + self.n_tokens * (self.n_tokens - 1) // 2


@dataclass(frozen=True)
class StepTimes:
    """Times of the steps of one model on one machine, in seconds."""

    prefill: Curve
    """Seconds of a prefill step by its tokens, of one prompt from its first token on."""
    decode: Curve
    """Seconds of a decode step by the context tokens that all its sequences read together."""
    decode_sequences: Curve | None = None
    """Seconds of a decode step by its sequences, in addition to `decode`."""
    prefill_context_s: float = 0.0
    """Seconds for each pair of a prompt token and a token, computed by earlier steps, that it attends to."""
    after_prefill_s: tuple[float, ...] = ()
    """Extra seconds of the first decode steps after a prefill step, by their number since it."""
    rows_at_once: int | None = None
    """Most prompt tokens computed at once: larger steps go in pieces of this size. None: all at once."""

    def prefill_s(self, n_tokens: int, n_before: int = 0) -> float:
        """Seconds of a prefill step of one prompt."""
        return self.prompts_s([PromptPart(n_tokens, n_before)])

    def prompts_s(self, prompts: Iterable[PromptPart]) -> float:
        """Seconds of a prefill step; tokens attend only to earlier tokens of their own prompts."""
        return sum(map(self._piece_s, pieces(prompts, self.rows_at_once)))

    def _piece_s(self, prompts: Sequence[PromptPart]) -> float:
        n_tokens = sum(part.n_tokens for part in prompts)
        n_more = sum(part.n_pairs for part in prompts) - PromptPart(n_tokens).n_pairs
        return _positive(self.prefill.at(n_tokens) + self.prefill_context_s * n_more)

    def decode_s(self, n_sequences: int, context_tokens: int, since_prefill: int | None = None) -> float:
        """Seconds of a decode step. since_prefill: decode steps since the last prefill step; None: many."""
        extra = self.decode_sequences.at(n_sequences) if self.decode_sequences is not None else 0.0
        if since_prefill is not None and since_prefill < len(self.after_prefill_s):
            extra += self.after_prefill_s[since_prefill]
        return _positive(self.decode.at(context_tokens) + extra)


def pieces(prompts: Iterable[PromptPart], most_tokens: int | None) -> Iterator[list[PromptPart]]:
    """Yield the parts of a step as engines compute them: runs of at most `most_tokens`, cutting prompts."""
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
    """The seconds, but at least a tiny positive time: a prolonged line may give zero or less."""
    return seconds if seconds > 0 else 1e-9


# ---- curves through steps that were timed -----------------------------------------------------------------

SETTLED = 8
"""Decode steps after a prefill step from which on a step takes as long as all later ones."""


class TimedStep(NamedTuple):
    """One timed step: `sequences` of `context` tokens each took `tokens` new ones, in `seconds`."""

    phase: str
    tokens: int
    sequences: int
    context: int
    seconds: float
    since_prefill: int = SETTLED
    """Decode steps between the last prefill step and this one."""


def steps_of(timed: Iterable[TimedStep]) -> StepTimes:
    """Fit curves to timed steps of both phases. ClusterError where a phase has none.

    A prefill step costs by its tokens, and by pairs of a token and an earlier one; a step of more rows than
    an engine computes at once costs as its pieces do. A decode step costs by its sequences, and by the
    context that they read together; the first decode steps after a prefill step cost more, where such steps
    were timed.
    """
    rows = list(timed)
    prefill = [row for row in rows if row.phase == "prefill"]
    decode = [row for row in rows if row.phase == "decode" and row.tokens == 1]
    for phase, readings in (("prefill", prefill), ("decode", decode)):
        if not readings:
            raise ClusterError(f"no {phase} step was timed: time steps of both phases first")
    by_tokens = _prefill_curve(prefill)
    pair_s = _positive_median(
        (row.seconds - by_tokens.at(row.tokens * row.sequences)) / (row.tokens * row.sequences * row.context)
        for row in prefill
        if row.context
    )
    early = [row for row in decode if row.since_prefill < SETTLED]
    settled = [row for row in decode if row.since_prefill >= SETTLED] or decode
    context_s = _context_s(settled)
    by_sequences: dict[int, list[float]] = defaultdict(list)
    for row in settled:
        by_sequences[row.sequences].append(row.seconds - context_s * row.sequences * row.context)
    steps = StepTimes(
        prefill=by_tokens,
        decode=Curve([(0, 0.0), (1, context_s)]),
        decode_sequences=Curve((n, max(0.0, median(values))) for n, values in by_sequences.items()),
        prefill_context_s=pair_s,
        rows_at_once=STEP_TOKENS,
    )
    return replace(steps, after_prefill_s=_after_prefill_s(early, steps))


def _prefill_curve(rows: Sequence[TimedStep]) -> Curve:
    """Fit seconds of a prefill step by its tokens, from steps with no, or else the fewest, earlier tokens."""
    least = min(row.context for row in rows)
    repeats: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.context == least:
            repeats[row.tokens * row.sequences].append(row.seconds)
    points = [(float(tokens), median(values)) for tokens, values in repeats.items()]
    return Curve(points if len(points) > 1 else [(0.0, 0.0), *points])


def _context_s(rows: Sequence[TimedStep]) -> float:
    """Fit seconds for each token of context: the slope of one regression within groups of equally many
    sequences. Pooling lets contexts that lie far apart decide, not the noise of nearly equal ones."""
    products = squares = 0.0
    for sequences in sorted({row.sequences for row in rows}):
        same = [row for row in rows if row.sequences == sequences]
        tokens = fmean(row.context for row in same)
        seconds = fmean(row.seconds for row in same)
        products += sum(sequences * (row.context - tokens) * (row.seconds - seconds) for row in same)
        squares += sum((sequences * (row.context - tokens)) ** 2 for row in same)
    return max(0.0, products / squares) if squares else 0.0


def _after_prefill_s(rows: Sequence[TimedStep], settled: StepTimes) -> tuple[float, ...]:
    """Extra seconds of each of the first decode steps after a prefill step, beyond a settled step's."""
    beyond: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        usual_s = settled.decode_s(row.sequences, row.sequences * row.context)
        beyond[row.since_prefill].append(row.seconds - usual_s)
    return tuple(_positive_median(beyond[since]) for since in range(SETTLED)) if rows else ()


def _positive_median(values: Iterable[float]) -> float:
    """The median, at least zero: times scatter, and no step gets faster by having more to do."""
    numbers = list(values)
    return max(0.0, median(numbers)) if numbers else 0.0

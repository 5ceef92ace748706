"""Step times made of single steps that were timed, e.g. those that a tuning database keeps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median
from typing import NamedTuple

from phasewise.cluster.errors import ClusterError
from phasewise.cluster.simulated.steps import Curve, StepTimes
from phasewise.serving.batch import STEP_TOKENS

SETTLED = 8
"""Decode steps after a prefill step from which on a step takes what all later ones take."""


class TimedStep(NamedTuple):
    """`sequences` of `context` tokens each took `tokens` new ones, in `seconds`."""

    phase: str
    tokens: int
    sequences: int
    context: int
    seconds: float
    since_prefill: int = SETTLED
    """Decode steps between the last prefill step and this one."""


def steps_of(timed: Iterable[TimedStep]) -> StepTimes:
    """Curves through timed steps of both phases. ClusterError where a phase has none.

    A prefill step costs by its tokens, and by pairs of a token and one before it; one of more rows than an
    engine computes at once as its pieces do. A decode step costs by
    its sequences, and by the context that they read together; the first ones after a prefill step cost more,
    where such were timed.
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
    """Seconds of a prefill step by its tokens, from steps with nothing before them; else from those with the
    least before them."""
    least = min(row.context for row in rows)
    repeats: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        if row.context == least:
            repeats[row.tokens * row.sequences].append(row.seconds)
    points = [(float(tokens), median(values)) for tokens, values in repeats.items()]
    return Curve(points if len(points) > 1 else [(0.0, 0.0), *points])


def _context_s(rows: Sequence[TimedStep]) -> float:
    """Seconds for each token of context: the slope of one regression within groups of equally many sequences.
    Pooled, so that contexts that lie far apart decide, not the noise of those that are nearly equal."""
    products = squares = 0.0
    for sequences in sorted({row.sequences for row in rows}):
        same = [row for row in rows if row.sequences == sequences]
        tokens = fmean(row.context for row in same)
        seconds = fmean(row.seconds for row in same)
        products += sum(sequences * (row.context - tokens) * (row.seconds - seconds) for row in same)
        squares += sum((sequences * (row.context - tokens)) ** 2 for row in same)
    return max(0.0, products / squares) if squares else 0.0


def _after_prefill_s(rows: Sequence[TimedStep], settled: StepTimes) -> tuple[float, ...]:
    """Extra seconds of each of the first decode steps after a prefill step, beyond what a settled one
    takes."""
    beyond: dict[int, list[float]] = defaultdict(list)
    for row in rows:
        usual_s = settled.decode_s(row.sequences, row.sequences * row.context)
        beyond[row.since_prefill].append(row.seconds - usual_s)
    return tuple(_positive_median(beyond[since]) for since in range(SETTLED)) if rows else ()


def _positive_median(values: Iterable[float]) -> float:
    """The median, at least zero: times scatter, and nothing gets faster by having more to do."""
    numbers = list(values)
    return max(0.0, median(numbers)) if numbers else 0.0

"""The cost of a trace of requests on a configuration, from the times of a few steps.

Requests are served one after another, as in the Sandwich paper (section 8.1): a prompt in chunks of at most
CHUNK_TOKENS, then a decode step for each further token; nothing queues. With a `concurrency` of c, every
decode step takes c sequences that are as long as the request. The two phases never run at once, so a
request's latency is the sum of its phases' times, and each phase can be searched by itself.

Only the steps of a grid over the trace's lengths are timed (neighbours a factor of GRID_FACTOR apart); a
slice of the trace asks for the points around its own lengths only. Between points time is linear, and it
never falls as lengths grow: measured times scatter, but a longer step does not end sooner."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from phasewise.tuner.config.lengths import RequestLengths, Trace
from phasewise.tuner.config.slo import LatencyBounds, parse_bounds
from phasewise.tuner.config.steps import MAX_SEQUENCES, Step, StepTimer
from phasewise.tuner.errors import TraceError
from phasewise.tuner.plans import Phase

CHUNK_TOKENS = 512
"""The most prompt tokens of one step: the engine's ranks compute no more rows at once."""

GRID_FACTOR = {"prefill": 4.0, "decode": 8.0}
"""Ratio of neighbouring lengths of the grid, by phase: time is linear in a decode step's context, but bends
in a prefill step's length."""

EXACT_LENGTHS = 3
"""A trace with at most this many lengths is timed at exactly these lengths."""

NO_GOOD_REQUEST = 0.5
"""The penalty that still ranks configurations by speed where no request meets the SLO."""

ObjectiveKind = Literal["ttft", "tpot", "e2e", "goodput"]
OBJECTIVES: tuple[ObjectiveKind, ...] = get_args(ObjectiveKind)

Times = npt.NDArray[np.float64]


def parse_slo(text: str) -> LatencyBounds:
    """TTFT and TPOT bounds of an SLO (`slo.parse_bounds`); TraceError for other metrics and percentiles."""
    bounds = parse_bounds(text)
    if any(bound.metric == "e2e" or bound.percentile is not None for bound in bounds):
        raise TraceError(f"an SLO is written like ttft=200ms,tpot=50ms here, not {text!r:.60}")
    return LatencyBounds.of(bounds)


@dataclass(frozen=True, slots=True)
class Objective:
    """The quantity to minimise. A phase has one time of its own: TTFT in prefill, TPOT in decode. ttft, tpot:
    the mean of the phase's own time over requests, even if the other phase's is named. e2e: the phase's part
    of a request's latency. goodput: milliseconds of the phase per request that keeps its bound of the SLO."""

    kind: ObjectiveKind = "e2e"
    slo: LatencyBounds | None = None
    concurrency: int = 1

    def __post_init__(self) -> None:
        if self.kind not in OBJECTIVES:
            raise TraceError(f"an objective is one of {', '.join(OBJECTIVES)}, not {self.kind!r:.40}")
        if self.kind == "goodput" and self.slo is None:
            raise TraceError("goodput counts requests that keep an SLO: name it, e.g. --slo ttft=200,tpot=50")
        if type(self.concurrency) is not int or not 1 <= self.concurrency <= MAX_SEQUENCES:
            raise TraceError(
                f"a concurrency is a number from 1 to {MAX_SEQUENCES}, not {self.concurrency!r:.40}"
            )


class Remembered:
    """A step timer that asks another timer for each step once, for one open configuration."""

    def __init__(self, timer: StepTimer) -> None:
        self._timer = timer
        self._known_ns: dict[Step, float] = {}

    def __call__(self, step: Step) -> float:
        if step not in self._known_ns:
            self._known_ns[step] = self._timer(step)
        return self._known_ns[step]


@dataclass(frozen=True, slots=True)
class StepGrid:
    """The steps of one phase whose times stand for all steps of a trace."""

    phase: Phase
    lengths: tuple[int, ...]
    """The grid's lengths, ascending. Prefill: new tokens without context; decode: the context of a step."""
    sequences: int = 1
    far_context: int = 0
    """The context of the longest prompt's last chunk in prefill; 0 where one chunk is enough."""

    @classmethod
    def of(cls, trace: Trace, objective: Objective, phase: Phase) -> StepGrid:
        """The grid of a trace, which serves any part of the trace as well."""
        if phase == "decode":
            ends = {end for request in trace for end in (_contexts(request)[0], _contexts(request)[-1])}
            return cls(phase, _points(ends, GRID_FACTOR[phase]), objective.concurrency)
        chunks = {chunk for request in trace for chunk in _chunks(request)}
        pieces = {tokens for tokens, _ in chunks}
        far_context = max(context for _, context in chunks)
        if far_context:
            pieces.add(CHUNK_TOKENS)
        return cls(phase, _points(pieces, GRID_FACTOR[phase]), far_context=far_context)

    @property
    def steps(self) -> tuple[Step, ...]:
        """All steps that may have to be timed, the cheapest first."""
        far = (self._far_step,) if self.far_context else ()
        return (*(self._step(length) for length in self.lengths), *far)

    def times_ns(self, lengths: Sequence[int] | npt.NDArray[np.int64], timer: StepTimer) -> Times:
        """Nanoseconds of steps of these lengths, from timings of the grid points around them."""
        first = max(0, bisect_right(self.lengths, min(lengths)) - 1)
        last = min(len(self.lengths) - 1, bisect_left(self.lengths, max(lengths)))
        points = self.lengths[min(first, last) : last + 1]
        timed = np.maximum.accumulate([timer(self._step(point)) for point in points])
        return np.interp(np.asarray(lengths, dtype=np.int64), points, timed)

    def context_ns(self, timer: StepTimer) -> float:
        """Nanoseconds that each token of context adds to a full chunk of a prompt."""
        if not self.far_context:
            return 0.0
        nothing_before = timer(self._step(CHUNK_TOKENS))
        return max(0.0, timer(self._far_step) - nothing_before) / self.far_context

    def _step(self, length: int) -> Step:
        if self.phase == "prefill":
            return Step("prefill", length)
        return Step("decode", 1, self.sequences, length)

    @property
    def _far_step(self) -> Step:
        return Step("prefill", CHUNK_TOKENS, context=self.far_context)


def cost_ms(
    objective: Objective, phase: Phase, requests: Sequence[RequestLengths], timer: StepTimer, grid: StepGrid
) -> float:
    """The objective of some requests of the grid's trace; lower is better. The timer is asked for steps of
    `grid.steps` only, maybe repeatedly."""
    assert grid.phase == phase, f"a grid of {grid.phase} for {phase}"
    ask = Remembered(timer)
    if phase == "prefill":
        total_ms = np.array(_prefill_ms(requests, ask, grid))
        of_token_ms = total_ms
    else:
        total_ms = np.array(
            [float(grid.times_ns(_contexts(request), ask).sum()) / 1e6 for request in requests]
        )
        of_token_ms = total_ms / np.array([len(_contexts(request)) for request in requests])
    match objective.kind:
        case "goodput":
            bounds_ms = (objective.slo or LatencyBounds()).named()
            bound_ms = bounds_ms.get("ttft" if phase == "prefill" else "tpot", math.inf)
            good = float(np.count_nonzero(of_token_ms <= bound_ms))
            return float(total_ms.sum()) / grid.sequences / max(good, NO_GOOD_REQUEST)
        case "e2e":
            return float(total_ms.mean())
        case _:
            return float(of_token_ms.mean())


def _prefill_ms(requests: Iterable[RequestLengths], timer: StepTimer, grid: StepGrid) -> list[float]:
    return [_prompt_ns(_chunks(request), timer, grid) / 1e6 for request in requests]


def _prompt_ns(chunks: Sequence[tuple[int, int]], timer: StepTimer, grid: StepGrid) -> float:
    """Nanoseconds of a prompt's chunks; attention to earlier tokens is linear in tokens and context."""
    alone = sum(float(grid.times_ns([tokens], timer)[0]) for tokens, _ in chunks)
    before = sum(tokens / CHUNK_TOKENS * context for tokens, context in chunks)
    return alone + (before * grid.context_ns(timer) if before else 0.0)


def _chunks(request: RequestLengths) -> list[tuple[int, int]]:
    """The steps of a prompt: (new tokens, tokens before them)."""
    starts = range(0, request.prompt_tokens, CHUNK_TOKENS)
    return [(min(CHUNK_TOKENS, request.prompt_tokens - start), start) for start in starts]


def _contexts(request: RequestLengths) -> range:
    """The context of each decode step. The prompt's step brings the answer's first token; an answer of one
    token counts as two, so that every request has a time per token."""
    steps = max(1, request.output_tokens - 1)
    return range(request.prompt_tokens, request.prompt_tokens + steps)


def _points(lengths: set[int], factor: float) -> tuple[int, ...]:
    """Grid points that cover the lengths: the lengths if few, else as few points as the factor allows."""
    if len(lengths) <= EXACT_LENGTHS:
        return tuple(sorted(lengths))
    low, high = min(lengths), max(lengths)
    gaps = max(1, math.ceil(math.log(high / low) / math.log(factor)))
    points = {round(low * (high / low) ** (gap / gaps)) for gap in range(gaps + 1)}
    return tuple(sorted(points))

"""Traces of requests, read from a file (`trace_files`) or drawn from a distribution (`lengths`), sampled with
a seed, and cut into slices."""

from __future__ import annotations

import os
import random
import re
import statistics
from dataclasses import replace
from itertools import pairwise

from phasewise._words import counted
from phasewise.tuner.config.lengths import RequestLengths, Trace, parse_distribution
from phasewise.tuner.config.trace_files import read_trace
from phasewise.tuner.errors import TraceError

__all__ = [
    "RequestLengths",
    "Trace",
    "default_trace",
    "describe",
    "fitted",
    "load_trace",
    "parse_distribution",
    "read_trace",
    "sampled",
    "slices",
]

SAMPLE = 90
"""Requests of a sample without a stated size: as many as in the Sandwich paper (section 8.1)."""

DEFAULT_TRACE = "lognormal:220,1.1/160,0.8"
"""The default load: chat with short questions with a long tail, and answers of some paragraphs. A stated
choice, not a measurement."""


def load_trace(text: str, count: int = SAMPLE, seed: int = 0) -> Trace:
    """`count` requests from `text`, a distribution or a file's name, determined by the seed."""
    if re.match(r"[a-z]+:", text) and not os.path.exists(text):
        return parse_distribution(text, count, seed)
    return sampled(read_trace(text), count, seed)


def default_trace(count: int = SAMPLE, seed: int = 0) -> Trace:
    """`count` requests of DEFAULT_TRACE."""
    return parse_distribution(DEFAULT_TRACE, count, seed)


def sampled(trace: Trace, count: int, seed: int) -> Trace:
    """`count` requests, or all if there are fewer, in the trace's order, determined by the seed."""
    if count < 1:
        raise TraceError(f"a sample has at least 1 request, not {count}")
    if count >= len(trace):
        return trace
    chosen = sorted(random.Random(seed).sample(range(len(trace)), count))
    return tuple(trace[index] for index in chosen)


def slices(trace: Trace, count: int) -> tuple[Trace, ...]:
    """At most `count` parts of nearly equal size, short requests first, so that a search rejects hopeless
    configurations by short steps."""
    count = max(1, min(count, len(trace)))
    ordered = sorted(trace, key=lambda request: (request.tokens, request.prompt_tokens))
    ends = [len(ordered) * part // count for part in range(count + 1)]
    return tuple(tuple(ordered[start:end]) for start, end in pairwise(ends))


def fitted(trace: Trace, context_tokens: int) -> Trace:
    """Requests cut to a model's context: the prompt first, with at least one token of the answer left."""
    if context_tokens < 2:
        raise TraceError(f"a context of {counted(context_tokens, 'token')} holds no request")
    prompts = [
        replace(request, prompt_tokens=min(request.prompt_tokens, context_tokens - 1)) for request in trace
    ]
    return tuple(
        replace(request, output_tokens=min(request.output_tokens, context_tokens - request.prompt_tokens))
        for request in prompts
    )


def describe(trace: Trace) -> str:
    """The trace for people, e.g. `90 requests, prompt p50 220 max 2100, output p50 160 max 900 tokens`."""
    parts = (
        f"{name} p50 {statistics.median_low(lengths)} max {max(lengths)}"
        for name, lengths in (
            ("prompt", [request.prompt_tokens for request in trace]),
            ("output", [request.output_tokens for request in trace]),
        )
    )
    return f"{counted(len(trace), 'request')}, {', '.join(parts)} tokens"

"""Lengths of requests: those of one request, and distributions of lengths.

A distribution is written KIND:PROMPT/OUTPUT, in tokens: `fixed:512/64`, `uniform:1-1024/16-256` (bounds
inclusive), `lognormal:500,0.9/120,0.7` (median, and sigma of the logarithm)."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from phasewise._words import number
from phasewise.tuner.errors import TraceError

MAX_TOKENS = 1 << 22
BLOCK_TOKENS = 512
"""Tokens of a block of Mooncake's traces."""
MAX_REQUESTS = 1_000_000


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """The lengths of one request. `arrival_s`: seconds from the trace's first request; None: not stated.
    `blocks`: ids of the prompt's first blocks of `block_tokens` tokens; equal ids are equal tokens."""

    prompt_tokens: int
    output_tokens: int
    arrival_s: float | None = None
    blocks: tuple[int, ...] = ()
    block_tokens: int = BLOCK_TOKENS

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "output_tokens"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= MAX_TOKENS:
                raise TraceError(f"{name} must be a number from 1 to {MAX_TOKENS}, not {value!r:.40}")
        if self.arrival_s is not None and not 0 <= self.arrival_s < math.inf:
            raise TraceError(f"arrival_s must be a number from 0 on, not {self.arrival_s!r:.40}")

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


Trace: TypeAlias = tuple[RequestLengths, ...]

Draw: TypeAlias = Callable[[random.Random], float]


def parse_distribution(text: str, count: int, seed: int) -> Trace:
    """`count` requests of the distribution `KIND:PROMPT/OUTPUT` (see the module), determined by the seed."""
    kind, _, sides = text.partition(":")
    prompt, separator, output = sides.partition("/")
    if kind not in _DRAWS or not separator:
        raise TraceError(
            f"{text!r:.60} is no distribution: write one like fixed:512/64, uniform:1-1024/16-256 or "
            "lognormal:500,0.9/120,0.7"
        )
    if not 1 <= count <= MAX_REQUESTS:
        raise TraceError(f"a trace has 1 to {MAX_REQUESTS} requests, not {count}")
    draw_prompt, draw_output = _DRAWS[kind](prompt), _DRAWS[kind](output)
    rng = random.Random(seed)
    return tuple(
        RequestLengths(whole_tokens(draw_prompt(rng)), whole_tokens(draw_output(rng))) for _ in range(count)
    )


def whole_tokens(length: float) -> int:
    """A length rounded to whole tokens, from 1 to the most that a request may have."""
    return max(1, min(MAX_TOKENS, round(length)))


def _fixed(text: str) -> Draw:
    length = _number(text, 1, MAX_TOKENS)
    return lambda _: length


def _uniform(text: str) -> Draw:
    low, high = _pair(text, "-")
    if low > high:
        raise TraceError(f"{text!r:.40} is an empty range: write the smaller number first")
    return lambda rng: rng.uniform(low, high)


def _lognormal(text: str) -> Draw:
    median_text, _, sigma_text = text.partition(",")
    median, sigma = _number(median_text, 1, MAX_TOKENS), _number(sigma_text, 0, 10)
    return lambda rng: median * math.exp(rng.gauss(0.0, sigma))


def _pair(text: str, separator: str) -> tuple[float, float]:
    low, _, high = text.partition(separator)
    return _number(low, 1, MAX_TOKENS), _number(high, 1, MAX_TOKENS)


def _number(text: str, low: float, high: float) -> float:
    value = float(text) if re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) else math.nan
    if not low <= value <= high:
        raise TraceError(
            f"a number from {number(low)} to {number(high)} is expected in a distribution, not {text!r:.40}"
        )
    return value


_DRAWS: Mapping[str, Callable[[str], Draw]] = {"fixed": _fixed, "uniform": _uniform, "lognormal": _lognormal}

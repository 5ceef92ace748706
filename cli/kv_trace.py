"""What `bench kv` replays: requests by their lengths, from files of several kinds, and estimates of answers.

Beside the traces that `tuner.config.trace` reads: CSV with a column of answer lengths (no prompts: each gets
a stated length), and the server's length log (JSON lines with prompt_token_ids and output_tokens).
"""

from __future__ import annotations

import csv
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import Estimate
from phasewise.tuner.config.lengths import Request, Trace
from phasewise.tuner.config.trace import load_trace
from phasewise.tuner.errors import TraceError

Estimates: TypeAlias = tuple[Estimate | None, ...]
"""One for each request of a trace."""


@dataclass(frozen=True)
class Asked:
    """What of a trace is replayed."""

    column: str | None = None
    """Of a CSV file without prompts: whose numbers are lengths of answers."""
    prompt_tokens: int = 48
    """Of each request of such a file."""
    count: int = 2000
    part: str = "all"
    """`first` or `second` half of the requests, drawn with the seed; `all`."""
    seed: int = 0


def read_lengths(text: str, asked: Asked) -> Trace:
    """`text` names a file or writes a distribution: at most `asked.count` requests of it, in their order."""
    wanted = asked.count if asked.part == "all" else 2 * asked.count
    if text.endswith(".csv") and asked.column is not None:
        trace = _column(text, asked)
    elif text.endswith(".jsonl") and _is_length_log(text):
        trace = tuple(_logged(text))
    else:
        return _part(load_trace(text, wanted, asked.seed), asked)
    rng = random.Random(asked.seed)
    chosen = sorted(rng.sample(range(len(trace)), min(wanted, len(trace))))
    return _part(tuple(trace[at] for at in chosen), asked)


def estimator(text: str, seed: int) -> Callable[[Trace], Estimates]:
    """`none`, `exact`, `constant` (the trace's mean), `error:SIGMA` (of the logarithm, with this seed)."""
    if text in _ESTIMATORS:
        return _ESTIMATORS[text]
    kind, _, sigma_text = text.partition(":")
    try:
        sigma = float(sigma_text)
    except ValueError:
        sigma = math.nan
    if kind != "error" or not 0 <= sigma <= 5:
        raise TraceError(f"{text!r:.40} is no estimate: one of {', '.join(_ESTIMATORS)} or error:SIGMA")
    return lambda trace: _erring(trace, sigma, random.Random(seed))


def limited(trace: Trace, max_tokens: int) -> Trace:
    """Answers cut at `max_tokens`, as a server would."""
    return tuple(replace(one, output_tokens=min(one.output_tokens, max_tokens)) for one in trace)


def static_shares(trace: Trace, max_tokens: int) -> Mapping[str, float]:
    """What static pre-allocation makes of its slots when answers end at `max_tokens`: `final`, of blocks that
    ended, and `live`, over time."""
    requests = limited(trace, max_tokens)
    longest = aligned(max(one.prompt_tokens for one in requests) + max_tokens)
    steps = sum(one.output_tokens for one in requests)
    live = sum(one.output_tokens * (one.prompt_tokens + (one.output_tokens - 1) / 2) for one in requests)
    return {
        "final": statistics.fmean(one.tokens for one in requests) / longest,
        "live": live / (steps * longest),
    }


def limit_for(trace: Trace, text: str) -> int:
    """`final:0.55` or `live:0.55`: the highest max_tokens at which static reaches that share."""
    kind, _, share_text = text.partition(":")
    try:
        share = float(share_text)
    except ValueError:
        share = math.nan
    if kind not in ("final", "live") or not 0 < share < 1:
        raise TraceError(f"{text!r:.40} is no share: write final:0.55 or live:0.55")
    top = max(one.output_tokens for one in trace)
    for max_tokens in range(top, 0, -1):
        if static_shares(trace, max_tokens)[kind] >= share:
            return max_tokens
    raise TraceError(f"no max_tokens lets static pre-allocation reach {text} on this trace")


def _part(trace: Trace, asked: Asked) -> Trace:
    """Halves are drawn, not cut: both are of the same kind, and in the order of the trace."""
    if asked.part == "all":
        return trace[: asked.count]
    order = list(range(len(trace)))
    random.Random(asked.seed).shuffle(order)
    middle = len(order) // 2
    chosen = sorted(order[:middle] if asked.part == "first" else order[middle:])
    return tuple(trace[at] for at in chosen)


def _column(path: str, asked: Asked) -> Trace:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if asked.column not in (rows.fieldnames or ()):
                raise TraceError(f"{path} has no column {asked.column!r}: it has {rows.fieldnames}")
            lengths = [_length(row[asked.column], f"{path}, row {at}") for at, row in enumerate(rows, 2)]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from None
    return tuple(Request(asked.prompt_tokens, length) for length in lengths if length)


def _length(text: str | None, where: str) -> int:
    if text is None or not text.strip().isdecimal():
        raise TraceError(f"{where}: a number of tokens is expected, not {text!r:.40}")
    return int(text)


def _is_length_log(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            return '"prompt_token_ids"' in file.readline(1 << 22)
    except (OSError, UnicodeDecodeError):
        return False  # the reader of traces says what is wrong


def _logged(path: str) -> Iterator[Request]:
    with open(path, encoding="utf-8") as file:
        for at, line in enumerate(file, 1):
            try:
                entry = json.loads(line)
                request = Request(len(entry["prompt_token_ids"]), entry["output_tokens"])
            except (ValueError, KeyError, TypeError, RecursionError, TraceError) as error:
                raise TraceError(f"{path}, row {at}: no line of a length log: {error!r:.80}") from None
            yield request


def _exact(trace: Trace) -> Estimates:
    return tuple(Estimate(one.output_tokens, 0.0) for one in trace)


def _constant(trace: Trace) -> Estimates:
    mean = statistics.fmean(one.output_tokens for one in trace)
    return (Estimate(mean, 0.0),) * len(trace)


def _none(trace: Trace) -> Estimates:
    return (None,) * len(trace)


def _erring(trace: Trace, sigma: float, rng: random.Random) -> Estimates:
    return tuple(
        Estimate(one.output_tokens * math.exp(rng.gauss(0.0, sigma)), min(1.0, sigma)) for one in trace
    )


_ESTIMATORS: Mapping[str, Callable[[Trace], Estimates]] = {
    "none": _none,
    "exact": _exact,
    "constant": _constant,
}


def describe_estimates(trace: Trace, estimates: Sequence[Estimate | None]) -> str:
    """A line for people: how far off they are."""
    pairs = [(one.output_tokens, e.output_tokens) for one, e in zip(trace, estimates, strict=True) if e]
    if not pairs:
        return "no estimates"
    off = sorted(abs(estimate - real) / real for real, estimate in pairs)
    return f"estimates off by {off[len(off) // 2]:.0%} at the median, {off[len(off) * 9 // 10]:.0%} at p90"

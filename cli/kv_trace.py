"""What `bench kv` replays: requests by their lengths, from files of several kinds, and estimates of answers.

Beside the traces that `tuner.config.trace` reads: CSV with a column of answer lengths (no prompts: each gets
a stated length), and logs of answers' lengths, the server's or those of `predict-len collect`.
"""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import Estimate
from phasewise.tuner.config.lengths import Request, Trace
from phasewise.tuner.config.trace import load_trace
from phasewise.tuner.errors import TraceError
from phasewise.tuner.predictor.facts import PromptFacts

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
    model: str | None = None
    """Whose tokens the prompts of a log become that has them as text."""


@dataclass(frozen=True)
class Sample:
    """One request of a trace. `facts`: what a predictor may know of it, where the trace tells."""

    request: Request
    facts: PromptFacts | None = None


Samples: TypeAlias = tuple[Sample, ...]


def read_samples(text: str, asked: Asked) -> Samples:
    """`text` names a file or writes a distribution: at most `asked.count` requests of it, in their order."""
    wanted = asked.count if asked.part == "all" else 2 * asked.count
    if text.endswith(".csv") and not _is_azure(text):
        samples = _column(text, asked)
    elif text.endswith((".jsonl", ".jsonl.xz")) and (asked.model is not None or _is_length_log(text)):
        samples = _logged(text, asked.model)
    else:
        return _part(tuple(Sample(one) for one in load_trace(text, wanted, asked.seed)), asked)
    rng = random.Random(asked.seed)
    chosen = sorted(rng.sample(range(len(samples)), min(wanted, len(samples))))
    return _part(tuple(samples[at] for at in chosen), asked)


def estimates_for(text: str, samples: Samples, seed: int) -> Estimates:
    """By `none`, `exact`, `constant` (the trace's mean), `error:SIGMA` (of the logarithm, with this seed) or
    a predictor's file."""
    if text in _ESTIMATORS:
        return _ESTIMATORS[text](requests_of(samples))
    if text.endswith(".safetensors"):
        return _predicted(text, samples)
    kind, _, sigma_text = text.partition(":")
    try:
        sigma = float(sigma_text)
    except ValueError:
        sigma = math.nan
    if kind != "error" or not 0 <= sigma <= 5:
        names = ", ".join(_ESTIMATORS)
        raise TraceError(f"{text!r:.40} is no estimate: one of {names}, error:SIGMA or a .safetensors file")
    return _erring(requests_of(samples), sigma, random.Random(seed))


def unseen_by(text: str, samples: Samples) -> Samples:
    """Where `text` is a predictor's file: only requests whose prompts it did not learn from."""
    if not text.endswith(".safetensors"):
        return samples
    from phasewise.tuner.predictor.facts import Example, held_out
    from phasewise.tuner.predictor.files import load_predictor

    facts = _facts_of(samples)
    about = load_predictor(text).trained_on
    share, seed = float(about.get("held_out_share", 0)), int(about.get("held_out_seed", 0))
    if not share:  # it says nothing of prompts like these
        return samples
    examples = [
        Example(known, one.request.output_tokens, False) for known, one in zip(facts, samples, strict=True)
    ]
    out = {id(example) for example in held_out(examples, share, seed)[1]}
    unseen = tuple(one for one, example in zip(samples, examples, strict=True) if id(example) in out)
    if not unseen:
        raise TraceError(f"{text} learnt from every prompt of this trace: there is nothing to judge it by")
    return unseen


def requests_of(samples: Samples) -> Trace:
    return tuple(sample.request for sample in samples)


def limited(samples: Samples, max_tokens: int) -> Samples:
    """Answers cut at `max_tokens`, as a server would."""
    return tuple(
        Sample(
            replace(one.request, output_tokens=min(one.request.output_tokens, max_tokens)),
            None if one.facts is None else one.facts._replace(max_tokens=max_tokens),
        )
        for one in samples
    )


def static_shares(trace: Trace, max_tokens: int) -> Mapping[str, float]:
    """What static pre-allocation makes of its slots when answers end at `max_tokens`: `final`, of blocks that
    ended, and `live`, over time."""
    requests = [replace(one, output_tokens=min(one.output_tokens, max_tokens)) for one in trace]
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


def _part(samples: Samples, asked: Asked) -> Samples:
    """Halves are drawn, not cut: both are of the same kind, and in the order of the trace."""
    if asked.part == "all":
        return samples[: asked.count]
    order = list(range(len(samples)))
    random.Random(asked.seed).shuffle(order)
    middle = len(order) // 2
    chosen = sorted(order[:middle] if asked.part == "first" else order[middle:])
    return tuple(samples[at] for at in chosen)


def _is_azure(path: str) -> bool:
    return "ContextTokens" in _first_line(path)


def _is_length_log(path: str) -> bool:
    return '"prompt_token_ids"' in _first_line(path)


def _first_line(path: str) -> str:
    """Nothing where it cannot be read: whoever reads the whole says why."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.readline(1 << 22)
    except (OSError, UnicodeDecodeError):
        return ""


def _column(path: str, asked: Asked) -> Samples:
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            if asked.column not in (rows.fieldnames or ()):
                names = ", ".join(rows.fieldnames or ())
                raise TraceError(
                    f"{path} has the columns {names}: name with --column whose numbers are lengths of answers"
                )
            lengths = [_length(row[asked.column], f"{path}, row {at}") for at, row in enumerate(rows, 2)]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from None
    samples = tuple(Sample(Request(asked.prompt_tokens, length)) for length in lengths if length)
    if not samples:
        raise TraceError(f"{path} holds no answer in column {asked.column}")
    return samples


def _length(text: str | None, where: str) -> int:
    if text is None or not text.strip().isdecimal():
        raise TraceError(f"{where}: a number of tokens is expected, not {text!r:.40}")
    return int(text)


def _logged(path: str, model: str | None) -> Samples:
    from phasewise.cli.predict_len import Tokens, read_logs

    logs, _ = read_logs([Path(path)], None if model is None else Tokens(model))
    return tuple(
        Sample(Request(len(one.facts.token_ids), one.output_tokens), one.facts)
        for log in logs
        for one in log.examples
    )


def _predicted(path: str, samples: Samples) -> Estimates:
    """What a server with this predictor would go by, had it seen no answer yet."""
    from phasewise.tuner.predictor.files import load_predictor
    from phasewise.tuner.predictor.model import LiveEstimator

    facts = _facts_of(samples)
    estimate = LiveEstimator(load_predictor(path))
    return tuple(Estimate(*estimate(known)) for known in facts)


def _facts_of(samples: Samples) -> list[PromptFacts]:
    facts = [one.facts for one in samples if one.facts is not None]
    if len(facts) < len(samples):
        raise TraceError("a predictor reads prompts, and this trace has lengths only: give a length log")
    return facts


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


def how_far_off(trace: Trace, estimates: Sequence[Estimate | None]) -> str:
    """For people."""
    pairs = [(one.output_tokens, e.output_tokens) for one, e in zip(trace, estimates, strict=True) if e]
    off = sorted(abs(estimate - real) / real for real, estimate in pairs)
    return f"off by {off[len(off) // 2]:.0%} at the median, {off[len(off) * 9 // 10]:.0%} at p90"

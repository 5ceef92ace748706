"""The inputs of a KV replay: the lengths of requests, from files of several kinds, and estimates of answers.

Beside the traces that `tuner.config.trace` reads, a file may be CSV with a column of answer lengths (prompts
get a stated length), or a log of answers' lengths, written by the server or by `predict-len collect`.
"""

from __future__ import annotations

import csv
import io
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

from phasewise._files import open_input
from phasewise._words import meant, percent
from phasewise.serving.pools.arena import aligned
from phasewise.serving.pools.contract import Estimate
from phasewise.tuner.config.lengths import RequestLengths, Trace
from phasewise.tuner.config.trace import load_trace
from phasewise.tuner.errors import TraceError
from phasewise.tuner.predictor.log import PromptFacts
from phasewise.workflows.bench.kv.settings import ReplayWish
from phasewise.workflows.errors import UsageError
from phasewise.workflows.report import Report, silent

Estimates: TypeAlias = tuple[Estimate | None, ...]
"""The estimated answer of each request of a trace; None: no estimate."""


@dataclass(frozen=True)
class TraceRequest:
    """One request of a trace. facts: the input of a length predictor; None where the trace has no prompts."""

    request: RequestLengths
    facts: PromptFacts | None = None


TraceRequests: TypeAlias = tuple[TraceRequest, ...]


def read_samples(text: str, wish: ReplayWish, report: Report = silent) -> TraceRequests:
    """Read at most `wish.count` requests, in order, of `text`: a file's name or a distribution."""
    if text.endswith(".csv") and "ContextTokens" not in _first_line(text):
        samples = _column(text, wish)
    elif text.endswith((".jsonl", ".jsonl.xz")) and (
        wish.model is not None or '"prompt_token_ids"' in _first_line(text)
    ):
        samples = _logged(text, wish.model, report)
    else:
        requests = load_trace(text, wish.count, wish.seed)[: wish.count]
        return tuple(TraceRequest(request) for request in requests)
    rng = random.Random(wish.seed)
    chosen = sorted(rng.sample(range(len(samples)), min(wish.count, len(samples))))
    return tuple(samples[index] for index in chosen)


def estimates_for(text: str, samples: TraceRequests, seed: int) -> Estimates:
    """Estimate answers by `none`, `exact`, `constant` (the trace's mean), `error:SIGMA` (standard deviation
    of the logarithm, drawn with this seed) or a predictor's file. Raises TraceError for any other `text`.
    """
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


def unseen_by(text: str, samples: TraceRequests) -> TraceRequests:
    """The requests whose prompts the predictor file `text` was not trained on; all for any other `text`."""
    if not text.endswith(".safetensors"):
        return samples
    from phasewise.tuner.predictor.files import load_predictor
    from phasewise.tuner.predictor.log import Example, held_out

    facts = _facts_of(samples)
    about = load_predictor(text).trained_on
    share, seed = float(about.get("held_out_share", 0)), int(about.get("held_out_seed", 0))
    if not share:  # trained on other prompts
        return samples
    examples = [
        Example(prompt_facts, sample.request.output_tokens, False)
        for prompt_facts, sample in zip(facts, samples, strict=True)
    ]
    out = {id(example) for example in held_out(examples, share, seed)[1]}
    unseen = tuple(sample for sample, example in zip(samples, examples, strict=True) if id(example) in out)
    if not unseen:
        raise TraceError(f"{text} learnt from every prompt of this trace: there is nothing to judge it by")
    return unseen


def requests_of(samples: TraceRequests) -> Trace:
    return tuple(sample.request for sample in samples)


def limited(samples: TraceRequests, max_tokens: int) -> TraceRequests:
    """The requests with answers cut at `max_tokens`, as a server cuts them."""
    return tuple(
        TraceRequest(
            replace(sample.request, output_tokens=min(sample.request.output_tokens, max_tokens)),
            None if sample.facts is None else sample.facts._replace(max_tokens=max_tokens),
        )
        for sample in samples
    )


def static_shares(trace: Trace, max_tokens: int) -> Mapping[str, float]:
    """Utilisation of static allocation when answers end at `max_tokens`.

    `final`: share of its block that a request fills at its end. `live`: share of reserved slots in use, over
    time.
    """
    requests = [replace(request, output_tokens=min(request.output_tokens, max_tokens)) for request in trace]
    longest = aligned(max(request.prompt_tokens for request in requests) + max_tokens)
    steps = sum(request.output_tokens for request in requests)
    live = sum(
        request.output_tokens * (request.prompt_tokens + (request.output_tokens - 1) / 2)
        for request in requests
    )
    return {
        "final": statistics.fmean(request.tokens for request in requests) / longest,
        "live": live / (steps * longest),
    }


def limit_for(trace: Trace, text: str) -> int:
    """The highest max_tokens at which static allocation reaches `final:0.55` or `live:0.55`."""
    kind, _, share_text = text.partition(":")
    try:
        share = float(share_text)
    except ValueError:
        share = math.nan
    if kind not in ("final", "live") or not 0 < share < 1:
        raise TraceError(f"{text!r:.40} is no share: write final:0.55 or live:0.55")
    top = max(request.output_tokens for request in trace)
    for max_tokens in range(top, 0, -1):
        if static_shares(trace, max_tokens)[kind] >= share:
            return max_tokens
    raise TraceError(f"no max_tokens lets static pre-allocation reach {text} on this trace")


def _first_line(path: str) -> str:
    """The first line of a file; empty if unreadable, since reading the whole file then raises the error."""
    try:
        with io.TextIOWrapper(open_input(path), encoding="utf-8-sig") as file:
            return file.readline(1 << 22)
    except (OSError, UnicodeDecodeError):
        return ""


def _column(path: str, wish: ReplayWish) -> TraceRequests:
    try:
        with io.TextIOWrapper(open_input(path), encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file)
            names = rows.fieldnames or ()
            if wish.column not in names:
                raise TraceError(_wrong_column(path, wish.column, names))
            lengths = [
                _length(row[wish.column], f"{path}, row {row_number}")
                for row_number, row in enumerate(rows, 2)
            ]
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise TraceError(f"{path}: {error}") from None
    samples = tuple(TraceRequest(RequestLengths(wish.prompt_tokens, length)) for length in lengths if length)
    if not samples:
        raise TraceError(f"{path} holds no answer in column {wish.column}")
    return samples


def _wrong_column(path: str, column: str | None, names: Sequence[str]) -> str:
    listed = ", ".join(names)
    if column is None:
        return f"{path} has the columns {listed}: name with --column whose numbers are lengths of answers"
    return f"{path} has no column {column!r:.60}, only {listed}{meant(column, names)}"


def _length(text: str | None, where: str) -> int:
    if text is None or not text.strip().isdecimal():
        raise TraceError(f"{where}: a number of tokens is expected, not {text!r:.40}")
    return int(text)


def _logged(path: str, model: str | None, report: Report) -> TraceRequests:
    from phasewise.workflows.predict_len.inputs import read_logs

    logs = read_logs([Path(path)], model, report).logs
    return tuple(
        TraceRequest(RequestLengths(len(example.facts.token_ids), example.output_tokens), example.facts)
        for log in logs
        for example in log.examples
    )


def _predicted(path: str, samples: TraceRequests) -> Estimates:
    """The estimates of a server that starts with this predictor and has learnt from no answer."""
    from phasewise.tuner.predictor.files import load_predictor
    from phasewise.tuner.predictor.live import LiveEstimator

    facts = _facts_of(samples)
    estimate = LiveEstimator(load_predictor(path))
    return tuple(Estimate(*estimate(prompt_facts)) for prompt_facts in facts)


def _facts_of(samples: TraceRequests) -> list[PromptFacts]:
    facts = [sample.facts for sample in samples if sample.facts is not None]
    if len(facts) < len(samples):
        raise TraceError("a predictor reads prompts, and this trace has lengths only: give a length log")
    return facts


def _constant(trace: Trace) -> Estimates:
    mean = statistics.fmean(request.output_tokens for request in trace)
    return (Estimate(mean, 0.0),) * len(trace)


def _erring(trace: Trace, sigma: float, rng: random.Random) -> Estimates:
    return tuple(
        Estimate(request.output_tokens * math.exp(rng.gauss(0.0, sigma)), min(1.0, sigma))
        for request in trace
    )


_ESTIMATORS: Mapping[str, Callable[[Trace], Estimates]] = {
    "none": lambda trace: (None,) * len(trace),
    "exact": lambda trace: tuple(Estimate(request.output_tokens, 0.0) for request in trace),
    "constant": _constant,
}


def how_far_off(trace: Trace, estimates: Sequence[Estimate | None]) -> str:
    """The error of estimates as a line of text."""
    pairs = [
        (request.output_tokens, e.output_tokens) for request, e in zip(trace, estimates, strict=True) if e
    ]
    off = sorted(abs(estimate - real) / real for real, estimate in pairs)
    return f"off by {percent(off[len(off) // 2])} at the median, {percent(off[len(off) * 9 // 10])} at p90"


KV_CHUNK_SLOTS = 16


def slots_beside(model: str, memory_bytes: int, kv_format: str = "auto", report: Report = silent) -> int:
    """KV slots beside the weights of `model` in `memory_bytes`.

    Raises ModelError and EvaluationError for the model, UsageError where the weights leave no room.
    """
    from phasewise.cython_kernels.kv_formats import kv_slot_bytes
    from phasewise.workflows.opening.model_shape import shape_of_reference

    shape = shape_of_reference(model, "native", report)
    if kv_format != "auto":
        per_head = kv_slot_bytes(kv_format, shape.head_dim, latent=shape.kv_vectors == 1)
        shape = replace(shape, kv_bytes_per_slot=shape.n_layers * shape.n_kv_heads * per_head)
    free_bytes = memory_bytes - shape.weight_bytes
    n_slots = free_bytes // shape.kv_bytes_per_slot // KV_CHUNK_SLOTS * KV_CHUNK_SLOTS
    if n_slots < KV_CHUNK_SLOTS:
        least_mib = (shape.weight_bytes + KV_CHUNK_SLOTS * shape.kv_bytes_per_slot) / (1 << 20)
        raise UsageError(
            f"--memory: the weights of {shape.name} alone need more; give {least_mib:.0f}M at least"
        )
    report(
        f"{shape.name}: {shape.weight_bytes >> 20} MiB of weights leave {n_slots} KV slots of "
        f"{shape.kv_bytes_per_slot} bytes"
    )
    return n_slots

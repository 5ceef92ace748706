"""From a user's settings to a `LoadTest`: lengths, arrivals, the body's fields and the promises."""

from __future__ import annotations

import secrets
from typing import Any

from phasewise._json import read_json
from phasewise._options import changed, refuse_unused
from phasewise.loadtest.arrivals import LatencySlo, RequestPace, instants_of, parse_slo, repeated
from phasewise.loadtest.client import LoadTestError, Target, base_of
from phasewise.loadtest.rate_search import RateSearch
from phasewise.loadtest.session import LoadTest
from phasewise.loadtest.settings import Asking, Promises, SendingTimes, SentLengths
from phasewise.tuner.config.lengths import RequestLengths, Trace, parse_distribution
from phasewise.tuner.config.trace import read_trace
from phasewise.tuner.errors import TraceError

VOTES = 3
"""Probes of each rate at which a search would end; the majority decides."""
DEFAULT_REQUESTS, DEFAULT_CLIENTS = 100, 8
REQUESTS_OF_A_DURATION = 100_000
"""Number of requests prepared for a load of given duration: enough for the duration to end the load."""
DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 128, 64


class LoadSettingsError(LoadTestError):
    """Settings that exclude each other, or one that cannot be read: wrong usage on a command line."""

    exit_code = 2


def load_test_of(
    url: str, model: str, times: SendingTimes, lengths: SentLengths, asking: Asking, promises: Promises
) -> LoadTest:
    """The load test that these settings ask for.

    Raises LoadSettingsError where settings exclude each other, TraceError for a trace that cannot be read.
    """
    is_search = promises.find_rate
    if is_search:
        instead = "--probe says how long each rate is sent; leave that out"
        refuse_unused("while a rate is searched", changed(times, "duration_s"), instead)
    slo = _slo(promises, needs_one=is_search)
    requests = _requests(times, lengths)
    return LoadTest(
        target=Target(
            base_of(url),
            model,
            asking.endpoint == "chat",
            asking.api_key,
            None if asking.unix_socket is None else str(asking.unix_socket),
            _body_fields(asking),
        ),
        requests=requests,
        pace=_pace(requests, times, is_search=is_search),
        seed=lengths.seed or 0,
        prompts_seed=secrets.randbits(32) if lengths.seed is None else lengths.seed,
        n_warm_up=lengths.warmup,
        duration_s=times.duration_s,
        slo=slo,
        search=RateSearch(start=times.rate or 1.0, votes=VOTES) if is_search else None,
        probe_s=promises.probe_s,
    )


def _slo(promises: Promises, *, needs_one: bool) -> LatencySlo | None:
    if promises.goodput is None:
        if needs_one:
            raise LoadSettingsError("--find-rate needs promises: --slo ttft=2s,tpot=280ms, for example")
        return None
    try:
        return parse_slo(promises.goodput)
    except TraceError as error:
        raise LoadSettingsError(f"--slo: {error}") from None


def _requests(times: SendingTimes, wanted: SentLengths) -> Trace:
    """The lengths of the requests, and their arrivals where a trace has them."""
    is_fixed = (wanted.input_len, wanted.output_len) != (None, None)
    if sum((times.trace is not None, wanted.lengths is not None, is_fixed)) > 1:
        raise LoadSettingsError(
            "lengths come from --trace, from --lengths or from --input-len and --output-len"
        )
    if times.trace is not None:
        whole = read_trace(times.trace)
        return repeated(whole, wanted.requests or len(whole))
    without_count = DEFAULT_REQUESTS if times.duration_s is None else REQUESTS_OF_A_DURATION
    n_requests = wanted.requests or without_count
    if wanted.lengths is not None:
        return parse_distribution(wanted.lengths, n_requests, wanted.seed or 0)
    lengths = RequestLengths(
        wanted.input_len or DEFAULT_INPUT_TOKENS, wanted.output_len or DEFAULT_OUTPUT_TOKENS
    )
    return (lengths,) * n_requests


def _pace(requests: Trace, times: SendingTimes, *, is_search: bool) -> RequestPace:
    if times.rate is not None or is_search:
        return RequestPace(times.rate, most_at_once=times.concurrency)
    instants_s = instants_of(requests)
    if instants_s is not None:
        return RequestPace(None, instants_s=instants_s, most_at_once=times.concurrency)
    return RequestPace(None, most_at_once=times.concurrency or DEFAULT_CLIENTS)


def _body_fields(asking: Asking) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": asking.temperature}
    if asking.ignore_eos:
        fields["ignore_eos"] = True
    if asking.extra_body is not None:
        try:
            more = read_json(asking.extra_body)
        except ValueError:
            more = None
        if not isinstance(more, dict):
            raise LoadSettingsError(f"--extra-body {asking.extra_body!r:.60} is no JSON object")
        fields |= more
    return fields

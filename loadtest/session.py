"""A load test: make its requests by the settings, find the model, calibrate prompts, warm up, then send one
load or search for a rate.

Nothing here prints: remarks go to `report`, outcomes to the observers that `progress` opens.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from typing import Any, TypeAlias

from phasewise._json import read_json
from phasewise._options import changed, refuse_unused
from phasewise._words import counted, percent
from phasewise.loadtest.client import LoadClient, LoadTestError, Target, base_of, open_client
from phasewise.loadtest.metrics import Measured, attainment, is_kept
from phasewise.loadtest.prompts import IdPrompts, TextPrompts, calibrated
from phasewise.loadtest.rate_search import RateSearch, find_rate
from phasewise.loadtest.send import Observe, RequestLoad, RequestPace, run_load
from phasewise.loadtest.settings import Asking, Promises, SendingTimes, SentLengths
from phasewise.tuner.config.lengths import RequestLengths, Trace, parse_distribution
from phasewise.tuner.config.slo import LatencyBounds, parse_bounds
from phasewise.tuner.config.trace import fitted, read_trace
from phasewise.tuner.errors import TraceError

SETTLE_S = 1.0
"""Seconds of pause between two probes, in which a server drops what the first probe left behind."""

FEWEST_OF_A_PROBE, LONGEST_PROBE = 10, 3
"""A probe at a low rate is prolonged until it has FEWEST_OF_A_PROBE requests, up to LONGEST_PROBE times its
length."""

MOST_WARM_AT_ONCE = 8
VOTES = 3
"""Probes of each rate at which a search would end; the majority decides."""
DEFAULT_REQUESTS, DEFAULT_CLIENTS = 100, 8
REQUESTS_OF_A_DURATION = 100_000
"""Number of requests prepared for a load of given duration: enough for the duration to end the load."""
DEFAULT_INPUT_TOKENS, DEFAULT_OUTPUT_TOKENS = 128, 64

Report: TypeAlias = Callable[[str], None]
"""Callback that is given one line of text about the progress, without a newline."""

OpenProgress: TypeAlias = Callable[[int], AbstractContextManager[Observe]]
"""Opens a context for a load of N requests; the context's observer is called with each outcome."""


@dataclass(frozen=True)
class LoadTest:
    """A measurement as its settings ask for it: the server, the requests and their pace, the promises."""

    target: Target
    requests: Trace
    pace: RequestPace
    slo: LatencyBounds | None
    lengths: SentLengths
    promises: Promises
    duration_s: float | None


@dataclass(frozen=True)
class RateProbe:
    """The load of one rate that a search asked for."""

    rate: float
    measured: Measured
    attainment: float
    """Share of its requests that kept all promises."""
    is_kept: bool


@dataclass(frozen=True)
class LoadReport:
    """The results of a measurement; after a search those of the highest kept rate, the pace of `test`."""

    test: LoadTest
    date: datetime
    n_requests: int
    measured: Measured
    prompts: str
    was_stopped: bool = False
    probes: Sequence[RateProbe] = ()
    found_rate: float | None = None


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
    slo = _slo(promises)
    requests = _requests(times, lengths)
    base, fields = base_of(url), _body_fields(asking)
    target = Target(base, model, asking.endpoint == "chat", asking.api_key, asking.unix_socket, fields)
    pace = _pace(requests, times, is_search=is_search)
    return LoadTest(target, requests, pace, slo, lengths, promises, times.duration_s)


def _slo(promises: Promises) -> LatencyBounds | None:
    if promises.find_rate and promises.goodput is None:
        raise LoadSettingsError("--find-rate needs promises: --slo ttft=2s,tpot=280ms, for example")
    try:
        return None if promises.goodput is None else parse_slo(promises.goodput)
    except TraceError as error:
        raise LoadSettingsError(f"--slo: {error}") from None


def parse_slo(text: str) -> LatencyBounds:
    """Parse bounds of request latencies, in the syntax of `slo.parse_bounds`. Raises TraceError."""
    bounds = parse_bounds(text)
    if any(bound.percentile is not None for bound in bounds):
        raise TraceError(f"this SLO bounds every request, without percentiles: {text!r:.60}")
    return LatencyBounds.of(bounds)


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
    n_prompt, n_answer = wanted.input_len or DEFAULT_INPUT_TOKENS, wanted.output_len or DEFAULT_OUTPUT_TOKENS
    return (RequestLengths(n_prompt, n_answer),) * n_requests


def repeated(trace: Trace, count: int) -> Trace:
    """The first `count` requests by arrival; a shorter trace is repeated from its end.

    Two passes are the mean gap apart, so the rate does not change.
    """
    if not trace:
        raise TraceError("a trace without requests cannot be replayed")
    ordered = sorted(trace, key=lambda request: request.arrival_s or 0.0)
    span_s = ordered[-1].arrival_s or 0.0
    pass_s = span_s * len(ordered) / max(1, len(ordered) - 1)
    return tuple(
        _later(ordered[index % len(ordered)], index // len(ordered) * pass_s) for index in range(count)
    )


def _later(request: RequestLengths, by_s: float) -> RequestLengths:
    return request if request.arrival_s is None else replace(request, arrival_s=request.arrival_s + by_s)


def instants_of(trace: Trace) -> list[float] | None:
    """The arrival times of all requests in seconds; None if any request of the trace has no arrival."""
    instants_s = [request.arrival_s for request in trace if request.arrival_s is not None]
    return instants_s if len(instants_s) == len(trace) else None


def _pace(requests: Trace, times: SendingTimes, *, is_search: bool) -> RequestPace:
    if times.rate is not None or is_search:
        return RequestPace(times.rate, most_at_once=times.concurrency)
    instants_s = instants_of(requests)
    n_clients = DEFAULT_CLIENTS if instants_s is None else None
    return RequestPace(None, instants_s, times.concurrency or n_clients)


def _body_fields(asking: Asking) -> dict[str, Any]:
    fields = {"temperature": asking.temperature, **({"ignore_eos": True} if asking.ignore_eos else {})}
    if asking.extra_body is not None:
        more = None
        with suppress(ValueError):
            more = read_json(asking.extra_body)
        if not isinstance(more, dict):
            raise LoadSettingsError(f"--extra-body {asking.extra_body!r:.60} is no JSON object")
        fields |= more
    return fields


def run_load_test(test: LoadTest, report: Report, progress: OpenProgress) -> LoadReport:
    """Run the test on an event loop of its own. Ctrl-C ends it early, with what was measured until then.

    Raises LoadTestError where the server cannot be measured at all.
    """
    return asyncio.run(_run(test, report, progress))


async def _run(test: LoadTest, report: Report, progress: OpenProgress) -> LoadReport:
    stop = asyncio.Event()
    async with open_client(test.target) as client:
        requests = _fitting(test.requests, await _choose_model(client), report)
        test = replace(test, target=client.target, requests=requests)
        seed = secrets.randbits(32) if test.lengths.seed is None else test.lengths.seed
        prompts = await calibrated(client.count_prompt, seed, may_use_ids=not test.target.is_chat)
        report(f"{client.target.model} at {client.target.url}: {prompts.describe()}")
        session = _Session(client, test, prompts, stop, report, progress)
        with stopping_at_interrupt(stop, report):
            await session.warm_up()
            return await (session.search() if test.promises.find_rate else session.measure())


async def _choose_model(client: LoadClient) -> int | None:
    """Let the client ask for the first model that is served, unless one is named; its context, if known."""
    wanted = client.target.model
    try:
        cards = await client.models()
    except LoadTestError:
        if not wanted:
            raise
        return None
    named = [card for card in cards if wanted in ("", card["id"])]
    if not wanted and not named:
        raise LoadTestError(f"{client.target.base} serves no model: name one with --model")
    context = named[0].get("max_model_len") if named else None
    client.target = replace(client.target, model=wanted or named[0]["id"])
    return context if type(context) is int and context > 1 else None


def _fitting(requests: Trace, context: int | None, report: Report) -> Trace:
    """Cut the requests to the model's context, and report how many were cut."""
    if context is None:
        return requests
    cut = fitted(requests, context)
    n_cut = sum(before != after for before, after in zip(requests, cut, strict=True))
    if n_cut:
        report(f"cut to the model's context of {context} tokens: {n_cut} of {counted(len(cut), 'request')}")
    return cut


@dataclass(frozen=True)
class _Session:
    """A load test on an open client."""

    client: LoadClient
    test: LoadTest
    prompts: IdPrompts | TextPrompts
    stop: asyncio.Event
    report: Report
    progress: OpenProgress

    async def warm_up(self) -> None:
        count = self.test.lengths.warmup
        if count:
            self.report(f"warming up: {counted(count, 'request')} ...")
            pace = RequestPace(None, most_at_once=min(count, MOST_WARM_AT_ONCE))
            requests = tuple(islice(cycle(self.test.requests), count))
            load = RequestLoad(requests, pace, self.prompts, first_index=1 << 40)
            await run_load(self.client, load, self.stop)

    async def measure(self) -> LoadReport:
        """Send one load at the pace of the test."""
        test = self.test
        seed, duration_s = test.lengths.seed or 0, test.duration_s or math.inf
        load = RequestLoad(test.requests, test.pace, self.prompts, seed, duration_s=duration_s)
        measured = await self._sent(load)
        n_requests = len(test.requests) if test.duration_s is None else len(measured.outcomes)
        return self._load_report(measured, n_requests)

    async def _sent(self, load: RequestLoad) -> Measured:
        with self.progress(len(load.requests)) as observe:
            return await run_load(self.client, load, self.stop, observe)

    async def search(self) -> LoadReport:
        """Probe rates until the search ends or is stopped. Reports the highest kept rate, else the lowest."""
        probes: list[RateProbe] = []
        rates = find_rate(RateSearch(start=self.test.pace.rate or 1.0, votes=VOTES))
        try:
            rate = next(rates)
            while True:
                probe = await self._probe(rate, len(probes))
                if self.stop.is_set():  # the probe was cut off, so it says nothing
                    break
                probes.append(probe)
                verdict, n_requests = "kept" if probe.is_kept else "missed", len(probe.measured.outcomes)
                share = f"{percent(probe.attainment)} of {n_requests}"
                self.report(f"{rate:8.3f} requests/s: {verdict}, {share}")
                await asyncio.sleep(SETTLE_S)
                rate = rates.send(probe.is_kept)
        except StopIteration as end:
            best = end.value
        else:  # interrupted: the best so far
            best = max((probe.rate for probe in probes if probe.is_kept), default=None)
        kept = next((probe for probe in probes if probe.rate == best and probe.is_kept), None)
        shown = kept or min(probes, key=lambda probe: probe.rate, default=None)
        measured = shown.measured if shown else Measured((), 0.0, 0.0)
        report = self._load_report(measured, len(measured.outcomes))
        pace = replace(self.test.pace, rate=shown.rate if shown else None)
        best = kept.rate if kept else None
        return replace(report, test=replace(self.test, pace=pace), probes=tuple(probes), found_rate=best)

    async def _probe(self, rate: float, number: int) -> RateProbe:
        """Requests at one rate; each is given up as soon as its promise is broken."""
        test, slo = self.test, self.test.slo
        assert slo is not None
        wanted = rate * test.promises.probe_s
        count = max(1, round(wanted), min(FEWEST_OF_A_PROBE, round(wanted * LONGEST_PROBE)))
        load = RequestLoad(
            tuple(islice(cycle(test.requests), count)),
            replace(test.pace, rate=rate),
            self.prompts,
            (test.lengths.seed or 0) + number,
            first_index=(number + 1) << 24,
            limit_s=lambda tokens: longest_s(slo, tokens),
        )
        measured = await self._sent(load)
        kept = len(measured.outcomes) == count and is_kept(measured.outcomes, slo)
        return RateProbe(rate, measured, attainment(measured.outcomes, slo), kept)

    def _load_report(self, measured: Measured, n_requests: int) -> LoadReport:
        now, is_stopped = datetime.now(UTC), self.stop.is_set()
        return LoadReport(self.test, now, n_requests, measured, self.prompts.describe(), is_stopped)


def longest_s(slo: LatencyBounds, output_tokens: int) -> float | None:
    """The seconds after which an answer has broken a promise for certain; None where no promise bounds it."""
    bounds_ms = [] if slo.e2el_ms is None else [slo.e2el_ms]
    if slo.ttft_ms is not None and slo.tpot_ms is not None:
        bounds_ms.append(slo.ttft_ms + slo.tpot_ms * max(0, output_tokens - 1))
    return min(bounds_ms) / 1e3 if bounds_ms else None


@contextmanager
def stopping_at_interrupt(stop: asyncio.Event, report: Report) -> Iterator[None]:
    """Ctrl-C sets `stop`, so that what was measured is kept; a second Ctrl-C raises KeyboardInterrupt."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        report("interrupted: this is what was measured; again to leave at once")
        stop.set()

    with suppress(RuntimeError, ValueError):  # not the main thread: it gets no signals
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)

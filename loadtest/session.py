"""A load test: find the model, calibrate prompts, warm up, then send one load or search for a rate.

Nothing here prints: remarks go to `report`, outcomes to the observers that `progress` opens.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeAlias

from phasewise._words import counted, percent
from phasewise.loadtest.arrivals import LatencySlo, RequestPace
from phasewise.loadtest.client import LoadClient, LoadTestError, Target, open_client
from phasewise.loadtest.metrics import Measured, attainment, is_kept
from phasewise.loadtest.prompts import Prompts, calibrated
from phasewise.loadtest.rate_search import RateSearch, find_rate
from phasewise.loadtest.send import Observe, RequestLoad, run_load
from phasewise.tuner.config.lengths import RequestLengths, Trace
from phasewise.tuner.config.trace import fitted

SETTLE_S = 1.0
"""Seconds of pause between two probes, in which a server drops what the first probe left behind."""

FEWEST_OF_A_PROBE, LONGEST_PROBE = 10, 3
"""A probe at a low rate is prolonged until it has FEWEST_OF_A_PROBE requests, up to LONGEST_PROBE times its
length."""

MOST_WARM_AT_ONCE = 8

Report: TypeAlias = Callable[[str], None]
"""Callback that is given one line of text about the progress, without a newline."""

OpenProgress: TypeAlias = Callable[[int], AbstractContextManager[Observe]]
"""Opens a context for a load of N requests; the context's observer is called with each outcome."""


@dataclass(frozen=True)
class LoadTest:
    """The settings of a measurement: the server, the requests, when they are sent, and whether to search for
    a rate.
    """

    target: Target
    requests: Trace
    pace: RequestPace
    seed: int = 0
    prompts_seed: int = 0
    n_warm_up: int = 0
    duration_s: float | None = None
    slo: LatencySlo | None = None
    search: RateSearch | None = None
    """Search for the highest rate that keeps `slo`; `pace` then says all but the rate."""
    probe_s: float = 20.0


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
    """The results of a measurement. After a search `measured` is the probe of the highest rate that was
    kept.
    """

    target: Target
    date: datetime
    n_requests: int
    pace: RequestPace
    slo: LatencySlo | None
    measured: Measured
    prompts: str
    probes: Sequence[RateProbe] = ()
    found_rate: float | None = None
    is_search: bool = False
    was_stopped: bool = False


def no_report(_line: str) -> None:
    """Drop the remark."""


def no_progress(_n_requests: int) -> AbstractContextManager[Observe]:
    """An observer that never stops a load and shows nothing."""
    return nullcontext(lambda _outcome: False)


def run_load_test(
    test: LoadTest, report: Report = no_report, progress: OpenProgress = no_progress
) -> LoadReport:
    """Run the test on an event loop of its own. Ctrl-C ends it early, with what was measured until then.

    Raises LoadTestError where the server cannot be measured at all.
    """
    return asyncio.run(_run(test, report, progress))


async def _run(test: LoadTest, report: Report, progress: OpenProgress) -> LoadReport:
    stop = asyncio.Event()
    async with open_client(test.target) as client:
        client, context = await _with_model(client)
        requests = _fitting(test.requests, context, report)
        test = replace(test, target=client.target, requests=requests)
        may_use_ids = not test.target.is_chat
        prompts = await calibrated(client.count_prompt, test.prompts_seed, may_use_ids=may_use_ids)
        report(f"{client.target.model} at {client.target.url}: {prompts.describe()}")
        session = _Session(client, test, prompts, stop, report, progress)
        with stopping_at_interrupt(stop, report):
            await session.warm_up()
            if test.search is None:
                return await session.measure()
            return await session.search(test.search)


async def _with_model(client: LoadClient) -> tuple[LoadClient, int | None]:
    """The client with the named model, or the first that is served; and its context, if known."""
    wanted = client.target.model
    try:
        cards = await client.models()
    except LoadTestError:
        if not wanted:
            raise
        return client, None
    named = [card for card in cards if wanted in ("", card["id"])]
    if not wanted and not named:
        raise LoadTestError(f"{client.target.base} serves no model: name one with --model")
    context = named[0].get("max_model_len") if named else None
    target = replace(client.target, model=wanted or named[0]["id"])
    return client.aimed_at(target), context if type(context) is int and context > 1 else None


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
    prompts: Prompts
    stop: asyncio.Event
    report: Report
    progress: OpenProgress

    async def warm_up(self) -> None:
        test = self.test
        if test.n_warm_up:
            self.report(f"warming up: {counted(test.n_warm_up, 'request')} ...")
            pace = RequestPace(None, most_at_once=min(test.n_warm_up, MOST_WARM_AT_ONCE))
            requests = tuple(test.requests[index % len(test.requests)] for index in range(test.n_warm_up))
            load = RequestLoad(requests, pace, self.prompts, first_index=1 << 40)
            await run_load(self.client, load, self.stop)

    async def measure(self) -> LoadReport:
        """Send one load at the pace of the test."""
        test = self.test
        load = RequestLoad(test.requests, test.pace, self.prompts, test.seed, duration_s=test.duration_s)
        with self.progress(len(test.requests)) as observe:
            measured = await run_load(self.client, load, self.stop, observe)
        return self._load_report(measured, test.pace)

    async def search(self, search: RateSearch) -> LoadReport:
        """Probe the rates that the search asks for, until the search ends or is interrupted."""
        probes: list[RateProbe] = []
        rates = find_rate(search)
        best: float | None = None
        try:
            rate = next(rates)
            while True:
                probe = await self._probe(rate, len(probes))
                if self.stop.is_set():  # the probe was cut off, so it says nothing
                    break
                probes.append(probe)
                self.report(_probe_line(probe))
                await asyncio.sleep(SETTLE_S)
                rate = rates.send(probe.is_kept)
        except StopIteration as end:
            best = end.value
        else:  # interrupted: the best so far
            best = max((probe.rate for probe in probes if probe.is_kept), default=None)
        return self._found(probes, best)

    async def _probe(self, rate: float, number: int) -> RateProbe:
        """Requests at one rate; each is given up as soon as its promise is broken."""
        test, slo = self.test, self.test.slo
        assert slo is not None
        requests = probe_requests(test.requests, rate, test.probe_s)
        load = RequestLoad(
            requests,
            replace(test.pace, rate=rate),
            self.prompts,
            test.seed + number,
            first_index=(number + 1) << 24,
            limit_s=lambda tokens: longest_s(slo, tokens),
        )
        with self.progress(len(requests)) as observe:
            measured = await run_load(self.client, load, self.stop, observe)
        kept = len(measured.outcomes) == len(requests) and is_kept(measured.outcomes, slo)
        return RateProbe(rate, measured, attainment(measured.outcomes, slo), kept)

    def _found(self, probes: Sequence[RateProbe], rate: float | None) -> LoadReport:
        """The report of a search that ended at `rate`, the highest that was kept; None: no rate was kept.

        It shows the probe of that rate, or that of the lowest rate tried.
        """
        best = next((probe for probe in probes if probe.rate == rate and probe.is_kept), None)
        shown = best or min(probes, key=lambda probe: probe.rate, default=None)
        measured = shown.measured if shown else Measured((), 0.0, 0.0)
        return replace(
            self._load_report(measured, replace(self.test.pace, rate=shown.rate if shown else None)),
            probes=tuple(probes),
            found_rate=best.rate if best else None,
            is_search=True,
            n_requests=len(measured.outcomes),
        )

    def _load_report(self, measured: Measured, pace: RequestPace) -> LoadReport:
        test = self.test
        return LoadReport(
            test.target,
            datetime.now(UTC),
            len(test.requests) if test.duration_s is None else len(measured.outcomes),
            pace,
            test.slo,
            measured,
            self.prompts.describe(),
            was_stopped=self.stop.is_set(),
        )


def probe_requests(requests: Trace, rate: float, probe_s: float) -> tuple[RequestLengths, ...]:
    """The requests of one probe: `requests` in turn, as often as needed."""
    count = max(1, round(rate * probe_s), min(FEWEST_OF_A_PROBE, round(rate * probe_s * LONGEST_PROBE)))
    return tuple(requests[index % len(requests)] for index in range(count))


def longest_s(slo: LatencySlo, output_tokens: int) -> float | None:
    """The seconds after which an answer has broken a promise for certain; None where no promise bounds it."""
    bounds_ms = []
    if slo.ttft_ms is not None and slo.tpot_ms is not None:
        bounds_ms.append(slo.ttft_ms + slo.tpot_ms * max(0, output_tokens - 1))
    if slo.e2el_ms is not None:
        bounds_ms.append(slo.e2el_ms)
    return min(bounds_ms) / 1e3 if bounds_ms else None


def _probe_line(probe: RateProbe) -> str:
    verdict = "kept" if probe.is_kept else "missed"
    kept = f"{percent(probe.attainment)} of {len(probe.measured.outcomes)}"
    return f"{probe.rate:8.3f} requests/s: {verdict}, {kept}"


@contextmanager
def stopping_at_interrupt(stop: asyncio.Event, report: Report) -> Iterator[None]:
    """Ctrl-C sets `stop`, so that what was measured is kept; a second Ctrl-C raises KeyboardInterrupt."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        report("interrupted: this is what was measured; again to leave at once")
        stop.set()

    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except (RuntimeError, ValueError):  # not the main thread: it gets no signals
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)

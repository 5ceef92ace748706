"""`phasewise bench serve` between its options and its figures: what is served, a warm-up, the load."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from phasewise.cli.bench_serve_client import Client, ServeBenchError, Target, open_client
from phasewise.cli.bench_serve_load import Pace, Slo
from phasewise.cli.bench_serve_metrics import Measured, attainment, is_kept, kept_promises, most_missed
from phasewise.cli.bench_serve_outcome import Outcome
from phasewise.cli.bench_serve_progress import Progress
from phasewise.cli.bench_serve_prompts import Prompts, calibrated
from phasewise.cli.bench_serve_rates import RateSearch, find_rate
from phasewise.cli.bench_serve_run import Load, run_load
from phasewise.cli.present import note
from phasewise.tuner.config.lengths import Request, Trace
from phasewise.tuner.config.trace import fitted

SETTLE_S = 1.0
"""Between two probes: what the first left behind is given up by then."""

FEWEST_OF_A_PROBE, LONGEST_PROBE = 10, 3
"""A probe at a low rate goes on until it has so many requests, but no more than so many times its length."""

MOST_WARM_AT_ONCE = 8


@dataclass(frozen=True)
class Asked:
    """What the command was asked to do."""

    target: Target
    requests: Trace
    pace: Pace
    seed: int = 0
    n_warm_up: int = 0
    duration_s: float | None = None
    slo: Slo | None = None
    search: RateSearch | None = None
    probe_s: float = 20.0
    may_cut_probes: bool = True
    """End a probe when it is lost; then its attainment is that of what was sent, no point of a curve."""
    may_use_ids: bool = True
    keeps_text: bool = False


@dataclass(frozen=True)
class Probe:
    """One rate that a search asked for."""

    rate: float
    measured: Measured
    attainment: float
    """Share of its requests that kept all promises; of those that were sent, where it was cut short."""
    is_kept: bool


@dataclass(frozen=True)
class Report:
    """What was measured: of a search, the run is the probe of the highest rate that was kept."""

    target: Target
    date: datetime
    n_requests: int
    pace: Pace
    slo: Slo | None
    measured: Measured
    prompts: str
    probes: Sequence[Probe] = ()
    found_rate: float | None = None
    is_search: bool = False
    was_stopped: bool = False


def bench_serve(asked: Asked) -> Report:
    """Run it on a loop of its own. ServeBenchError: nothing can be measured. Ctrl-C ends it early."""
    return asyncio.run(_bench(asked))


async def _bench(asked: Asked) -> Report:
    stop = asyncio.Event()
    async with open_client(asked.target, keeps_text=asked.keeps_text) as client:
        client, context = await _with_model(client)
        requests = _fitting(asked.requests, context)
        asked = replace(asked, target=client.target, requests=requests)
        prompts = await calibrated(
            client.count_prompt, asked.seed, may_use_ids=asked.may_use_ids and not asked.target.is_chat
        )
        note(f"{client.target.model} at {client.target.url}: {prompts.describe()}")
        with stopping_at_interrupt(stop):
            await _warm_up(client, asked, prompts, stop)
            if asked.search is None:
                return await _measure(client, asked, prompts, stop)
            return await _search(client, asked, prompts, stop)


async def _with_model(client: Client) -> tuple[Client, int | None]:
    """The client with the model that is asked for, or the first that is served; and its context, if told."""
    asked = client.target.model
    try:
        cards = await client.models()
    except ServeBenchError:
        if not asked:
            raise
        return client, None
    named = [card for card in cards if asked in ("", card["id"])]
    if not asked and not named:
        raise ServeBenchError(f"{client.target.base} serves no model: name one with --model")
    context = named[0].get("max_model_len") if named else None
    target = replace(client.target, model=asked or named[0]["id"])
    return client.aimed_at(target), context if type(context) is int and context > 1 else None


def _fitting(requests: Trace, context: int | None) -> Trace:
    """Requests cut to the model's context; how many were is said."""
    if context is None:
        return requests
    cut = fitted(requests, context)
    n_cut = sum(before != after for before, after in zip(requests, cut, strict=True))
    if n_cut:
        note(f"{n_cut} of {len(cut)} requests are cut to the model's context of {context} tokens")
    return cut


async def _warm_up(client: Client, asked: Asked, prompts: Prompts, stop: asyncio.Event) -> None:
    if asked.n_warm_up:
        note(f"warming up: {asked.n_warm_up} requests ...")
        pace = Pace(None, most_at_once=min(asked.n_warm_up, MOST_WARM_AT_ONCE))
        requests = tuple(asked.requests[at % len(asked.requests)] for at in range(asked.n_warm_up))
        await run_load(client, Load(requests, pace, prompts, first_index=1 << 40), stop)


async def _measure(client: Client, asked: Asked, prompts: Prompts, stop: asyncio.Event) -> Report:
    load = Load(asked.requests, asked.pace, prompts, asked.seed, duration_s=asked.duration_s)
    with Progress(len(asked.requests)) as progress:
        measured = await run_load(client, load, stop, progress)
    return _report(asked, prompts, measured, was_stopped=stop.is_set())


def _report(asked: Asked, prompts: Prompts, measured: Measured, *, was_stopped: bool) -> Report:
    n_sent = len(measured.outcomes)
    return Report(
        asked.target,
        datetime.now(UTC),
        len(asked.requests) if asked.duration_s is None else n_sent,
        asked.pace,
        asked.slo,
        measured,
        prompts.describe(),
        was_stopped=was_stopped,
    )


async def _search(client: Client, asked: Asked, prompts: Prompts, stop: asyncio.Event) -> Report:
    assert asked.search is not None
    probes: list[Probe] = []
    rates = find_rate(asked.search)
    best: float | None = None
    try:
        rate = next(rates)
        while True:
            probe = await _probe(client, asked, prompts, rate, len(probes), stop)
            if stop.is_set():  # cut off, so it says nothing
                break
            probes.append(probe)
            note(_probe_line(probe))
            await asyncio.sleep(SETTLE_S)
            rate = rates.send(probe.is_kept)
    except StopIteration as end:
        best = end.value
    else:  # interrupted: what was kept so far
        best = max((probe.rate for probe in probes if probe.is_kept), default=None)
    return _found(asked, prompts, probes, best, was_stopped=stop.is_set())


def _found(
    asked: Asked, prompts: Prompts, probes: Sequence[Probe], rate: float | None, *, was_stopped: bool
) -> Report:
    """A probe of `rate`, the highest that was kept; where none was, of the lowest that was tried."""
    best = next((probe for probe in probes if probe.rate == rate and probe.is_kept), None)
    shown = best or min(probes, key=lambda probe: probe.rate, default=None)
    measured = shown.measured if shown else Measured((), 0.0, 0.0)
    asked = replace(asked, pace=replace(asked.pace, rate=shown.rate if shown else None))
    report = _report(asked, prompts, measured, was_stopped=was_stopped)
    return replace(
        report,
        probes=tuple(probes),
        found_rate=best.rate if best else None,
        is_search=True,
        n_requests=len(measured.outcomes),
    )


async def _probe(
    client: Client, asked: Asked, prompts: Prompts, rate: float, number: int, stop: asyncio.Event
) -> Probe:
    """Requests at one rate, for a bounded time; ended as soon as too many promises are broken."""
    slo = asked.slo
    assert slo is not None
    requests = probe_requests(asked.requests, rate, asked.probe_s)
    load = Load(
        requests,
        replace(asked.pace, rate=rate),
        prompts,
        asked.seed + number,
        first_index=(number + 1) << 24,
        limit_s=lambda tokens: longest_s(slo, tokens),
    )
    decided = asyncio.Event()
    with Progress(len(requests)) as progress, _either(stop, decided):
        judge = Judge(slo, len(requests))
        measured = await run_load(
            client,
            load,
            decided,
            lambda outcome: progress(outcome) or (judge(outcome) and asked.may_cut_probes),
        )
    kept = not judge.is_lost and len(measured.outcomes) == len(requests) and is_kept(measured.outcomes, slo)
    return Probe(rate, measured, attainment(measured.outcomes, slo), kept)


@contextmanager
def _either(stop: asyncio.Event, decided: asyncio.Event) -> Iterator[None]:
    """Within, `decided` is set as soon as `stop` is."""

    async def follow() -> None:
        await stop.wait()
        decided.set()

    following = asyncio.ensure_future(follow())
    try:
        yield
    finally:
        following.cancel()


def probe_requests(requests: Trace, rate: float, probe_s: float) -> tuple[Request, ...]:
    """Those of `requests`, in turn, that arrive in a probe."""
    count = max(1, round(rate * probe_s), min(FEWEST_OF_A_PROBE, round(rate * probe_s * LONGEST_PROBE)))
    return tuple(requests[at % len(requests)] for at in range(count))


def longest_s(slo: Slo, output_tokens: int) -> float | None:
    """Whoever takes longer has broken a promise for certain; None where no promise bounds an answer."""
    bounds_ms = []
    if slo.ttft_ms is not None and slo.tpot_ms is not None:
        bounds_ms.append(slo.ttft_ms + slo.tpot_ms * max(0, output_tokens - 1))
    if slo.e2el_ms is not None:
        bounds_ms.append(slo.e2el_ms)
    return min(bounds_ms) / 1e3 if bounds_ms else None


class Judge:
    """Whether a probe of `count` requests is lost already, however the rest of it goes."""

    def __init__(self, slo: Slo, count: int) -> None:
        self._slo = slo
        self._most = most_missed(count)
        self._missed = dict.fromkeys(slo.promises(), 0)

    @property
    def is_lost(self) -> bool:
        return max(self._missed.values(), default=0) > self._most

    def __call__(self, outcome: Outcome) -> bool:
        for name, kept in kept_promises(outcome, self._slo).items():
            self._missed[name] += not kept
        return self.is_lost


def _probe_line(probe: Probe) -> str:
    verdict = "kept" if probe.is_kept else "missed"
    return (
        f"{probe.rate:8.3f} requests/s: {verdict}, {probe.attainment:.0%} of {len(probe.measured.outcomes)}"
    )


@contextmanager
def stopping_at_interrupt(stop: asyncio.Event) -> Iterator[None]:
    """Ctrl-C sets `stop`, so that what was measured is printed; a second one ends the command."""
    loop = asyncio.get_running_loop()

    def on_interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        note("interrupted: this is what was measured; again to leave at once")
        stop.set()

    try:
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
    except (RuntimeError, ValueError):  # not the main thread: nobody sends it signals
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)

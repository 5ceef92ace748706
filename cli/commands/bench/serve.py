"""`phasewise bench serve`: a load on any server of the OpenAI API, and what its clients saw."""

from __future__ import annotations

import json
import os
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise.cli.commands.bench.options import Table
from phasewise.loadtest.arrivals import Arrivals

if TYPE_CHECKING:
    from phasewise.loadtest.arrivals import LatencySlo, RequestPace
    from phasewise.loadtest.rate_search import RateSearch
    from phasewise.tuner.config.lengths import Trace

DEFAULT_REQUESTS, DEFAULT_CLIENTS = 100, 8
REQUESTS_OF_A_DURATION = 100_000
"""Requests to prepare for --duration, so that the duration ends the load."""
DEFAULT_INPUT, DEFAULT_OUTPUT = 128, 64
EXIT_INTERRUPTED = 130


class Endpoint(StrEnum):
    """The route that requests are sent to."""

    completions = "completions"
    chat = "chat"


_load = partial(typer.Option, rich_help_panel="When")
_work = partial(typer.Option, rich_help_panel="What")
_asked = partial(typer.Option, rich_help_panel="How it is asked")
_promises = partial(typer.Option, rich_help_panel="Promises")
_printed = partial(typer.Option, rich_help_panel="What is printed")


def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="the server, e.g. http://127.0.0.1:8000")],
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="[default: the first that is served]")
    ] = "",
    rate: Annotated[float | None, _load("--rate", min=1e-3, max=1e5, help="requests a second")] = None,
    arrivals: Annotated[
        Arrivals, _load("--arrivals", help="distribution of the intervals between requests at --rate")
    ] = Arrivals.poisson,
    burstiness: Annotated[
        float, _load("--burstiness", min=1e-3, max=1e3, help="shape of gamma arrivals; 1: Poisson")
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        _load(
            "--concurrency",
            min=1,
            max=10_000,
            help="clients that each wait for their answer; with --rate or --trace: most requests in flight",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        _load(
            "--trace",
            metavar="FILE",
            help="arrivals and lengths of an Azure, Mooncake or ShareGPT file; with --rate its lengths only",
        ),
    ] = None,
    time_scale: Annotated[
        float,
        _load(
            "--time-scale",
            min=1e-6,
            max=1e6,
            help="factor of the intervals between a trace's arrivals; 0.1: ten times as fast",
        ),
    ] = 1.0,
    duration_s: Annotated[
        float | None, _load("--duration", metavar="S", min=0.001, help="send no request after S seconds")
    ] = None,
    requests: Annotated[
        int | None,
        _work(
            "-n",
            "--requests",
            min=1,
            max=1_000_000,
            help="number of requests [default: 100, the trace's, or as many as fit into --duration]",
        ),
    ] = None,
    input_len: Annotated[
        int | None, _work("--input-len", min=1, max=1 << 20, help="tokens of a prompt [default: 128]")
    ] = None,
    output_len: Annotated[
        int | None, _work("--output-len", min=1, max=1 << 20, help="tokens of an answer [default: 64]")
    ] = None,
    lengths: Annotated[
        str | None,
        _work(
            "--lengths",
            metavar="DIST",
            help="distribution of both lengths, e.g. uniform:1-1024/16-256 or lognormal:220,1.1/160,0.8",
        ),
    ] = None,
    length_scale: Annotated[
        float, _work("--length-scale", min=1e-4, max=1e4, help="factor of all lengths")
    ] = 1.0,
    warmup: Annotated[
        int, _work("--warmup", min=0, max=10_000, help="requests sent first and not counted")
    ] = 2,
    seed: Annotated[int, _work("--seed", help="seed of the arrivals and lengths", min=0, max=1 << 62)] = 0,
    endpoint: Annotated[
        Endpoint, _asked("--endpoint", help="route that requests are sent to")
    ] = Endpoint.completions,
    ignore_eos: Annotated[bool, _asked("--ignore-eos", help="ask for answers of the full length")] = False,
    temperature: Annotated[
        float, _asked("--temperature", help="0: always choose the likeliest token", min=0, max=100)
    ] = 0.0,
    extra_body: Annotated[
        str | None,
        _asked(
            "--extra-body",
            metavar="JSON",
            help='fields added to every request body, e.g. {"cache_prompt": false}',
        ),
    ] = None,
    text_prompts: Annotated[
        bool, _asked("--text-prompts", help="send prompts as text even where the server takes token ids")
    ] = False,
    api_key: Annotated[
        str | None, _asked("--api-key", envvar=["PHASEWISE_API_KEY", "OPENAI_API_KEY"])
    ] = None,
    unix_socket: Annotated[
        Path | None, _asked("--unix-socket", metavar="PATH", help="connect through this Unix socket")
    ] = None,
    timeout_s: Annotated[
        float, _asked("--timeout", metavar="S", min=0.001, help="time limit of one request in seconds")
    ] = 600.0,
    goodput: Annotated[
        str | None,
        _promises(
            "--goodput",
            metavar="SLO",
            help="latency limits in milliseconds, e.g. ttft:2000,tpot:280 (also e2el)",
        ),
    ] = None,
    slo_scale: Annotated[
        float, _promises("--slo-scale", min=1e-3, max=1e3, help="factor of the --goodput limits")
    ] = 1.0,
    find: Annotated[
        bool,
        _promises(
            "--find-rate",
            help="find the highest rate that keeps every --goodput limit at P90, starting at --rate",
        ),
    ] = False,
    probe_s: Annotated[
        float, _promises("--probe", metavar="S", min=0.1, max=3600, help="length of one probe in seconds")
    ] = 20.0,
    most_probes: Annotated[
        int, _promises("--most-probes", help="most probes of --find-rate", min=1, max=100)
    ] = 16,
    votes: Annotated[
        int,
        _promises(
            "--votes",
            min=1,
            max=9,
            help="probes of each rate at which the search would end; the majority decides",
        ),
    ] = 3,
    output: Annotated[Table, _printed("-o", "--output", help="form of the results")] = Table.md,
    save_detailed: Annotated[
        bool, _printed("--save-detailed", help="also print every request, in csv and json")
    ] = False,
    plot: Annotated[
        Path | None,
        _printed(
            "--plot", metavar="FILE.svg", help="draw SLO attainment over the rate and over the SLO scale"
        ),
    ] = None,
) -> None:
    """Load a server of the OpenAI API and measure what its clients see: TTFT, TPOT, ITL, end to end, goodput.

    Without --rate and --trace, --concurrency clients (8) send their next
    request when they have their answer. Failed requests are counted by kind.

    Fields have the names and the meaning of vLLM's bench serve. Ctrl-C
    prints what was measured.
    """
    from phasewise.cli.present import note, write_atomically
    from phasewise.cli.render.bench_serve_progress import LoadProgress
    from phasewise.cli.render.bench_serve_text import FORMATS, draw_report
    from phasewise.loadtest.client import Target, base_of
    from phasewise.loadtest.session import LoadTest, run_load_test

    slo = _slo(goodput, slo_scale, needs_one=find or plot is not None)
    count = requests or (None if duration_s is None or trace is not None else REQUESTS_OF_A_DURATION)
    chosen = _requests(trace, lengths, (input_len, output_len), count, seed, (time_scale, length_scale))
    test = LoadTest(
        target=Target(
            base_of(url),
            model,
            endpoint is Endpoint.chat,
            api_key,
            None if unix_socket is None else str(unix_socket),
            timeout_s,
            _fields(temperature, ignore_eos, extra_body),
        ),
        requests=chosen,
        pace=_pace(chosen, rate, arrivals, burstiness, concurrency, find=find),
        seed=seed,
        n_warm_up=warmup,
        duration_s=duration_s,
        slo=slo,
        search=_search(rate, most_probes, votes) if find else None,
        probe_s=probe_s,
        may_cut_probes=plot is None,
        may_use_ids=not text_prompts,
        keeps_text=save_detailed,
    )
    if plot is not None and not (plot.parent.is_dir() and os.access(plot.parent, os.W_OK)):
        raise typer.BadParameter(f"{plot.parent} is not a folder that can be written to")
    report = run_load_test(test, note, LoadProgress)
    print(FORMATS[output.value](report, is_detailed=save_detailed), end="")
    if plot is not None and report.measured.outcomes:
        write_atomically(plot, draw_report(report))
    if report.was_stopped:
        raise typer.Exit(EXIT_INTERRUPTED)


def _slo(text: str | None, scale: float, *, needs_one: bool) -> LatencySlo | None:
    from phasewise.loadtest.arrivals import parse_slo
    from phasewise.tuner.errors import TraceError

    if text is None:
        if needs_one:
            raise typer.BadParameter(
                "--find-rate and --plot need promises: --goodput ttft:2000,tpot:280, for example"
            )
        return None
    try:
        return parse_slo(text).scaled(scale)
    except TraceError as error:
        raise typer.BadParameter(f"--goodput: {error}") from None


def _requests(
    trace: Path | None,
    lengths: str | None,
    fixed: tuple[int | None, int | None],
    count: int | None,
    seed: int,
    scales: tuple[float, float],
) -> Trace:
    """The lengths of the requests, and their arrivals where a trace has them."""
    from phasewise.loadtest.arrivals import repeated, scaled
    from phasewise.tuner.config.lengths import Request, parse_distribution
    from phasewise.tuner.config.trace import read_trace

    if sum((trace is not None, lengths is not None, fixed != (None, None))) > 1:
        raise typer.BadParameter(
            "lengths come from --trace, from --lengths or from --input-len and --output-len"
        )
    if trace is not None:
        whole = read_trace(trace)
        return scaled(repeated(whole, count or len(whole)), *scales)
    n_requests = count or DEFAULT_REQUESTS
    if lengths is not None:
        return scaled(parse_distribution(lengths, n_requests, seed), *scales)
    return scaled((Request(fixed[0] or DEFAULT_INPUT, fixed[1] or DEFAULT_OUTPUT),) * n_requests, *scales)


def _pace(
    requests: Trace,
    rate: float | None,
    arrivals: Arrivals,
    burstiness: float,
    concurrency: int | None,
    *,
    find: bool,
) -> RequestPace:
    from phasewise.loadtest.arrivals import RequestPace, instants_of

    if rate is not None or find:
        return RequestPace(rate, arrivals, burstiness, None, concurrency)
    instants_s = instants_of(requests)
    if instants_s is not None:
        return RequestPace(None, instants_s=instants_s, most_at_once=concurrency)
    return RequestPace(None, most_at_once=concurrency or DEFAULT_CLIENTS)


def _search(rate: float | None, most_probes: int, votes: int) -> RateSearch:
    from phasewise.loadtest.rate_search import RateSearch

    return RateSearch(start=rate or 1.0, most_probes=most_probes, votes=votes)


def _fields(temperature: float, ignore_eos: bool, extra_body: str | None) -> dict[str, Any]:
    fields: dict[str, Any] = {"temperature": temperature}
    if ignore_eos:
        fields["ignore_eos"] = True
    if extra_body is not None:
        try:
            more = json.loads(extra_body)
        except (ValueError, RecursionError):
            more = None
        if not isinstance(more, dict):
            raise typer.BadParameter(f"--extra-body {extra_body!r:.60} is no JSON object")
        fields |= more
    return fields

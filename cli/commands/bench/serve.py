"""`phasewise bench serve`: a load on any server of the OpenAI API, and what its clients saw."""

from __future__ import annotations

import json
import os
from enum import StrEnum
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


LOAD, WORK, ASKED, GOODPUT, OUTPUT = "When", "What", "How it is asked", "Promises", "What is printed"


def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="the server, e.g. http://127.0.0.1:8000")],
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="[default: the first that is served]")
    ] = "",
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=1e-3, max=1e5, help="requests a second", rich_help_panel=LOAD),
    ] = None,
    arrivals: Annotated[
        Arrivals, typer.Option("--arrivals", help="how --rate is kept", rich_help_panel=LOAD)
    ] = Arrivals.poisson,
    burstiness: Annotated[
        float,
        typer.Option(
            "--burstiness", min=1e-3, max=1e3, help="of gamma arrivals; 1: Poisson", rich_help_panel=LOAD
        ),
    ] = 1.0,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            min=1,
            max=10_000,
            help="clients that wait for their answers; with a rate or a trace: most requests at once",
            rich_help_panel=LOAD,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="arrivals and lengths of an Azure, Mooncake or ShareGPT file; with --rate its lengths only",
            rich_help_panel=LOAD,
        ),
    ] = None,
    time_scale: Annotated[
        float,
        typer.Option(
            "--time-scale",
            min=1e-6,
            max=1e6,
            help="of a trace's arrivals; 0.1: ten times as fast",
            rich_help_panel=LOAD,
        ),
    ] = 1.0,
    duration_s: Annotated[
        float | None,
        typer.Option(
            "--duration", metavar="S", min=0.001, help="nothing is sent after it", rich_help_panel=LOAD
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--requests",
            min=1,
            max=1_000_000,
            help="how many [default: 100, the trace's, or what --duration has time for]",
            rich_help_panel=WORK,
        ),
    ] = None,
    input_len: Annotated[
        int | None,
        typer.Option(
            "--input-len", min=1, max=1 << 20, help="tokens of a prompt [default: 128]", rich_help_panel=WORK
        ),
    ] = None,
    output_len: Annotated[
        int | None,
        typer.Option(
            "--output-len",
            min=1,
            max=1 << 20,
            help="tokens of an answer [default: 64]",
            rich_help_panel=WORK,
        ),
    ] = None,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            metavar="DIST",
            help="both, e.g. uniform:1-1024/16-256 or lognormal:220,1.1/160,0.8",
            rich_help_panel=WORK,
        ),
    ] = None,
    length_scale: Annotated[
        float,
        typer.Option("--length-scale", min=1e-4, max=1e4, help="of all lengths", rich_help_panel=WORK),
    ] = 1.0,
    warmup: Annotated[
        int,
        typer.Option(
            "--warmup", min=0, max=10_000, help="requests before, not counted", rich_help_panel=WORK
        ),
    ] = 2,
    seed: Annotated[int, typer.Option("--seed", min=0, max=1 << 62, rich_help_panel=WORK)] = 0,
    endpoint: Annotated[Endpoint, typer.Option("--endpoint", rich_help_panel=ASKED)] = Endpoint.completions,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="answers have their full length", rich_help_panel=ASKED)
    ] = False,
    temperature: Annotated[float, typer.Option("--temperature", min=0, max=100, rich_help_panel=ASKED)] = 0.0,
    extra_body: Annotated[
        str | None,
        typer.Option(
            "--extra-body",
            metavar="JSON",
            help='more fields of every body, e.g. {"cache_prompt": false}',
            rich_help_panel=ASKED,
        ),
    ] = None,
    text_prompts: Annotated[
        bool,
        typer.Option(
            "--text-prompts",
            help="words, even where the server takes token ids",
            rich_help_panel=ASKED,
        ),
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", envvar=["PHASEWISE_API_KEY", "OPENAI_API_KEY"], rich_help_panel=ASKED),
    ] = None,
    unix_socket: Annotated[
        Path | None,
        typer.Option("--unix-socket", metavar="PATH", help="connect through it", rich_help_panel=ASKED),
    ] = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", metavar="S", min=0.001, help="of one request", rich_help_panel=ASKED),
    ] = 600.0,
    goodput: Annotated[
        str | None,
        typer.Option(
            "--goodput",
            metavar="SLO",
            help="milliseconds, e.g. ttft:2000,tpot:280 (also e2el)",
            rich_help_panel=GOODPUT,
        ),
    ] = None,
    slo_scale: Annotated[
        float,
        typer.Option("--slo-scale", min=1e-3, max=1e3, help="of --goodput", rich_help_panel=GOODPUT),
    ] = 1.0,
    find: Annotated[
        bool,
        typer.Option(
            "--find-rate",
            help="the highest rate that keeps each promise at P90; --rate is where to begin",
            rich_help_panel=GOODPUT,
        ),
    ] = False,
    probe_s: Annotated[
        float,
        typer.Option(
            "--probe", metavar="S", min=0.1, max=3600, help="length of a probe", rich_help_panel=GOODPUT
        ),
    ] = 20.0,
    most_probes: Annotated[int, typer.Option("--most-probes", min=1, max=100, rich_help_panel=GOODPUT)] = 16,
    votes: Annotated[
        int,
        typer.Option(
            "--votes",
            min=1,
            max=9,
            help="probes of the rates where the search would end: the majority decides",
            rich_help_panel=GOODPUT,
        ),
    ] = 3,
    output: Annotated[Table, typer.Option("-o", "--output", rich_help_panel=OUTPUT)] = Table.md,
    save_detailed: Annotated[
        bool, typer.Option("--save-detailed", help="every request, in csv and json", rich_help_panel=OUTPUT)
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE.svg",
            help="SLO attainment over the rate and over the scale",
            rich_help_panel=OUTPUT,
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

"""`phasewise bench serve`: a load on any server of the OpenAI API, and what its clients saw."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from phasewise._words import counted
from phasewise.cli.commands.bench.options import DAILY, DAY, Table
from phasewise.cli.option_sets import opt, option_set, spread
from phasewise.cli.present import EXIT_INTERRUPTED
from phasewise.loadtest.settings import Asking, Promises, SendingTimes, SentLengths

Endpoint = Literal["completions", "chat"]
"""The route that requests are sent to."""


_printed = partial(typer.Option, rich_help_panel="What is printed")

_TIMES = option_set(
    SendingTimes,
    "When",
    rate=opt("requests a second", min=1e-3, max=1e5),
    arrivals=opt("distribution of the intervals between requests at --rate"),
    burstiness=opt("shape of gamma arrivals; 1: Poisson", min=1e-3, max=1e3),
    concurrency=opt(
        "clients that each wait for their answer; with --rate or --trace: most requests in flight",
        min=1,
        max=10_000,
    ),
    trace=opt(
        "arrivals and lengths of an Azure, Mooncake or ShareGPT file; with --rate its lengths only",
        metavar="FILE",
    ),
    time_scale=opt(
        "factor of the intervals between a trace's arrivals; 0.1: ten times as fast", min=0.0001, max=1e6
    ),
    duration_s=opt("send no request after S seconds", "--duration", metavar="S", min=0.001),
    daily=opt(DAILY, metavar="CURVE"),
    day_s=opt(DAY, "--day", metavar="S", min=1.0),
)

_LENGTHS = option_set(
    SentLengths,
    "What",
    requests=opt(
        "number of requests [default: 100, the trace's, or as many as fit into --duration]",
        "-n",
        "--requests",
        min=1,
        max=1_000_000,
    ),
    input_len=opt("tokens of a prompt [default: 128]", min=1, max=1 << 20),
    output_len=opt("tokens of an answer [default: 64]", min=1, max=1 << 20),
    lengths=opt(
        "distribution of both lengths, e.g. uniform:1-1024/16-256 or lognormal:220,1.1/160,0.8",
        metavar="DIST",
    ),
    length_scale=opt("factor of all lengths", min=1e-4, max=1e4),
    turns=opt(
        "turns of a conversation: each prompt is all that was said before, answers too, and its own words",
        min=1,
        max=1000,
    ),
    shared_prefix=opt("tokens that all conversations begin with", min=0, max=1 << 20),
    warmup=opt("requests sent first and not counted", min=0, max=10_000),
    seed=opt(
        "seed of arrivals, lengths and prompts [default: 0, and new prompts for each run]", min=0, max=1 << 62
    ),
)

_ASKING = option_set(
    Asking,
    "How it is asked",
    endpoint=opt("route that requests are sent to", kind=Endpoint),
    ignore_eos=opt("ask for answers of the full length", "--ignore-eos"),
    temperature=opt("0: always choose the likeliest token", min=0, max=100),
    extra_body=opt('fields added to every request body, e.g. {"cache_prompt": false}', metavar="JSON"),
    text_prompts=opt("send prompts as text even where the server takes token ids", "--text-prompts"),
    api_key=opt("key that requests carry", envvar=["PHASEWISE_API_KEY", "OPENAI_API_KEY"], metavar="KEY"),
    unix_socket=opt("connect through this Unix socket", metavar="PATH"),
    timeout_s=opt("time limit of one request in seconds", "--timeout", metavar="S", min=0.001),
)

_PROMISES = option_set(
    Promises,
    "Promises",
    goodput=opt("latency limits, e.g. ttft=2s,tpot=280ms (also e2e)", "--slo", "--goodput", metavar="SLO"),
    slo_scale=opt("factor of the --slo limits", min=1e-3, max=1e3),
    find_rate=opt(
        "find the highest rate that keeps every --slo limit at P90, starting at --rate", "--find-rate"
    ),
    over_offline=opt(
        "measure the rate without promises first, by --concurrency clients (64), then find the rate that "
        "keeps them, and print the second over the first",
        "--over-offline",
    ),
    probe_s=opt("length of one probe in seconds", "--probe", metavar="S", min=0.1, max=3600),
    most_probes=opt("most probes of --find-rate", min=1, max=100),
    votes=opt("probes of each rate at which the search would end; the majority decides", min=1, max=9),
)


@spread(times=_TIMES, lengths=_LENGTHS, asking=_ASKING, promises=_PROMISES)
def serve(
    url: Annotated[str, typer.Argument(metavar="URL", help="the server, e.g. http://127.0.0.1:8000")],
    times: SendingTimes,
    lengths: SentLengths,
    asking: Asking,
    promises: Promises,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="model to ask for [default: the first listed]")
    ] = "",
    output: Annotated[Table, _printed("-o", "--output", help="form of the results")] = "md",
    save_detailed: Annotated[
        bool, _printed("--save-detailed", help="also print every request, in csv and json")
    ] = False,
    plot: Annotated[
        Path | None,
        _printed(
            "--plot",
            metavar="FILE.svg",
            help="draw the distributions of latencies and, with --slo, SLO attainment over the rate and over "
            "the SLO scale; -: stdout",
        ),
    ] = None,
) -> None:
    """Load a server of the OpenAI API and measure what its clients see: TTFT, TPOT, ITL, end to end, goodput.

    $ phasewise bench serve http://127.0.0.1:8000 --concurrency 8
    $ phasewise bench serve http://127.0.0.1:8000 --find-rate --slo tpot=200ms

    Without --rate and --trace, --concurrency clients (8) send their next
    request when they have their answer. Failed requests are counted by kind;
    where all have failed, the exit code is 1.

    Fields have the names and the meaning of vLLM's bench serve. Ctrl-C
    prints what was measured.
    """
    from phasewise.cli.commands.bench.serve_progress import load_progress
    from phasewise.cli.commands.bench.serve_text import FORMATS, draw_report
    from phasewise.cli.present import check_target, fail, note, owns_stdout, say, write_target
    from phasewise.loadtest.assemble import load_test_of
    from phasewise.loadtest.session import run_load_test

    check_target(plot)
    test = load_test_of(url, model, times, lengths, asking, promises, keeps_text=save_detailed, plot=plot)
    report = run_load_test(test, note, load_progress)
    if not owns_stdout(plot):
        say(FORMATS[output](report, is_detailed=save_detailed), end="")
    if plot is not None:
        picture = draw_report(report)
        if picture is None:
            note(f"{plot} is not written: no answer is complete")
        else:
            write_target(plot, picture)
    if report.was_stopped:
        raise typer.Exit(EXIT_INTERRUPTED)
    outcomes = report.measured.outcomes
    if outcomes and not any(outcome.is_complete for outcome in outcomes):
        fail(f"none of {counted(len(outcomes), 'request')} was answered; the results say why", 1)

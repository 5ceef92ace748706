"""`phasewise bench embed`: the load generator against any server of /v1/embeddings."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phasewise._options import parse_budget
from phasewise._words import NOTHING, counted, number, percent
from phasewise.cli.options import JsonOption
from phasewise.cli.present import (
    check_target,
    fail,
    note,
    on_one_line,
    owns_stdout,
    print_json,
    say,
    say_words,
    write_target,
)
from phasewise.cli.tables import RowTable, show
from phasewise.loadtest.settings import DAILY, DAY

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from phasewise.loadtest.embed import EmbedClient
    from phasewise.loadtest.embed_day import DayPart

URLArgument = Annotated[str, typer.Argument(metavar="URL", help="the server, e.g. http://127.0.0.1:8000")]


LengthsOption = Annotated[
    str,
    typer.Option(help="words of a text: 75, 20:120 (evenly drawn) or lognormal:75:0.6 (median, sigma)"),
]
FileOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="take the texts from FILE, one a line, over and over")
]
ConcurrencyOption = Annotated[
    list[int] | None,
    typer.Option(
        "-c", min=1, help="number of clients, each with one request at a time [repeatable; default: 32]"
    ),
]
RateOption = Annotated[
    float | None,
    typer.Option(min=0.01, help="send requests at this rate instead, requests/s, at random (Poisson)"),
]
SloOption = Annotated[
    str | None, typer.Option(metavar="TIME", help="promised time of an answer, e.g. 1s or 0.5s")
]
FindOption = Annotated[
    bool,
    typer.Option(
        "--find",
        help="find the most clients at once whose answers all come within --slo (WindVE's metric)",
    ),
]
DailyOption = Annotated[str | None, typer.Option("--daily", metavar="CURVE", help=DAILY)]
DayOption = Annotated[float, typer.Option("--day", metavar="S", min=1.0, help=DAY)]
ApiKeyOption = Annotated[str | None, typer.Option(envvar="PHASEWISE_API_KEY", help="key that requests carry")]
PlotOption = Annotated[
    Path | None, typer.Option(metavar="FILE.svg", help="draw P50 and P99 over clients or the day; -: stdout")
]


def embed(
    url: URLArgument,
    model: Annotated[str | None, typer.Option(help="model to ask for [default: the first listed]")] = None,
    requests: Annotated[int, typer.Option("-n", min=1, help="number of requests")] = 256,
    inputs: Annotated[int, typer.Option(min=1, max=2048, help="texts of a request")] = 1,
    lengths: LengthsOption = "75",
    file: FileOption = None,
    concurrency: ConcurrencyOption = None,
    rate: RateOption = None,
    daily: DailyOption = None,
    day: DayOption = 240.0,
    slo: SloOption = None,
    find: FindOption = False,
    encoding: Annotated[str, typer.Option(help="form of the vectors: float or base64")] = "float",
    api_key: ApiKeyOption = None,
    seed: Annotated[int, typer.Option(help="seed of lengths, words and arrivals")] = 0,
    plot: PlotOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load an embeddings server, and print texts/s, tokens/s and latencies.

    $ phasewise bench embed http://127.0.0.1:8000 -n 64 -c 8
    $ phasewise bench embed http://127.0.0.1:8000 --find --slo 1s

    Each of -c clients waits for its answer before it sends the next request; with --rate requests are sent
    without waiting, with --daily by a day's curve. --find: the most clients that are answered within --slo.
    """
    from phasewise.loadtest.arrivals import RequestPace
    from phasewise.loadtest.client import base_of
    from phasewise.loadtest.embed import (  # fmt: skip
        EmbedTarget,
        figures,
        find_model,
        highest_concurrency,
        open_loop,
        with_client,
    )
    from phasewise.loadtest.embed_day import day_of_load
    from phasewise.tuner.config.day import day_curve

    slo_s = None if slo is None else parse_budget(slo)
    if find and slo_s is None:
        raise typer.BadParameter("--find needs --slo")
    if encoding not in ("float", "base64"):
        raise typer.BadParameter("--encoding is float or base64")
    owns_stdout(plot, as_json)
    check_target(plot)
    base = base_of(url)
    curve = None if daily is None else day_curve(daily)
    instants_s = [] if curve is None else curve.arrivals_s(day, seed)
    name = model or asyncio.run(find_model(base, api_key))
    target = EmbedTarget(base, name, api_key, encoding=encoding, inputs_each=inputs)
    texts = _texts(file, lengths, seed)

    async def run(client: EmbedClient) -> dict[str, Any]:
        await client.send(texts(1))  # connections, and what a server does at its first request
        if find and slo_s is not None:
            most = await highest_concurrency(
                client, texts, slo_s, report=lambda c, s: note(f"{c} at once: {1e3 * s:.0f} ms")
            )
            return {"slo_s": slo_s, "highest_concurrency": most, "loads": []}
        if curve is not None:
            of_the_day = texts(len(instants_s) * inputs)
            parts = await day_of_load(client, of_the_day, curve, instants_s, day, slo_s)
            return {"slo_s": slo_s, "day_s": day, "loads": [_part_fields(part) for part in parts]}
        sent_texts = texts(requests * inputs)
        if rate is not None:
            sent = await open_loop(client, sent_texts, RequestPace(rate), seed)
            return {"slo_s": slo_s, "loads": [{"rate": rate, **vars(figures(*sent, slo_s))}]}
        return {"slo_s": slo_s, "loads": await _closed(client, sent_texts, concurrency or [32], slo_s)}

    report: dict[str, Any] = {"url": base, "model": name, "lengths": lengths, "inputs": inputs}
    report |= asyncio.run(with_client(target, run))
    if plot is not None:
        write_target(plot, _drawn(report["loads"]))
    if as_json:
        print_json(report)
    elif not owns_stdout(plot):
        _say_found(report)
    _fail_unless_answered(report["loads"])


async def _closed(
    client: EmbedClient, texts: Sequence[str], concurrency: Sequence[int], slo_s: float | None
) -> list[dict[str, Any]]:
    from phasewise.loadtest.embed import closed_loop, figures

    return [
        {"concurrency": clients, **vars(figures(*await closed_loop(client, texts, clients), slo_s))}
        for clients in concurrency
    ]


def _texts(file: Path | None, lengths: str, seed: int) -> Callable[[int], list[str]]:
    """Makes so many texts: lines of the file over and over, else drawn ones."""
    from phasewise.loadtest.embed import lengths_of, texts_of_lengths
    from phasewise.workflows.embed.run import lines_of

    def texts(count: int) -> list[str]:
        if file is not None:
            lines = lines_of(file)
            return [lines[index % len(lines)] for index in range(count)]
        return texts_of_lengths(lengths_of(lengths, count, seed), seed)

    return texts


def _fail_unless_answered(loads: list[dict[str, Any]]) -> None:
    """End the process where no request of any load was; a search has no loads, and says so itself."""
    if loads and not any(load["ok"] for load in loads):
        fail(f"none of {counted(sum(load['requests'] for load in loads), 'request')} was answered", 1)


def _say_found(report: dict[str, Any]) -> None:
    if "highest_concurrency" in report:
        say(f"{counted(report['highest_concurrency'], 'query')} at once within {number(report['slo_s'])} s")
    if "day_s" in report:
        show(_day_table(report["loads"]))
        return
    for load in report["loads"]:
        say_words(_line(load))


def _part_fields(part: DayPart) -> dict[str, Any]:
    return {
        "begin_h": part.begin_h,
        "rate": part.rate,
        "cpu_share": part.cpu_share,
        **vars(part.figures),
    }


def _day_table(loads: list[dict[str, Any]]) -> RowTable:
    """A row for each part of the day; CPUs are this machine's, the load generator's work in them."""
    return RowTable(
        [
            {
                "hour": number(load["begin_h"], 4),
                "asked/s": f"{load['rate']:.3f}",
                "sent": load["requests"],
                "answered": load["ok"],
                "busy": load["busy"],
                "failed": load["failed"],
                **{
                    f"{p.upper()} ms": f"{load['latency_ms'][p]:.0f}" if load["ok"] else NOTHING
                    for p in ("p50", "p99")
                },
                "in SLO": NOTHING if load["within_slo"] is None else percent(load["within_slo"], 1),
                "CPU": NOTHING if load["cpu_share"] is None else percent(load["cpu_share"]),
            }
            for load in loads
        ]
    )


def _line(load: dict[str, Any]) -> str:
    """One load in one line."""
    how = (
        f"{number(load['rate'])} requests/s"
        if "rate" in load
        else f"{counted(load['concurrency'], 'client')}"
    )
    ms = load["latency_ms"]
    promise = "" if load["within_slo"] is None else f", {percent(load['within_slo'], 1)} within the SLO"
    counts = f"{how}: {load['ok']} answered, {load['busy']} busy, {load['failed']} failed"
    if load["first_error"] is not None:
        counts += f" ({on_one_line(load['first_error'])})"
    if not load["ok"]:
        return counts
    return (
        f"{counts}; {load['texts_per_s']:.1f} texts/s, {load['tokens_per_s']:.0f} tokens/s;"
        f" P50 {ms['p50']:.1f}, P90 {ms['p90']:.1f}, P99 {ms['p99']:.1f} ms{promise}"
    )


def _drawn(loads: list[dict[str, Any]]) -> str:
    from phasewise.workflows.line_chart import Chart, Panel, draw_chart

    if not any(load["ok"] for load in loads):
        fail("--plot: no request was answered, so that there are no latencies to draw", 1)
    is_day = "begin_h" in loads[0]
    points = [
        (
            load["begin_h"] + 1 if is_day else float(load.get("concurrency") or load["rate"]),
            load["latency_ms"],
        )
        for load in loads
        if load["ok"]
    ]
    lines = {p.upper(): sorted((across, ms[p]) for across, ms in points) for p in ("p50", "p90", "p99")}
    panel = Panel("", lines, [])
    x_name = "hour of the day, from 1 on" if is_day else "clients"
    return draw_chart(Chart("Latency of embeddings", "", x_name, "ms", "", "P99", [panel]))

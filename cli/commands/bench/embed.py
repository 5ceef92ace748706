"""`phasewise bench embed`: the load generator against any server of /v1/embeddings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import typer

from phasewise._options import REQUIRED, argument, parse_budget
from phasewise._words import counted, number, percent
from phasewise.cli.options import JsonOption
from phasewise.cli.present import fail, note, on_one_line, print_json, say, say_words
from phasewise.loadtest.settings import EmbedLoad

if TYPE_CHECKING:
    from phasewise.loadtest.client import LoadClient
    from phasewise.loadtest.embed import Texts


def embed(
    *,
    url: str = argument(REQUIRED, "the server, e.g. http://127.0.0.1:8000", "URL"),
    load: EmbedLoad,
    as_json: JsonOption = False,
) -> None:
    """Load an embeddings server, and print texts/s, tokens/s and latencies.

    $ phasewise bench embed http://127.0.0.1:8000 -n 64 -c 8
    $ phasewise bench embed http://127.0.0.1:8000 --find --slo 1s

    Each of -c clients waits for its answer before it sends the next request; with --rate requests are sent
    without waiting. --find: the most clients that are answered within --slo.
    """
    from phasewise.loadtest.client import Target, base_of, open_client
    from phasewise.loadtest.embed import find_model

    slo_s = None if load.slo is None else parse_budget(load.slo)
    if load.find and slo_s is None:
        raise typer.BadParameter("--find needs --slo")
    base = base_of(url)
    name = load.model or asyncio.run(find_model(base, load.api_key))
    target = Target(base, name, api_key=load.api_key, makes_vectors=True)
    texts = _texts(load)

    async def run() -> dict[str, Any]:
        async with open_client(target) as client:
            await client.send(target.body(texts(1), 0), 0)  # connections, and what a first request costs
            return await _measured(client, load, texts, slo_s)

    report: dict[str, Any] = {"url": base, "model": name, "lengths": load.lengths, "inputs": load.inputs}
    report |= asyncio.run(run())
    loads = report["loads"]
    if as_json:
        print_json(report)
    elif load.find:
        say(f"{counted(report['highest_concurrency'], 'query')} at once within {number(report['slo_s'])} s")
    else:
        for own in loads:
            say_words(_line(own))
    if loads and not any(own["ok"] for own in loads):
        fail(f"none of {counted(sum(own['requests'] for own in loads), 'request')} was answered", 1)


async def _measured(client: LoadClient, load: EmbedLoad, texts: Texts, slo_s: float | None) -> dict[str, Any]:
    """Measure the most clients within the SLO, the load at a rate, or one load for each number of clients."""
    from phasewise.loadtest.embed import figures, highest_concurrency, send_batches
    from phasewise.loadtest.send import RequestPace

    if load.find and slo_s is not None:
        most = await highest_concurrency(
            client, texts, slo_s, report=lambda c, s: note(f"{c} at once: {1e3 * s:.0f} ms")
        )
        return {"slo_s": slo_s, "highest_concurrency": most, "loads": []}
    whole = texts(load.requests * load.inputs)
    batches = [whole[start : start + load.inputs] for start in range(0, len(whole), load.inputs)]
    loads, rate = [], load.rate
    for value in (load.concurrency or [32]) if rate is None else [rate]:
        pace = RequestPace(rate, most_at_once=int(value) if rate is None else None)
        sent = await send_batches(client, batches, pace, load.seed)
        of_load = figures(sent, batches, slo_s)
        loads.append({"concurrency" if rate is None else "rate": value, **of_load})
    return {"slo_s": slo_s, "loads": loads}


def _texts(load: EmbedLoad) -> Texts:
    """Make a function from a count to that many texts: lines of the file, repeated, else drawn texts."""
    from phasewise.loadtest.embed import lengths_of, texts_of_lengths
    from phasewise.workflows.embed.run import lines_of

    def texts(count: int) -> list[str]:
        if load.file is not None:
            lines = lines_of(load.file)
            return [lines[index % len(lines)] for index in range(count)]
        return texts_of_lengths(lengths_of(load.lengths, count, load.seed), load.seed)

    return texts


def _line(load: dict[str, Any]) -> str:
    how = f"{number(load['rate'])} requests/s" if "rate" in load else counted(load["concurrency"], "client")
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

"""`phasewise serve`: a model behind the OpenAI API."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.cli.opening import open_model
from phasewise.cli.options import (
    DbOption,
    ExplainOption,
    FormatOption,
    ModelArgument,
    ThreadsOption,
    WeightFormat,
)
from phasewise.cli.present import note

if TYPE_CHECKING:
    from phasewise.serving.start import OpenEngine

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def parse_bytes(text: str) -> int:
    """`512M`, `1.5GiB` or `4000000`: bytes, units being powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)\s*([kmgt]?)(?:i?b)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size such as 512M or 4GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(envvar="PHASEWISE_HOST", help="address to listen on")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, envvar="PHASEWISE_PORT", help="0: any free port")
    ] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PHASEWISE_API_KEY", help="a key that requests must carry; may be given several times"
        ),
    ] = None,
    weight_format: FormatOption = WeightFormat.native,
    threads: ThreadsOption = None,
    context: Annotated[
        int | None, typer.Option(min=1, help="tokens of a prompt and its answer [default: the model's]")
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, max=512, help="answers computed at a time")] = 32,
    kv_budget: Annotated[
        str | None,
        typer.Option(
            metavar="BYTES",
            help="memory for the KV, e.g. 4G [default: a quarter of what is free, or 4 x the weights]",
        ),
    ] = None,
    max_waiting: Annotated[int, typer.Option(min=0, help="answers that may wait; beyond it, 429")] = 224,
    db: DbOption = None,
    explain: ExplainOption = False,
) -> None:
    """Serve MODEL through the OpenAI API.

    Completions and chat, /v1/models, /health, and /metrics for Prometheus.

    Ctrl-C or SIGTERM ends it: answers in progress get 5 seconds, and none
    after a second signal.
    """
    from phasewise.serving.http.served import HttpLimits
    from phasewise.serving.http.server import bind
    from phasewise.serving.service import run_service
    from phasewise.serving.start import EngineSize, keeping_affinity, open_engine

    if "" in (api_key or ()):
        raise typer.BadParameter("an API key must not be empty")
    kv_bytes = None if kv_budget is None else parse_bytes(kv_budget)
    with bind(host, port) as listener:  # before the model: a port in use is told at once
        found = open_model(model, weight_format, threads, db)
        size = EngineSize.for_many(found.model, max_sequences, context, kv_bytes)
        if explain:
            found.explain(size.max_batch_tokens, size.max_sequences)
        with keeping_affinity():
            opened = open_engine(found.model, found.plans, size, schedules=found.schedules)
        note(_describe(opened))
        limits = HttpLimits(tuple(api_key or ()), max_live_requests=max_sequences + max_waiting)
        with opened:
            run_service(opened, (opened.model.name, model), limits, listener, note)


def _describe(opened: OpenEngine) -> str:
    size = opened.size
    lines = [
        f"{opened.model.name} ({opened.model.format}): context {size.context_length} tokens",
        f"KV cache: {size.kv_slots} tokens in {opened.kv_bytes / (1 << 20):.0f} MiB",
        *(plan.describe() for plan in opened.plans.values()),
    ]
    return "\n".join(lines)

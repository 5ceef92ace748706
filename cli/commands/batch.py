"""`phasewise batch`: answers to a file of requests."""

from __future__ import annotations

import os
from pathlib import Path

import typer

from phasewise._options import REQUIRED, argument, changed, option, refuse_unused
from phasewise._words import counted, number
from phasewise.cli.options import JsonOption, OptionalModelArgument
from phasewise.cli.present import EXIT_REFUSED, note, print_json
from phasewise.cli.status_line import status_line
from phasewise.workflows.batch.server import OwnServing
from phasewise.workflows.opening.settings import ReadWeights
from phasewise.workflows.options import ModelCores


def batch(
    *,
    requests: Path = argument(REQUIRED, "requests, one a line", "IN.jsonl"),
    output: Path = option(REQUIRED, "answers, in the same order", "-o", "--output", metavar="OUT.jsonl"),
    weights: ReadWeights,
    placement: ModelCores,
    answering: OwnServing,
    model: OptionalModelArgument = None,
    url: str | None = option(None, "a server that runs, in place of MODEL", metavar="URL"),
    as_json: JsonOption = False,
) -> None:
    """Answer a file of requests in OpenAI's batch form.

    $ phasewise batch requests.jsonl -o answers.jsonl model.gguf
    $ phasewise batch requests.jsonl -o answers.jsonl --url http://127.0.0.1:8000

    Each line of IN.jsonl is {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body":
    {...}}; completions, responses and embeddings are taken too. OUT.jsonl gets a line for each, in the same
    order: the answer, or why there is none. The same command continues a batch that was stopped.

    MODEL is served for the batch alone, behind a socket of its own. For pools, clusters and the rest of
    `serve`, start a server and give its --url; its API key is PHASEWISE_API_KEY.

    The exit code is 0 if every line was answered, and 3 if some were refused.
    """
    from phasewise.workflows.batch.run import BatchResult, answer_batch
    from phasewise.workflows.batch.server import OwnServer
    from phasewise.workflows.errors import UsageError

    if model is not None and url is None:
        server: str | OwnServer = OwnServer(model, weights, placement, answering)
    elif url is not None and model is None:
        own = [*changed(weights), *changed(placement)]
        own += changed(answering, "draft", "draft_tokens", "kv_format")
        refuse_unused("with --url", own, "the server has its own; leave that out")
        server = url
    else:
        raise UsageError("give MODEL or --url, one of the two")

    def told(result: BatchResult) -> str:
        rate = result.n_answered / result.duration_s if result.duration_s else 0.0
        return f"{counted(result.n_lines, 'line')}: {result.n_refused} refused, {number(rate, 3)} answers/s"

    with status_line() as line:
        result = answer_batch(
            requests,
            output,
            server,
            key=os.environ.get("PHASEWISE_API_KEY"),
            concurrency=answering.concurrency,
            report=note,
            progress=lambda result: line.show(lambda: told(result)),
        )
    if as_json:
        print_json(result.to_json())
    else:
        earlier = f"; {counted(result.n_earlier, 'answer')} there already" if result.n_earlier else ""
        note(f"{counted(result.n_answered, 'line')} answered, {result.n_refused} refused{earlier}")
    if result.n_refused:
        raise typer.Exit(EXIT_REFUSED)

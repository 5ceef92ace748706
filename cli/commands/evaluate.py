"""`phasewise eval`: the quality of a model as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from phasewise._words import counted
from phasewise.cli.options import JsonOption, ModelArgument
from phasewise.cli.present import EXIT_INTERRUPTED, note, on_one_line
from phasewise.cli.status_line import status_line
from phasewise.cli.tables import present
from phasewise.workflows.evaluate.settings import EvalSettings
from phasewise.workflows.options import DB

if TYPE_CHECKING:
    from phasewise.workflows.evaluate.run import Evaluation

LABEL_COLUMNS = 26


def evaluate(
    model: ModelArgument, settings: EvalSettings, db: str | None = DB(None), as_json: JsonOption = False
) -> None:
    """Measure the quality of MODEL as it runs: perplexity, divergence.

    $ phasewise eval smollm2-135m-instruct --chunks 4
    $ phasewise eval model.gguf --format int8 --against f32

    Perplexity is measured as by llama-perplexity, and with --against what its
    --kl-divergence prints: divergence from a reference, how often both find
    the same next token likeliest, how probabilities differ.

    Ctrl-C prints the figures of what was done.
    """
    from phasewise.workflows.evaluate.run import evaluate as run

    with status_line() as status:
        evaluation = run(model, settings, db, status.say, lambda line: status.show(lambda: line))
    present(as_json, vars(evaluation), evaluation_lines(evaluation))
    if not evaluation.is_whole:
        note("phasewise: interrupted: the figures are those of what was done")
        raise typer.Exit(EXIT_INTERRUPTED)


def evaluation_lines(evaluation: Evaluation) -> Iterator[str]:
    """Lines of a label and a figure each."""
    about = f"{evaluation.format}, KV {evaluation.kv_format}, arithmetic {evaluation.arithmetic}"
    yield _line("model", f"{on_one_line(evaluation.model)}, {about}")
    figures = evaluation.text
    chunks = f"{counted(figures.chunks, 'chunk')} of {figures.context} tokens"
    yield _line("text", f"{on_one_line(figures.name)}, {chunks}, {figures.tokens} predicted")
    yield _line("perplexity", f"{figures.perplexity:4}")
    if figures.divergence is not None:
        yield ""
        yield _line("beside", on_one_line(figures.reference))
        for _, cells in figures.divergence.cells():
            yield from map(_line, cells, cells.values())


def _line(label: str, value: str) -> str:
    return f"{label:<{LABEL_COLUMNS}}{value}"

"""`phasewise eval`: the quality of a model as it runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from phasewise._words import counted, percent
from phasewise.cli.option_sets import spread
from phasewise.cli.options import DbOption, JsonOption, ModelArgument
from phasewise.cli.present import EXIT_INTERRUPTED, note, on_one_line, print_json, say
from phasewise.cli.status_line import status_line
from phasewise.workflows.evaluate.settings import EvalSettings

if TYPE_CHECKING:
    from phasewise.workflows.evaluate.figures import Divergence, MeanError
    from phasewise.workflows.evaluate.run import Evaluation

LABEL_COLUMNS = 26


@spread
def evaluate(
    model: ModelArgument, settings: EvalSettings, db: DbOption = None, as_json: JsonOption = False
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
    if as_json:
        print_json(vars(evaluation))
    else:
        for line in evaluation_lines(evaluation):
            say(line)
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
    yield _line("perplexity", _estimate(figures.perplexity, 4))
    if figures.divergence is not None:
        yield ""
        yield _line("beside", on_one_line(figures.reference))
        yield from _divergence_lines(figures.divergence)


def _divergence_lines(figures: Divergence) -> Iterator[str]:
    yield _line("its perplexity", _estimate(figures.base_perplexity, 4))
    yield _line("ratio", _estimate(figures.ratio, 6))
    yield _line("difference", _estimate(figures.difference, 6))
    yield _line("ln of ratio", _estimate(figures.log_ratio, 6))
    yield _line("correlation of ln", percent(figures.log_correlation, 2))
    yield _line("mean KL divergence", _estimate(figures.kl, 6))
    yield _line("  largest", f"{figures.kl_max:.6f}")
    for share, value in figures.kl_percentiles.items():
        yield _line(f"  {share:.1f}%", f"{value:.6f}")
    yield _line("  least", f"{figures.kl_min:.6f}")
    yield _line("mean change of p", _estimate(figures.delta_p, 3, scale=100))
    yield _line("  largest", percent(figures.delta_p_max, 3))
    for share, value in figures.delta_p_percentiles.items():
        yield _line(f"  {share:.1f}%", percent(value, 3))
    yield _line("  least", percent(figures.delta_p_min, 3))
    yield _line("  root mean square", _estimate(figures.delta_p_rms, 3, scale=100))
    yield _line("same likeliest token", _estimate(figures.same_top, 3, scale=100))


def _estimate(estimate: MeanError, places: int, scale: int = 1) -> str:
    """Format an estimate with its error. scale: factor of the figures; 100 makes per cent."""
    unit = "%" if scale == 100 else ""
    return f"{scale * estimate.value:.{places}f}{unit} +/- {scale * estimate.error:.{places}f}{unit}"


def _line(label: str, value: str) -> str:
    return f"{label:<{LABEL_COLUMNS}}{value}"

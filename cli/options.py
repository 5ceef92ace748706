"""Parameters that several commands share."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Literal

import typer

from phasewise._options import Option, named


def _complete_model(incomplete: str) -> list[str]:
    from phasewise.workflows.opening.model_names import completions

    return completions(incomplete)


def complete_name(incomplete: str) -> list[str]:
    """Complete the names of models, for commands that take no path."""
    from phasewise.workflows.opening.model_names import names

    return names(incomplete)


_model = partial(
    typer.Argument,
    metavar="MODEL",
    help="a known name, a GGUF file, a Hugging Face directory, a hub name or a packed file",
    autocompletion=_complete_model,
)
ModelArgument = Annotated[str, _model()]
OptionalModelArgument = Annotated[str | None, _model(show_default=False)]
TRACE = Option(
    "requests: a trace file (Azure, Mooncake, splitwise-sim), or a distribution such as "
    "lognormal:220,1.1/160,0.8",
    is_argument=True,
    settings={"metavar": "TRACE"},
)
EXPLAIN = named("print on stderr which kernel schedule each weight uses, why, and what drafts", "--explain")
JsonOption = Annotated[bool, typer.Option("--json", help="print one JSON object instead of text")]
Form = Literal["md", "csv", "json"]
"""The form in which the rows of a benchmark are printed."""
WideOption = Annotated[bool, typer.Option("--wide", help="print all columns of the table")]
OUT = named("write there; -: stdout [default: stdout]", "-o", "--output", metavar="FILE")
SET = named("value of a parameter [default: its first one]", "--set", metavar="NAME=VALUE")

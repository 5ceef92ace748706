"""Options that several `phasewise bench` commands share."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

Form = Literal["md", "csv", "json"]
"""The form in which the rows of a benchmark are printed."""


WideOption = Annotated[bool, typer.Option("--wide", help="print all columns of the table")]

"""Options and parsers that several `phasewise bench` commands share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Table(StrEnum):
    """How the rows of a benchmark are printed."""

    md = "md"
    csv = "csv"
    json = "json"


WideOption = Annotated[bool, typer.Option("--wide", help="print all columns of the table")]


class CountsValue(tuple[int, ...]):
    """Positive whole numbers, as an option's value."""

    __slots__ = ()


def counts(text: str) -> CountsValue:
    """`128,512` as integers; `0` or an empty text is none. Raises BadParameter for anything else."""
    if text.strip() in ("", "0"):
        return CountsValue()
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not values or not all(1 <= value <= 1 << 20 for value in values):
        raise typer.BadParameter(f"{text!r} is not a list of positive whole numbers such as 128,512")
    return CountsValue(values)

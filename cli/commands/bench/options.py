"""Options and parsers that several `phasewise bench` commands share."""

from __future__ import annotations

from enum import StrEnum

import typer


class Table(StrEnum):
    """How the rows of a benchmark are printed."""

    md = "md"
    csv = "csv"
    json = "json"


def counts(text: str) -> list[int]:
    """`128,512` as integers. Raises BadParameter for anything else."""
    try:
        values = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = []
    if not all(1 <= value <= 1 << 20 for value in values) or (text.strip() and not values):
        raise typer.BadParameter(f"{text!r} is not a list of positive whole numbers such as 128,512")
    return values

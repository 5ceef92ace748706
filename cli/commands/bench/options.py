"""Options and parsers that several `phasewise bench` commands share."""

from __future__ import annotations

import re
from typing import Annotated, Literal

import typer

MOST_COUNT = 1 << 20
MOST_VALUES = 1000
"""The longest range."""


Table = Literal["md", "csv", "json"]
"""The form in which the rows of a benchmark are printed."""


WideOption = Annotated[bool, typer.Option("--wide", help="print all columns of the table")]


DAILY = (
    "send a day of requests: diurnal:MEAN,PEAK in requests/s, or a file with a rate for each part of the day"
)
DAY = "with --daily: how long the day takes, in seconds"


class CountsValue(tuple[int, ...]):
    """Positive whole numbers, as an option's value."""

    __slots__ = ()


def counts(text: str) -> CountsValue:
    """`128,512` or `1-8*2` (1,2,4,8) as integers; zeros are left out. BadParameter for anything else."""
    return CountsValue(value for value in whole_numbers(text) if value)


def whole_numbers(text: str) -> CountsValue:
    """The same, zeros kept."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    values = [value for part in parts for value in _range(part)]
    if len(values) < len(parts) or not all(value <= MOST_COUNT for value in values):
        raise typer.BadParameter(f"{text!r:.60} is not a list of whole numbers such as 128,512 or 128-512*2")
    return CountsValue(values)


def _range(part: str) -> list[int]:
    """llama-bench's `first-last`, `first-last+step` and `first-last*factor`; nothing where it is none."""
    match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9})(?:([+*])([0-9]{1,9}))?)?", part)
    if match is None:
        return []
    first, last = int(match[1]), int(match[2] or match[1])
    operation, step = match[3] or "+", int(match[4] or 1)
    grows = step > 1 and first > 0 if operation == "*" else step > 0
    values: list[int] = []
    while grows and first <= last and len(values) < MOST_VALUES:
        values.append(first)
        first = first * step if operation == "*" else first + step
    return values if first > last else []

"""Rows of results: a field carries the title and the form of its column in tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, dataclass_transform

from phasewise._words import NOTHING

COLUMN = "column"
"""The key of a `Column` in the metadata of a field."""


@dataclass(frozen=True)
class Column:
    """The column of a field.

    form: the value as `format` writes it, or what makes the cell of it. per: the title's unit in that of the
    field. of_row: makes the cell of the whole row; a mapping is several columns. is_narrow: one of those for
    80 characters.
    """

    title: str
    form: str | Callable[[Any], str] = ""
    per: float = 1
    of_row: Callable[[Any], str | Mapping[str, str]] | None = None
    is_left: bool = False
    is_narrow: bool = False

    def cells(self, row: Any, value: Any) -> Mapping[str, str]:
        """The cells of a row by their titles; `-` for a value that there is not."""
        if self.of_row is not None:
            cell = self.of_row(row)
            return {self.title: cell} if isinstance(cell, str) else cell
        if value is None:
            return {self.title: NOTHING}
        scaled = value if self.per == 1 else value / self.per
        return {self.title: self.form(scaled) if callable(self.form) else format(scaled, self.form)}


def column(
    title: str,
    form: str | Callable[[Any], str] = "",
    *,
    per: float = 1,
    of_row: Callable[[Any], str | Mapping[str, str]] | None = None,
    left: bool = False,
    narrow: bool = False,
) -> Any:
    """A field that has a column."""
    return dataclasses.field(metadata={COLUMN: Column(title, form, per, of_row, left, narrow)})


@dataclass_transform(frozen_default=True, field_specifiers=(column, dataclasses.field))
class Row:
    """The base of a frozen dataclass some of whose fields have columns."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    def cells(self) -> Iterator[tuple[Column, Mapping[str, str]]]:
        """The columns, in the order of the fields, with their cells."""
        for field in dataclasses.fields(self):
            own: Column | None = field.metadata.get(COLUMN)
            if own is not None:
                yield own, own.cells(self, getattr(self, field.name))

    def texts(self) -> dict[str, str]:
        """The cells by their titles."""
        return {title: text for _, cells in self.cells() for title, text in cells.items()}


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the quartiles, over the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle

"""Rows of results: a dataclass field carries the title and the format of its column in tables."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self, dataclass_transform

from phasewise._words import NOTHING

COLUMN = "column"
"""The key of a field's `Column` in its metadata."""


@dataclass(frozen=True)
class Column:
    """The table column of a field.

    form: format of the value for `format`, or function from the value to its cell. per: number that values
    are divided by, the title's unit in the field's unit. of_row: function from the whole row to the cell; a
    mapping makes several columns. is_narrow: True for a column of tables in 80 characters.
    """

    title: str
    form: str | Callable[[Any], str] = ""
    per: float = 1
    of_row: Callable[[Any], str | Mapping[str, str]] | None = None
    is_left: bool = False
    is_narrow: bool = False

    def cells(self, row: Any, value: Any) -> Mapping[str, str]:
        """Make the cells of a row by their titles; `-` for None."""
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
    """Make a dataclass field that has a column."""
    return dataclasses.field(metadata={COLUMN: Column(title, form, per, of_row, left, narrow)})


@dataclass_transform(frozen_default=True, field_specifiers=(column, dataclasses.field))
class Row:
    """Base of a frozen dataclass with fields that have columns."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True)(cls)

    @classmethod
    def made_of(cls, *sources: object, **own: Any) -> Self:
        """Make a row whose fields, by name, are of `own`, else of the first source that has them."""
        for name in cls.__dataclass_fields__.keys() - own.keys():
            own[name] = next(getattr(source, name) for source in sources if hasattr(source, name))
        return cls(**own)

    def cells(self) -> Iterator[tuple[Column, Mapping[str, str]]]:
        """Yield the columns, in the order of the fields, with their cells."""
        for field in dataclasses.fields(self):
            own: Column | None = field.metadata.get(COLUMN)
            if own is not None:
                yield own, own.cells(self, getattr(self, field.name))

    def texts(self) -> dict[str, str]:
        """The row's cells by their titles."""
        return {title: text for _, cells in self.cells() for title, text in cells.items()}


def spread(samples: Sequence[float]) -> float:
    """Half the distance between the samples' quartiles, over their median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle

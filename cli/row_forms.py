"""Forms that the tables of `phasewise bench` share: rows as JSON, as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from phasewise._version import SCHEMA_VERSION
from phasewise._words import LOW_LIMIT, NOTHING, percent, share_of_limit
from phasewise.cli.present import on_one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

WIDTH = 80
"""Characters of a terminal's line that tables fit into."""
_NOTHING = ("", "-", "none")
_SCALARS = frozenset({"str", "int", "float", "bool"})


def json_fields(row: DataclassInstance) -> dict[str, Any]:
    """A row's fields, led by the version of our schema."""
    return {"schema_version": SCHEMA_VERSION, **asdict(row)}


def as_json(rows: Iterable[DataclassInstance]) -> str:
    """A list of objects, each with the version of our schema."""
    return json.dumps([json_fields(row) for row in rows], indent=2) + "\n"


def scalar_names(kind: type[DataclassInstance]) -> list[str]:
    """The fields that fit into a cell, in their order. `kind`'s annotations are texts."""
    return [field.name for field in fields(kind) if field.type in _SCALARS]


def as_csv(names: Iterable[str], lines: Iterable[Iterable[object]], *, quoted: bool = False) -> str:
    """A header and the lines. quoted: every value in double quotes, the header not."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(names)
    body = csv.writer(out, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL, lineterminator="\n")
    body.writerows(lines)
    return out.getvalue()


def as_md(rows: Sequence[Mapping[str, str]], left: Sequence[str] = (), core: Sequence[str] = ()) -> str:
    """A table of rows with the same columns, those of `left` aligned to the left, the others to the right.

    core: only these columns, without those that say nothing in any row, and, from the first one on, as many
    as fit into 80 characters; empty for all.
    """
    if not rows:
        return "\n"
    names = list(rows[0])
    if core:
        said = [name for name in core if name in names and any(row[name] not in _NOTHING for row in rows)]
        names = []
        for name in said:
            if len(_markdown(rows, [*names, name], left)[0]) <= WIDTH:
                names.append(name)
    return "\n".join(_markdown(rows, names, left)) + "\n"


def _markdown(rows: Sequence[Mapping[str, str]], names: Sequence[str], left: Sequence[str]) -> list[str]:
    head, *lines = padded(names, [[row[name] for name in names] for row in rows], left)
    rule = "|".join("-" * (len(cell) + 2) for cell in head)
    return [f"| {' | '.join(head)} |", f"|{rule}|", *(f"| {' | '.join(line)} |" for line in lines)]


def as_columns(headers: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str] = ()) -> str:
    """A table set apart by spaces, without a line end behind it."""
    head, *lines = padded(headers, rows, left)
    ruled = [head, ["-" * len(cell) for cell in head], *lines]
    return "\n".join("  ".join(line).rstrip() for line in ruled)


def padded(headers: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[str]) -> list[list[str]]:
    """The headers and the rows as texts, those of a column of the same length, each on one line."""
    cells = [[on_one_line(cell) for cell in line] for line in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(headers, line, widths, strict=True)
        ]
        for line in cells
    ]


def limit_cell(share: float) -> str:
    """A share of a measured limit in a cell, `-` where the limit was measured too low."""
    told = share_of_limit(share)
    return NOTHING if told is None else percent(told)


def low_limit_lines(shares: Iterable[float]) -> list[str]:
    """The line under a table in which a share is not told."""
    return [LOW_LIMIT] if any(share_of_limit(share) is None for share in shares) else []


def written(forms: Mapping[str, Callable[..., str]], name: str, rows: Sequence[Any], *, wide: bool) -> str:
    """The rows in the form `name`; `wide` says whether a table has all of its columns."""
    return forms[name](rows, wide=wide) if name == "md" else forms[name](rows)


def spread(samples: Sequence[int]) -> float:
    """Half the distance between the quartiles, over the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle

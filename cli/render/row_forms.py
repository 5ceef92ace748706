"""What the tables of `phasewise bench` have in common: rows as JSON, as CSV and as Markdown."""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from tabulate import tabulate

from phasewise._version import SCHEMA_VERSION

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_SCALARS = frozenset({"str", "int", "float", "bool"})


def json_fields(row: DataclassInstance) -> dict[str, Any]:
    """A row's fields, led by the version of our schema."""
    return {"schema_version": SCHEMA_VERSION, **asdict(row)}


def as_json(rows: Iterable[DataclassInstance]) -> str:
    """A list of objects, each with the version of our schema."""
    return json.dumps([json_fields(row) for row in rows], indent=2) + "\n"


def scalar_names(kind: type[DataclassInstance]) -> list[str]:
    """The fields that fit into a cell, in their order. `kind`'s annotations are texts."""
    return [one.name for one in fields(kind) if one.type in _SCALARS]


def as_csv(names: Iterable[str], lines: Iterable[Iterable[object]], *, quoted: bool = False) -> str:
    """A header and the lines. quoted: every value in double quotes, the header not."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(names)
    body = csv.writer(out, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL, lineterminator="\n")
    body.writerows(lines)
    return out.getvalue()


def as_md(rows: Sequence[Mapping[str, str]], left: Sequence[str] = (), core: Sequence[str] = ()) -> str:
    """A table of rows with the same columns, those of `left` aligned to the left, the others to the right.

    core: only these columns, which fit into 80 characters; empty for all.
    """
    if core:
        rows = [{name: row[name] for name in core if name in row} for row in rows]
    return (
        tabulate(
            [list(row.values()) for row in rows],
            headers=list(rows[0]) if rows else [],
            tablefmt="github",
            colalign=["left" if name in left else "right" for name in rows[0]] if rows else None,
            disable_numparse=True,
        )
        + "\n"
    )


def written(forms: Mapping[str, Callable[..., str]], name: str, rows: Sequence[Any], *, wide: bool) -> str:
    """The rows in the form `name`; `wide` says whether a table has all of its columns."""
    return forms[name](rows, wide=wide) if name == "md" else forms[name](rows)


def spread(samples: Sequence[int]) -> float:
    """Half the distance between the quartiles, over the median."""
    if len(samples) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(samples, n=4)
    return (high - low) / 2 / middle

"""Rows as a table, JSON or CSV. On a terminal rich draws coloured tables; in a pipe tabulate writes them."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from phasewise._rows import Row
from phasewise._version import SCHEMA_VERSION
from phasewise._words import LOW_LIMIT, NO_VERDICT, NOTHING, share_of_limit
from phasewise.cli.present import has_colours, on_one_line, print_json, say

if TYPE_CHECKING:
    import rich.table
    from _typeshed import DataclassInstance

WIDTH = 80
"""Characters of a line that tables fit into on a terminal."""
_EMPTY = ("", NOTHING, "none")
_SCALARS = frozenset({"str", "int", "float", "bool"})
LIMITS = frozenset({"peak", "bandwidth", "of limit", "of limit, m=1", "most m", "of copying"})
"""Titles of columns with shares of a measured limit."""
FAR, NEAR = 0.4, 0.7
"""Shares of a limit for colours: a cell below FAR is red, from NEAR on green."""
TableForm: TypeAlias = Literal["simple", "github"]
"""The form of a table in a pipe; `github` is Markdown."""


@dataclass(frozen=True)
class RowTable:
    """Rows with the same columns. left: columns aligned to the left."""

    rows: Sequence[Mapping[str, object]]
    left: Collection[str] = ()
    title: str = ""
    form: TableForm = "simple"

    def __str__(self) -> str:
        import tabulate

        tabulate.MIN_PADDING = 0  # a column is as wide as its cells
        text = tabulate.tabulate(
            [list(map(on_one_line, row.values())) for row in self.rows],
            headers=list(map(on_one_line, self.names)),
            tablefmt=self.form,
            disable_numparse=True,
            colalign=["left" if name in self.left else "right" for name in self.names],
        )
        return f"{self.title}\n{text}" if self.title else text

    @property
    def names(self) -> list[str]:
        return list(self.rows[0]) if self.rows else []

    def drawn(self) -> rich.table.Table:
        """Make rich's table, which fits the terminal."""
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(
            title=Text(self.title) if self.title else None,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1, 0, 0),
        )
        for name in self.names:
            justify: Literal["left", "right"] = "left" if name in self.left else "right"
            table.add_column(Text(on_one_line(name)), justify=justify, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(on_one_line(cell), style_of(name, str(cell))) for name, cell in row.items()))
        return table

    def narrow(self, core: Sequence[str]) -> RowTable:
        """Keep the columns of `core` that are not empty, as many as fit into 80 characters."""
        names: list[str] = []
        for name in core:
            if any(row.get(name, "") not in _EMPTY for row in self.rows):
                tried = self._with([*names, name])
                if len(str(tried).splitlines()[-1]) > WIDTH:
                    continue
                names.append(name)
        return self._with(names)

    def _with(self, names: Sequence[str]) -> RowTable:
        rows = [{name: row[name] for name in names} for row in self.rows]
        return RowTable(rows, self.left, self.title, self.form)


def style_of(column: str, cell: str) -> str:
    """The colour of a cell: a share of a limit, a gain, a loss, or no verdict; none for all other cells."""
    if cell in (NO_VERDICT, NOTHING):
        return "dim"
    number = re.fullmatch(r"(\d+(?:\.\d+)?)(x?)(%?)", cell)
    if number is None:
        return ""
    if column in LIMITS and number[3]:
        share = float(number[1]) / 100
        return "red" if share < FAR else "green" if share >= NEAR else "yellow"
    if number[2]:
        return "green" if float(number[1]) > 1 else "red" if float(number[1]) < 1 else ""
    return ""


def show(*parts: str | RowTable) -> None:
    """Print texts and tables on stdout, one below the other."""
    draws = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    for part in parts:
        if isinstance(part, RowTable) and part.rows and draws:
            from rich.console import Console

            system: Any = "auto" if has_colours(sys.stdout) else None
            Console(color_system=system, width=shutil.get_terminal_size().columns).print(part.drawn())
        else:
            say(part)


def present(as_json: bool, fields: Mapping[str, Any], parts: Iterable[str | RowTable]) -> None:
    """Print a command's result: as one JSON object, or its texts and tables for people."""
    if as_json:
        print_json(fields)
    else:
        show(*parts)


def table_of(
    rows: Sequence[Sequence[str]],
    headers: Sequence[str],
    left: Sequence[str] = (),
    form: TableForm = "simple",
) -> RowTable:
    """Make a table of cells. left: columns aligned to the left beside the first."""
    cells = [dict(zip(headers, row, strict=True)) for row in rows]
    return RowTable(cells, [headers[0], *left], form=form)


def table_of_rows(
    rows: Sequence[Row], *, wide: bool = True, title: str = "", form: TableForm = "simple"
) -> RowTable:
    """Make the table of rows whose fields have columns. wide: False for as many as fit into 80 characters."""
    columns = {name: own for row in rows for own, cells in row.cells() for name in cells}
    left = [name for name, own in columns.items() if own.is_left]
    blank = dict.fromkeys(columns, "")
    table = RowTable([{**blank, **row.texts()} for row in rows], left, title, form)
    return table if wide else table.narrow([name for name, own in columns.items() if own.is_narrow])


def show_rows(
    form: str, rows: Sequence[DataclassInstance], tables: Iterable[str | RowTable], *, quoted: bool = False
) -> None:
    """Print the rows of a benchmark in the wanted form. tables: the form for people. quoted: put every value
    of CSV in double quotes, truth values as 0 and 1, and leave out fields that may have none."""
    if form == "json":
        say(as_json(rows), end="")
    elif form == "csv":
        names = scalar_names(type(rows[0]), *(() if quoted else ("float | None",)))
        cells = ([getattr(row, name) for name in names] for row in rows)
        lines = ([int(cell) if isinstance(cell, bool) else cell for cell in line] for line in cells)
        say(as_csv(names, lines, quoted=quoted), end="")
    else:
        show(*tables)


def as_json(rows: Iterable[DataclassInstance]) -> str:
    """Write rows as a JSON list of objects, each with the version of our schema."""
    fields = [{"schema_version": SCHEMA_VERSION, **asdict(row)} for row in rows]
    return json.dumps(fields, indent=2) + "\n"


def scalar_names(kind: type[DataclassInstance], *others: str) -> list[str]:
    """The names of the fields that fit into a CSV cell, in their order. others: annotations (texts) that fit
    beside texts, numbers and truth values."""
    return [field.name for field in fields(kind) if field.type in _SCALARS.union(others)]


def as_csv(names: Iterable[str], lines: Iterable[Iterable[object]], *, quoted: bool = False) -> str:
    """Write a header and lines as CSV. quoted: put every value, but not the header, in double quotes."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(names)
    body = csv.writer(out, quoting=csv.QUOTE_ALL if quoted else csv.QUOTE_MINIMAL, lineterminator="\n")
    body.writerows(lines)
    return out.getvalue()


def low_limit_lines(shares: Iterable[float]) -> list[str]:
    """The line that explains `-` for a share above a measured limit; none without such a share."""
    return [LOW_LIMIT] if any(share_of_limit(share) is None for share in shares) else []

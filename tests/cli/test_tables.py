"""The forms that the tables of `phasewise bench` share: nothing is lost on the way, whatever a cell holds."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise._rows import spread
from phasewise._version import SCHEMA_VERSION
from phasewise._words import LOW_LIMIT, limit_cell
from phasewise.cli import tables
from phasewise.cli.tables import RowTable, show


@dataclass(frozen=True)
class Row:
    name: str
    count: int
    share: float
    is_whole: bool
    samples: Sequence[int]


ROWS = [Row('a, "quoted" ä', 3, 0.1, True, [1, 2]), Row("", -1, 1e300, False, [])]
SCALARS = ["name", "count", "share", "is_whole"]


def test_json_gives_back_every_field_and_says_its_version() -> None:
    read = json.loads(tables.as_json(ROWS))

    assert read == [{"schema_version": SCHEMA_VERSION, **asdict(row)} for row in ROWS]


@pytest.mark.parametrize("quoted", [False, True])
def test_csv_gives_back_every_cell(quoted: bool) -> None:
    lines = [[getattr(row, name) for name in SCALARS] for row in ROWS]
    text = tables.as_csv(SCALARS, lines, quoted=quoted)

    assert list(csv.reader(io.StringIO(text))) == [SCALARS, *([str(cell) for cell in line] for line in lines)]
    body = text.partition("\n")[2]
    assert body.startswith('"a, ""quoted"" ä",' + ('"3"' if quoted else "3"))


def test_what_fits_into_a_cell_is_known_by_its_type() -> None:
    assert tables.scalar_names(Row) == SCALARS


def test_a_table_keeps_texts_as_they_are_and_aligns_by_column() -> None:
    rows = [{"name": "1e5", "size": "007"}, {"name": "longer", "size": "1.50"}]
    head, rule, *lines = str(RowTable(rows, ("name",), form="github")).splitlines()
    cells = [line.strip("|").split("|") for line in lines]

    assert [cell.strip() for cell in head.strip("|").split("|")] == ["name", "size"]
    assert set(rule) <= set("|-: ")
    assert [[cell.strip() for cell in line] for line in cells] == [list(row.values()) for row in rows]
    assert cells[0][0].startswith(" 1e5  ")
    assert cells[0][1].endswith("  007 ")


def test_no_rows_are_an_empty_table() -> None:
    assert str(RowTable([])) == ""
    assert json.loads(tables.as_json([])) == []


@given(st.integers(1, 40), st.integers(1, 12))
def test_a_narrow_table_fits_and_drops_what_says_nothing(n_chars: int, n_columns: int) -> None:
    row = {f"c{number}": "x" * n_chars for number in range(n_columns)} | {"empty": "-"}
    narrow = RowTable([row], form="github").narrow([*row, "absent"])

    assert set(narrow.names) <= set(row) - {"empty"}
    assert all(len(line) <= tables.WIDTH for line in str(narrow).splitlines())
    assert narrow.names == list(row)[: len(narrow.names)]


@pytest.mark.parametrize(
    ("variables", "is_terminal", "escapes", "is_drawn"),
    [
        ({}, False, False, False),
        ({"TERM": "xterm"}, True, True, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, True, False, True),
        ({"TERM": "dumb"}, True, False, False),
    ],
)
def test_a_terminal_gets_colours_and_a_pipe_plain_text(
    variables: dict[str, str],
    is_terminal: bool,
    escapes: bool,
    is_drawn: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in {"COLUMNS": "80", **variables}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    table = RowTable([{"what": "a\x1b[2J", "gain": "2.00x", "peak": "20%"}], ("what",))
    show("before", table)
    shown = capsys.readouterr().out

    assert ("\x1b[" in shown) == escapes
    assert "\x1b[2J" not in shown
    assert "2.00x" in shown
    assert (str(table) in shown) != is_drawn
    assert max(map(len, re.sub(r"\x1b\[[0-9;]*m", "", shown).splitlines())) <= 80


@pytest.mark.parametrize(
    ("column", "cell", "style"),
    [
        ("peak", "92%", "green"),
        ("peak", "50%", "yellow"),
        ("peak", "3%", "red"),
        ("gain", "1.20x", "green"),
        ("gain", "0.80x", "red"),
        ("gain", "no verdict", "dim"),
        ("busy", "3%", ""),
        ("m", "64", ""),
        ("n x k", "8x9", ""),
    ],
)
def test_colours_are_of_shares_of_a_limit_and_of_gains(column: str, cell: str, style: str) -> None:
    assert tables.style_of(column, cell) == style


def test_the_spread_is_relative_and_none_of_one_sample() -> None:
    samples = [100, 110, 95, 130, 101]

    assert spread([7]) == 0.0
    assert spread([50, 50, 50]) == 0.0
    assert spread([10 * sample for sample in samples]) == pytest.approx(spread(samples))
    assert spread(samples) > 0


@given(st.floats(0, 10))
def test_a_share_above_a_limit_is_told_nowhere(share: float) -> None:
    """It is told as a share, or not at all, and then a line says why."""
    cell = limit_cell(share)

    assert (cell == "-") == (tables.low_limit_lines([0.5, share]) == [LOW_LIMIT])
    assert cell == "-" or float(cell[:-1]) <= 115

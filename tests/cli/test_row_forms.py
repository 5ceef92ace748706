"""The forms that the tables of `phasewise bench` share: nothing is lost on the way, whatever a cell holds."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise._version import SCHEMA_VERSION
from phasewise._words import LOW_LIMIT
from phasewise.cli import row_forms


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
    read = json.loads(row_forms.as_json(ROWS))

    assert read == [{"schema_version": SCHEMA_VERSION, **asdict(row)} for row in ROWS]


@pytest.mark.parametrize("quoted", [False, True])
def test_csv_gives_back_every_cell(quoted: bool) -> None:
    lines = [[getattr(row, name) for name in SCALARS] for row in ROWS]
    text = row_forms.as_csv(SCALARS, lines, quoted=quoted)

    assert list(csv.reader(io.StringIO(text))) == [SCALARS, *([str(cell) for cell in line] for line in lines)]
    body = text.partition("\n")[2]
    assert body.startswith('"a, ""quoted"" ä",' + ('"3"' if quoted else "3"))


def test_what_fits_into_a_cell_is_known_by_its_type() -> None:
    assert row_forms.scalar_names(Row) == SCALARS


def test_markdown_keeps_texts_as_they_are_and_aligns_by_column() -> None:
    rows = [{"name": "1e5", "size": "007"}, {"name": "longer", "size": "1.50"}]
    head, rule, *lines = row_forms.as_md(rows, left=("name",)).splitlines()
    cells = [line.strip("|").split("|") for line in lines]

    assert [cell.strip() for cell in head.strip("|").split("|")] == ["name", "size"]
    assert set(rule) <= set("|-: ")
    assert [[cell.strip() for cell in line] for line in cells] == [list(row.values()) for row in rows]
    assert cells[0][0].startswith(" 1e5  ")
    assert cells[0][1].endswith("  007 ")


def test_no_rows_are_an_empty_table() -> None:
    assert row_forms.as_md([]) == "\n"
    assert json.loads(row_forms.as_json([])) == []


def test_the_spread_is_relative_and_none_of_one_sample() -> None:
    samples = [100, 110, 95, 130, 101]

    assert row_forms.spread([7]) == 0.0
    assert row_forms.spread([50, 50, 50]) == 0.0
    assert row_forms.spread([10 * sample for sample in samples]) == pytest.approx(row_forms.spread(samples))
    assert row_forms.spread(samples) > 0


@given(st.floats(0, 10))
def test_a_share_above_a_limit_is_told_nowhere(share: float) -> None:
    """It is told as a share, or not at all, and then a line says why."""
    cell = row_forms.limit_cell(share)

    assert (cell == "-") == (row_forms.low_limit_lines([0.5, share]) == [LOW_LIMIT])
    assert cell == "-" or float(cell[:-1]) <= 115

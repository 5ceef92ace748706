"""An export, an import and a merge hold a few rows at a time, however many there are."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phasewise.kerneldb import portable
from phasewise.kerneldb.portable import export_lines, groups_of, import_rows, read_export, rows_of
from phasewise.kerneldb.records import Measurement
from phasewise.kerneldb.store import Store, open_store
from tests.support.machines.grown_database import Fleet, fill

FLEET = Fleet(cores=6, problems=5, timings=20)
N_TIMINGS = FLEET.cores * FLEET.problems * FLEET.timings
AT_ONCE = 25


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "fleet.db") as opened:
        fill(opened, FLEET)
        gc.freeze()  # `gc.get_objects` gives what is made from now on
        yield opened


def n_alive() -> int:
    """Timings in memory."""
    return sum(isinstance(thing, Measurement) for thing in gc.get_objects())


def most_alive(lines: Iterator[Any]) -> int:
    return max(n_alive() for number, _ in enumerate(lines) if number % 7 == 0)


def test_an_export_holds_one_group_of_rows(store: Store) -> None:
    before = n_alive()
    assert most_alive(export_lines(groups_of(store))) - before <= 2 * FLEET.timings
    assert 10 * FLEET.timings < N_TIMINGS


def test_an_import_appends_before_it_reads_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "ROWS_AT_ONCE", AT_ONCE)
    file = io.BytesIO("".join(export_lines(groups_of(store))).encode())
    n_held = list[int]()

    def watched(rows: Iterator[Any], there: Store) -> Iterator[Any]:
        for number, row in enumerate(rows):
            if number % AT_ONCE == 0:
                n_held.append(number - sum(there.stats().rows[name] for name in ("measurement", "promotion")))
            yield row

    with open_store(":memory:") as there:
        taken = import_rows(there, watched(read_export(file, "x", pytest.fail), there))  # type: ignore[arg-type]
        assert taken.added == taken.read > N_TIMINGS
    assert len(n_held) > 10
    assert max(n_held) <= AT_ONCE


def test_a_merge_holds_a_few_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portable, "ROWS_AT_ONCE", AT_ONCE)
    before, most = n_alive(), 0

    def watched() -> Iterator[Any]:
        nonlocal most
        for number, row in enumerate(rows_of(store)):
            if number % AT_ONCE == 0:
                most = max(most, n_alive() - before)
            yield row

    with open_store(":memory:") as there:
        assert import_rows(there, watched()).added > N_TIMINGS
    assert most <= 2 * FLEET.timings + 2 * AT_ONCE

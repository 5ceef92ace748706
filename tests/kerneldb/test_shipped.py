"""The figures in the package: small, whole, of schedules alone, and refused where they are damaged."""

from __future__ import annotations

import gzip
from importlib.resources import files

import pytest

from phasewise.kerneldb.errors import ExportFileError
from phasewise.kerneldb.portable import export_lines, groups_of, import_rows, in_use_groups, rows_of
from phasewise.kerneldb.records import PlanRecord
from phasewise.kerneldb.shipped import FOLDER, MAX_FILE_BYTES, read_shipped, shipped_measurements
from phasewise.kerneldb.store import Store, open_store
from tests.support.machines.kerneldb_examples import (
    MACHINE,
    MEASUREMENT,
    OTHER_SCHEDULE,
    PLAN,
    PROMOTION,
    STORAGE_DUEL,
    measured,
)

MOST_BYTES = 300_000
"""The most of all figures in a wheel."""


def test_the_package_brings_figures_of_a_few_hundred_kilobytes() -> None:
    shipped = [one for one in (files("phasewise.kerneldb") / FOLDER).iterdir() if one.name.endswith(".gz")]

    assert 0 < sum(len(one.read_bytes()) for one in shipped) < MOST_BYTES
    rows = shipped_measurements()
    assert not any(row.origin.verified for row in rows)
    assert all("others" in row.sample.conditions for row in rows), "each says how busy its machine was"
    core = rows[0].origin.machine.core_sig
    assert {row.origin.machine.core_sig for row in shipped_measurements(core)} == {core}
    assert shipped_measurements("a core that nobody has") == []


@pytest.fixture
def store() -> Store:
    with open_store(":memory:") as opened:
        opened.add_measurements(
            [MEASUREMENT, measured(900), measured(100, OTHER_SCHEDULE), measured(5, kernel_abi="other")]
        )
        opened.add_promotions([PROMOTION])
        opened.add_storage_duels([STORAGE_DUEL])
        opened.add_plan(PLAN)
        yield opened  # type: ignore[misc]


def test_an_export_of_what_is_in_use_holds_its_newest_timing(store: Store) -> None:
    """It is what the package's files are made by; imported, it has the same in use."""
    lines = [*export_lines(in_use_groups(store, also=()))]
    content = gzip.compress("".join(lines).encode())

    assert [line[2:9] for line in lines[1:-1]] == ["measure", "promoti", 'sha256"']
    assert [row.sample.estimate_ns for row in read_shipped(content, "x")] == [900]
    with open_store(":memory:") as there:
        import_rows(there, (row for group in in_use_groups(store) for row in group))
        (only,) = there.promoted_measurements(MACHINE, verified=False)
        assert only.sample.estimate_ns == 900
        assert [row.plan_json for row in rows_of(there) if isinstance(row, PlanRecord)] == [PLAN.plan_json]
        assert "".join(export_lines(groups_of(there))) == "".join(export_lines(in_use_groups(store)))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is not a file that"),
        (b"\x1f\x8b\x08rubbish", "not a compressed file"),
        (gzip.compress(b"{}\n", mtime=0), "is not a file that"),
        (gzip.compress(bytes(MAX_FILE_BYTES + 1), mtime=0), "more than"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(content: bytes, reason: str) -> None:
    with pytest.raises(ExportFileError, match=reason) as refusal:
        read_shipped(content, "figures.jsonl.gz")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("cut", [10, 100, -5])
def test_a_cut_file_is_refused(store: Store, cut: int) -> None:
    content = gzip.compress("".join(export_lines(in_use_groups(store))).encode())

    with pytest.raises(ExportFileError):
        read_shipped(content[:cut], "figures.jsonl.gz")

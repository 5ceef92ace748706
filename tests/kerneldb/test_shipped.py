"""The figures in the package: small, whole, of schedules alone, and refused where they are damaged."""

from __future__ import annotations

import gzip
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from phasewise.kerneldb import shipped
from phasewise.kerneldb.errors import ExportFileError
from phasewise.kerneldb.portable import export_lines, groups_of, import_rows, in_use_groups, rows_of
from phasewise.kerneldb.records import Measurement, PlanRecord
from phasewise.kerneldb.shipped import (
    FOLDER,
    MAX_FILE_BYTES,
    read_shipped,
    shipped_kinds,
    shipped_measurements,
)
from phasewise.kerneldb.store import Store, open_store
from tests.support.machines.kerneldb_examples import (
    ELSEWHERE,
    MACHINE,
    MEASUREMENT,
    OTHER_SCHEDULE,
    PLAN,
    PROMOTION,
    STORAGE_DUEL,
    measured,
)
from tests.support.models.tiny_models import write_tiny_gguf

MOST_BYTES = 750_000
"""The most of all figures in a wheel: of three kinds of cores."""


def test_the_package_brings_figures_of_a_few_hundred_kilobytes() -> None:
    brought = [file for file in (files("phasewise.kerneldb") / FOLDER).iterdir() if file.name.endswith(".gz")]

    assert 0 < sum(len(file.read_bytes()) for file in brought) < MOST_BYTES
    rows = shipped_measurements()
    assert not any(row.origin.verified for row in rows)
    assert all("others" in row.sample.conditions for row in rows), "each says how busy its machine was"
    core = rows[0].origin.machine.core_sig
    assert {row.origin.machine.core_sig for row in shipped_measurements(core)} == {core}
    assert shipped_measurements("a core that nobody has") == []
    assert "GenuineIntel 6/207, 2 threads" in shipped_kinds()
    assert len(shipped_kinds()) == len({row.origin.machine for row in rows})


def content_of(rows: list[Measurement]) -> bytes:
    return gzip.compress("".join(export_lines([rows])).encode(), mtime=0)


NAMES = ("arm.jsonl.gz", "here.jsonl.gz")


@pytest.fixture
def two_kinds(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package that brings figures of two kinds of cores."""
    contents = dict(
        zip(NAMES, map(content_of, ([measured(7, origin=ELSEWHERE)], [MEASUREMENT])), strict=True)
    )
    monkeypatch.setattr(shipped, "shipped_names", lambda: NAMES)
    monkeypatch.setattr(shipped, "_content", contents.__getitem__)
    shipped._rows.cache_clear()
    yield
    shipped._rows.cache_clear()


@pytest.mark.usefixtures("two_kinds")
def test_rows_are_of_the_asked_kind_of_core_alone() -> None:
    assert shipped_kinds() == ("ARM 8/0xd4f, 4 threads", shipped._in_words(MACHINE))
    assert shipped_measurements("a core that nobody has") == []
    assert [row.sample for row in shipped_measurements(MACHINE.core_sig)] == [MEASUREMENT.sample]
    assert len(shipped_measurements()) == 2


def test_a_start_opens_none_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phasewise.workflows.opening.open_model import open_model

    def refused(name: str) -> bytes:
        pytest.fail(f"{name} was opened")

    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(shipped, "_content", refused)
    shipped._rows.cache_clear()
    with open_store(tmp_path / "tuned.db"):
        pass
    model = str(write_tiny_gguf(tmp_path / "tiny.gguf"))
    for db in (tmp_path / "tuned.db", tmp_path / "none.db"):
        assert open_model(model, threads=1, db=str(db)).plans


@pytest.fixture
def store() -> Store:
    with open_store(":memory:") as opened:
        opened.add(
            [MEASUREMENT, measured(900), measured(100, OTHER_SCHEDULE), measured(5, kernel_abi="other")]
        )
        opened.add([PROMOTION, STORAGE_DUEL, PLAN])
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

"""`phasewise bench`: every form of the rows says the same, and llama-bench's readers can read them."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phasewise.cli.main import app
from tests.support.tiny_models import write_tiny_gguf

SHARED = Path(
    os.environ.get("PHASEWISE_SHARED_DATA", Path(__file__).resolve().parents[3] / "shared" / "data")
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bench") / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


def bench(model: str, *arguments: str) -> str:
    result = CliRunner().invoke(
        app, ["bench", "run", model, "-p", "8", "-n", "4", "-b", "1,2", "-r", "2", *arguments]
    )
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_rows_hold_what_was_asked_and_agree_with_themselves(tiny: str) -> None:
    rows = json.loads(bench(tiny, "-o", "json"))

    asked = [(row["n_prompt"], row["n_gen"], row["n_sequences"]) for row in rows]
    assert asked == [(8, 0, 1), (0, 4, 1), (8, 0, 2), (0, 4, 2)]
    for row in rows:
        tokens = row["n_sequences"] * (row["n_prompt"] + row["n_gen"])
        assert row["schema_version"] == 1
        assert len(row["samples_ns"]) == 2
        assert row["samples_ts"] == [tokens * 1e9 / ns for ns in row["samples_ns"]]
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["peak_fraction"] == pytest.approx(row["flops_per_s"] / row["peak_flops_per_s"])


def test_keys_and_values_are_stored_as_asked(tiny: str) -> None:
    rows = json.loads(bench(tiny, "-o", "json", "--kv-format", "int8"))

    assert {(row["type_k"], row["type_v"]) for row in rows} == {("int8", "int8")}


def test_every_form_has_every_row(tiny: str) -> None:
    table = bench(tiny, "-o", "md")
    assert [name in table for name in ("pp8 ", "tg4 ", "pp8 x2", "tg4 x2")] == [True] * 4
    assert len(list(csv.DictReader(io.StringIO(bench(tiny, "-o", "csv"))))) == 4
    assert len([json.loads(line) for line in bench(tiny, "-o", "jsonl").splitlines()]) == 4


def test_sql_is_a_script_that_sqlite_runs(tiny: str) -> None:
    with sqlite3.connect(":memory:") as database:
        database.executescript(bench(tiny, "-o", "sql"))
        rows = database.execute("SELECT n_prompt, n_gen, avg_ts > 0 FROM llama_bench").fetchall()

    assert rows == [(8, 0, 1), (0, 4, 1), (8, 0, 1), (0, 4, 1)]


def test_field_names_are_llama_benchs(tiny: str) -> None:
    """In its order, before ours, so that a reader of columns by place works too."""
    listed = SHARED / "formats" / "FIELDS.json"
    if not listed.is_file():
        pytest.skip(f"the list of llama-bench's fields is not here ({listed})")
    theirs = json.loads(listed.read_text())["llama_bench"]["fields_csv_json_sql_at_050fc7f"]

    header = bench(tiny, "-o", "csv").splitlines()[0].split(",")

    assert header[: len(theirs)] == theirs


@pytest.mark.parametrize(
    "arguments", [["-p", "x"], ["-p", "0", "-n", "0"], ["-p", "99999"], ["-p", "", "-n", ""], ["-b", "-1"]]
)
def test_impossible_tests_are_wrong_usage(tiny: str, arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "run", tiny, *arguments])

    assert result.exit_code == 2


@pytest.mark.slow
def test_machine_limits_are_data_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.tuner.machine_limits.DEFAULT_READ_BYTES", 1 << 20)
    result = CliRunner().invoke(app, ["bench", "machine", "--threads", "1", "--json"])

    fields = json.loads(result.stdout)
    assert fields["schema_version"] == 1
    assert [limit["n_cores"] for limit in fields["limits"]] == [1]
    assert set(fields["limits"][0]["peak_flops"]) == {"f32", "bf16", "f16", "int8"}

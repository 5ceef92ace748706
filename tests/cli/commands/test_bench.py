"""`phasewise bench`: every form of the rows says the same, and llama-bench's readers can read them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from phasewise.tuner.machine_limits import PIECES
from phasewise.workflows.bench.model_speed import ModelRow, bench_rows
from tests.cli import command
from tests.support import SHARED
from tests.support.models.tiny_models import write_tiny_gguf


def bench(model: Path, *arguments: str) -> str:
    return invoke(model, "-p", "8", "-n", "4", "-npl", "1,2", "-r", "2", *arguments).stdout


def invoke(*arguments: object) -> command.Done:
    done = command.run("bench", "run", *arguments)
    assert done.exit_code == 0, done
    return done


def asked(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple(row[name] for name in names) for row in rows]


def test_json_rows_hold_what_was_asked_and_agree_with_themselves(tiny: Path) -> None:
    rows = json.loads(bench(tiny, "-o", "json"))

    assert asked(rows, "n_prompt", "n_gen", "n_sequences") == [(8, 0, 1), (0, 4, 1), (8, 0, 2), (0, 4, 2)]
    for row in rows:
        tokens = row["n_sequences"] * (row["n_prompt"] + row["n_gen"])
        assert row["schema_version"] == 1
        assert len(row["samples_ns"]) == 2
        assert row["samples_ts"] == [tokens * 1e9 / ns for ns in row["samples_ns"]]
        assert row["avg_ts"] == pytest.approx(sum(row["samples_ts"]) / 2)
        assert row["peak_fraction"] == pytest.approx(row["flops_per_s"] / row["peak_flops_per_s"])


def test_keys_and_values_are_stored_as_asked(tiny: Path) -> None:
    rows = json.loads(bench(tiny, "-o", "json", "--kv-format", "int8"))

    assert {(row["type_k"], row["type_v"]) for row in rows} == {("int8", "int8")}


def test_every_form_has_every_row(tiny: Path) -> None:
    table = bench(tiny, "-o", "md")
    assert [name in table for name in ("pp8 ", "tg4 ", "pp8 x2", "tg4 x2")] == [True] * 4
    assert len(list(csv.DictReader(io.StringIO(bench(tiny, "-o", "csv"))))) == 4


@pytest.mark.parametrize("n_rows", [0, 2])
def test_an_interrupt_prints_the_rows_that_are_measured(
    tiny: Path, n_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Iterator[ModelRow]:
        yield from islice(bench_rows(*arguments), n_rows)
        raise KeyboardInterrupt

    monkeypatch.setattr("phasewise.workflows.bench.model_speed.bench_rows", interrupted)
    done = command.run("bench", "run", tiny, "-p", "8", "-n", "4", "-npl", "1,2", "-r", "1", "-o", "json")

    assert done.exit_code == 130
    measured = json.loads(done.stdout) if n_rows else []
    assert asked(measured, "n_prompt", "n_gen", "n_sequences") == [(8, 0, 1), (0, 4, 1)][:n_rows]


def test_field_names_are_llama_benchs(tiny: Path) -> None:
    """In its order, before ours, so that a reader of columns by place works too."""
    listed = SHARED / "formats" / "FIELDS.json"
    if not listed.is_file():
        pytest.skip(f"the list of llama-bench's fields is not here ({listed})")
    theirs = json.loads(listed.read_text())["llama_bench"]["fields_csv_json_sql_at_050fc7f"]

    header = bench(tiny, "-o", "csv").splitlines()[0].split(",")

    assert header[: len(theirs)] == theirs


@pytest.mark.parametrize(
    "arguments",
    [
        ["-p", "x"],
        ["-p", "0", "-n", "0"],
        ["-p", "99999"],
        ["-p", "", "-n", ""],
        ["-b", "-1"],
        ["-pg", "4"],
        ["-d", "99999"],
        ["-ctk", "q5_1", "-ctv", "q5_1"],
        ["-p", "8-4"],
        ["-p", "4-8*1"],
        ["-b", "2"],
    ],
)
def test_impossible_tests_are_wrong_usage(tiny: Path, arguments: list[str]) -> None:
    assert command.run("bench", "run", tiny, *arguments).usage_error


def test_lists_may_be_given_as_ranges(tiny: Path) -> None:
    rows = json.loads(invoke("-m", tiny, "-p", "4,8-16*2", "-n", "0", "-r", "1", "-o", "json").stdout)

    assert asked(rows, "n_prompt", "n_gen") == [(4, 0), (8, 0), (16, 0)]


@pytest.mark.slow
def test_every_model_thread_format_and_batch_has_its_rows(tiny: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    write_tiny_gguf(other)
    arguments = ["-p", "4", "-n", "0", "-t", "1,2", "-ctk", "f16,q8_0", "-ctv", "f16,q8_0", "-b", "64,128"]
    rows = json.loads(invoke("-m", f"{tiny},{other}", *arguments, "-r", "1", "-o", "json").stdout)

    names = ("model_filename", "n_threads", "type_k", "n_batch")
    assert asked(rows, *names) == [
        (model, threads, kind, batch)
        for model in (str(tiny), str(other))
        for threads in (1, 2)
        for kind in ("f16", "int8")
        for batch in (64, 128)
    ]


def test_decode_at_depth_and_a_prompt_with_its_answer(tiny: Path) -> None:
    arguments = ["-p", "0", "-n", "4", "-pg", "8,4;4,2", "-d", "0,16", "-r", "2"]
    rows = json.loads(invoke(tiny, *arguments, "-o", "json").stdout)

    tests = [(0, 4), (8, 4), (4, 2)]
    assert asked(rows, "n_depth", "n_prompt", "n_gen") == [(d, p, n) for d in (0, 16) for p, n in tests]
    for row in rows:
        assert row["samples_ts"] == [(row["n_prompt"] + row["n_gen"]) * 1e9 / ns for ns in row["samples_ns"]]
    table = invoke(tiny, *arguments).stdout
    assert all(name in table for name in (" tg4 ", " pp8+tg4 ", " tg4 @ d16 ", " pp4+tg2 @ d16 "))


def test_the_rate_of_reading_kv_is_told_of_decoding_behind_a_depth_alone(tiny: Path) -> None:
    arguments = ["-p", "0", "-n", "4", "-pg", "8,4", "-d", "0,200", "-r", "3"]
    rows = json.loads(invoke(tiny, *arguments, "-o", "json").stdout)

    told = [(row["n_prompt"], row["n_depth"]) for row in rows if row["kv_bytes_per_s"]]
    assert told in ([(0, 200)], [])  # none where the deeper one was no slower
    deep = {row["n_depth"]: row for row in rows if not row["n_prompt"]}
    assert bool(told) == (median(deep[200]["samples_ns"]) > median(deep[0]["samples_ns"]))
    lone = json.loads(invoke(tiny, "-p", "0", "-n", "4", "-d", "16", "-r", "1", "-o", "json").stdout)
    assert lone[0]["kv_bytes_per_s"] == 0


def test_the_table_has_llama_benchs_columns_and_the_build(tiny: Path) -> None:
    table = invoke(tiny, "-p", "4", "-n", "0", "-r", "1").stdout.splitlines()

    columns = [name.strip() for name in table[0].strip("|").split("|")]
    assert columns[:7] == ["model", "size", "params", "backend", "threads", "test", "t/s"]
    assert [line for line in table if line.startswith("build: phasewise ")] == table[-1:]


def test_keys_and_values_of_different_formats_are_refused() -> None:
    told = command.run("bench", "run", "none.gguf", "-ctk", "q8_0").usage_error

    assert "keys and values have one format" in told


@pytest.mark.slow
def test_machine_limits_are_data_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.tuner.machine_limits.DEFAULT_READ_BYTES", 1 << 20)
    fields = command.fields_of("bench", "machine", "--threads", 1)

    assert [limit["n_cores"] for limit in fields["limits"]] == [1]
    assert [reads["piece_bytes"] for reads in fields["reads_in_pieces"]] == list(PIECES)
    assert set(fields["limits"][0]["peak_flops"]) == {"f32", "bf16", "f16", "int8"}

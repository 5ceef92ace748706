"""`phasewise bench kv`: lengths through scheduler and pools, without a model."""

from __future__ import annotations

import csv
import io
import json
import lzma
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.cli import command
from tests.support import SHARED
from tests.support.models.tiny_models import TinyShape, hf_config
from tests.support.tiers import first_is_smoke

ALPACA = SHARED / "prompts/alpaca_vicuna7b_lengths_train10k.csv"

TRACE = "lognormal:40,0.4/90,0.7"


def rows_of(*args: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = json.loads(command.text_of("bench", "kv", *args, "-o", "json"))
    return rows


def test_the_same_seed_gives_the_same_rows() -> None:
    assert rows_of(TRACE, "-n", "60", "--estimate", "error:0.3") == rows_of(
        TRACE, "-n", "60", "--estimate", "error:0.3"
    )


def test_a_trace_may_be_packed(tmp_path: Path) -> None:
    rows = [{"timestamp": 0, "input_length": 20, "output_length": 10 + index} for index in range(8)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    plain, packed = tmp_path / "trace.jsonl", tmp_path / "trace.jsonl.xz"
    plain.write_text(text)
    packed.write_bytes(lzma.compress(text.encode()))

    as_plain, as_packed = (rows_of(str(path), "--policies", "odma") for path in (plain, packed))

    assert [{**row, "trace": ""} for row in as_plain] == [{**row, "trace": ""} for row in as_packed]


def test_forms_hold_the_same_rows() -> None:
    args = [TRACE, "-n", "30", "--max-tokens", "200", "--policies", "odma,static"]
    as_csv = command.text_of("bench", "kv", *args, "-o", "csv")
    as_md = command.text_of("bench", "kv", *args)
    as_json = rows_of(*args)

    assert [row["policy"] for row in csv.DictReader(io.StringIO(as_csv))] == ["odma", "static"]
    assert [row["schema_version"] for row in as_json] == [1, 1]
    assert all(f"{row['live_reserved']:.1%}" in as_md for row in as_json)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["missing.jsonl"], ["missing.jsonl"]),
        ([TRACE, "--policies", "buddy"], ["buddy", "odma-whole"]),
        ([TRACE, "--estimate", "oracle"], ["oracle", "error:SIGMA"]),
        ([TRACE, "--max-tokens", "some"], ["some", "final:0.55"]),
        ([TRACE, "--max-tokens", "0"], ["max_tokens", "0"]),
        ([TRACE, "--estimate", "none.safetensors"], ["length log"]),
    ],
)
def test_a_mistake_is_named(args: list[str], words: list[str]) -> None:
    done = command.run("bench", "kv", *args)

    assert done.exit_code != 0
    told = " ".join(done.output.split())
    assert all(word in told for word in words), told


JUDGED = ["--column", "L_t0.0", "--slots", "4096", "-n", "400", "--policies"]


@pytest.mark.skipif(not ALPACA.exists(), reason="needs the Alpaca lengths of the reference data")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimate", "share"), first_is_smoke(product(["none", "error:0.3"], ["final", "live"]))
)
def test_odma_fills_three_quarters_where_static_fills_55_percent(share: str, estimate: str) -> None:
    """By either way of counting. No request fails, none waits for pages longer than for blocks."""
    static, paged, odma = rows_of(
        str(ALPACA), *JUDGED, "static,paged,odma", "--max-tokens", f"{share}:0.55", "--estimate", estimate
    )
    name = f"{share}_reserved"

    assert 0.55 <= static[name] < 0.58  # type: ignore[operator]
    assert odma[name] >= 0.75  # type: ignore[operator]
    assert odma["failed"] == 0
    assert odma["tokens_a_step"] >= 0.95 * paged["tokens_a_step"]  # type: ignore[operator]
    assert odma["recomputed_tokens"] < paged["recomputed_tokens"]  # type: ignore[operator]


@pytest.mark.slow
@pytest.mark.skipif(not ALPACA.exists(), reason="needs the Alpaca lengths of the reference data")
def test_odma_follows_a_drift_that_fixed_buckets_do_not() -> None:
    """Instructions, then questions with short answers: 15 points and more of the slots that are held."""
    fixed, odma = rows_of(
        str(ALPACA), "lognormal:40,0.1/60,0.6", *JUDGED, "fixed,odma", "--estimate", "error:0.3"
    )

    assert odma["live_reserved"] - fixed["live_reserved"] >= 0.15  # type: ignore[operator]
    assert odma["live_pool"] - fixed["live_pool"] >= 0.1  # type: ignore[operator]
    assert odma["failed"] == 0


@pytest.mark.slow
def test_memory_and_a_model_give_slots(tmp_path: Path) -> None:
    """A shape without weights is enough: bytes of the KV cache are those of its heads."""
    config = tmp_path / "config.json"
    shape = TinyShape(16, 256, 704, 8, 4, 32, 1000, 2048, tied=False)
    config.write_text(json.dumps(hf_config("llama", shape)))
    options = ["fixed:256/256", "-n", "100", "--model", str(tmp_path), "--memory"]

    sizes = (["64M"], ["128M"], ["64M", "--kv-format", "int4"])
    rows: list[dict[str, Any]] = [rows_of(*options, *size)[0] for size in sizes]
    assert 0 < rows[0]["n_slots"] < rows[1]["n_slots"]
    assert rows[2]["n_slots"] == pytest.approx(16 / 5 * rows[0]["n_slots"], rel=0.02)
    assert all(row["failed"] == 0 for row in rows)
    assert "--memory" in command.run("bench", "kv", *options, "1M").usage_error

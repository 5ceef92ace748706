"""`phasewise bench kv`: lengths through scheduler and pools, without a model."""

from __future__ import annotations

import csv
import io
import json
import random
from itertools import product
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phasewise.cli.main import app
from phasewise.serving.batch import Batch, KvCopy, SequenceSlice
from phasewise.tuner.errors import TraceError
from phasewise.tuner.plans import Phase
from phasewise.workflows.bench.kv.inputs import (
    estimates_for,
    limit_for,
    read_samples,
    requests_of,
    static_shares,
)
from phasewise.workflows.bench.kv.replay import KV_POLICIES, ReplayInputs, replay_of, replayed
from phasewise.workflows.bench.kv.settings import TraceSelection
from phasewise.workflows.bench.kv.step_times import speeds_of
from tests.support.tiers import first_is_smoke

ALPACA = Path(__file__).parents[3] / "shared/data/prompts/alpaca_vicuna7b_lengths_train10k.csv"

TRACE = "lognormal:40,0.4/90,0.7"


def rows_of(*args: str) -> list[dict[str, object]]:
    result = CliRunner().invoke(app, ["bench", "kv", *args, "-o", "json"])
    assert result.exit_code == 0, result.output
    found: list[dict[str, object]] = json.loads(result.stdout)
    return found


def load(*traces: str, count: int = 150, max_tokens: str = "256", estimate: str = "none") -> ReplayInputs:
    return ReplayInputs(traces, TraceSelection(count=count), max_tokens, [estimate], None)


@pytest.mark.parametrize("estimate", ["none", "exact", "constant", "error:0.5"])
def test_every_policy_serves_every_request_whole(estimate: str) -> None:
    """However wrong the estimates are; and each token is computed once, or again after a preemption."""
    replay, _ = replay_of(load(TRACE, estimate=estimate), 2048, 64, {"refresh_every": 16})
    wanted = sum(one.output_tokens for one in replay.trace)
    for row in replayed(replay, KV_POLICIES):
        assert (row.failed, row.output_tokens) == (0, wanted)
        assert (row.recomputed_tokens > 0) == (row.preemptions > 0)
        assert 0 < row.live_pool <= row.live_reserved <= 1
        assert 0 < row.final_reserved <= 1
        assert 1 <= row.mean_running <= row.peak_running <= 64


def test_speeds_make_steps_into_seconds() -> None:
    """Known sequences cost what was told, others lie between; copies and prompts cost what they hold."""
    speeds = speeds_of("4:200,prompt:1000,1:100,copy:500")

    def step_s(phase: Phase, n_slices: int, n_tokens: int = 1, copies: tuple[KvCopy, ...] = ()) -> float:
        piece = SequenceSlice((1,) * n_tokens, 0, 0, wants_logits=True)
        return speeds.step_s(Batch(phase, (piece,) * n_slices, copies=copies))

    assert step_s("decode", 1) == pytest.approx(0.01)
    assert step_s("decode", 4) == pytest.approx(0.02)
    assert step_s("decode", 2) == pytest.approx(0.01 + 0.01 / 3)
    assert step_s("decode", 8) == pytest.approx(0.04)
    assert step_s("prefill", 2, 25) == pytest.approx(0.05)
    assert step_s("decode", 1, copies=(KvCopy(0, 16, 16), KvCopy(32, 64, 34))) == pytest.approx(0.11)


def test_the_figure_by_speeds_is_tokens_over_seconds() -> None:
    """Each sequence alone, at one speed whatever is computed: that speed, less the prompts' time."""
    args = ["fixed:10/40", "-n", "6", "--max-tokens", "40", "--slots", "64", "--policies", "static"]

    (row,) = rows_of(*args, "--speeds", "prompt:100,1:100")
    (unknown,) = rows_of(*args)

    assert row["tokens_per_s"] == pytest.approx(40 / 0.49, rel=0.01)
    assert unknown["tokens_per_s"] is None


@pytest.mark.parametrize("text", ["", "1:100", "prompt:5", "prompt:5,x:3", "prompt:5,1:0", "prompt:5,0:4"])
def test_unreadable_speeds_are_refused(text: str) -> None:
    with pytest.raises(TraceError, match="prompt:900"):
        speeds_of(text)


def test_the_same_seed_gives_the_same_rows() -> None:
    assert rows_of(TRACE, "-n", "60", "--estimate", "error:0.3") == rows_of(
        TRACE, "-n", "60", "--estimate", "error:0.3"
    )


def test_static_shares_are_what_the_replay_finds() -> None:
    """Computed beforehand, to set the limit; and found again by running."""
    replay, _ = replay_of(load("uniform:30-40/1-200", max_tokens="final:0.55"), 4096, 64, {})
    row = next(replayed(replay, ["static"]))

    shares = static_shares(replay.trace, replay.max_tokens)
    assert row.final_reserved == pytest.approx(shares["final"], abs=1e-9)
    assert row.live_reserved == pytest.approx(shares["live"], abs=0.03)
    assert shares["final"] >= 0.55


def test_a_request_that_can_never_run_has_failed() -> None:
    replay, _ = replay_of(load("fixed:100/50", "fixed:1000/10", count=5), 512, 8, {})
    row = next(replayed(replay, ["static"]))

    assert row.failed == 5


def test_requests_come_by_arrival(tmp_path: Path) -> None:
    """One after the other where steps are short; all at once where they are long."""
    trace = tmp_path / "trace.jsonl"
    lines = ({"timestamp": 1000 * at, "input_length": 20, "output_length": 10} for at in range(8))
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))

    (alone,) = rows_of(str(trace), "--step-ms", "1", "--policies", "odma")
    (together,) = rows_of(str(trace), "--step-ms", "60000", "--policies", "odma")

    assert (alone["peak_running"], alone["decode_steps"]) == (1, 72)
    assert together["peak_running"] == 8


def test_halves_share_no_request(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    lengths = random.Random(1).sample(range(1, 9999), 101)
    path.write_text("id,answer\n" + "".join(f"{at},{length}\n" for at, length in enumerate(lengths)))

    halves = [
        {
            one.output_tokens
            for one in requests_of(read_samples(str(path), TraceSelection("answer", part=part)))
        }
        for part in ("first", "second")
    ]

    assert halves[0] | halves[1] == set(lengths)
    assert not halves[0] & halves[1]


def test_a_length_log_tells_its_lengths(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = {"schema_version": 1, "model": "m", "prompt_token_ids": [1, 2, 3], "output_tokens": 7}
    log.write_text(json.dumps(line) + "\n")

    (sample,) = read_samples(str(log), TraceSelection())

    assert (sample.request.prompt_tokens, sample.request.output_tokens) == (3, 7)
    assert sample.facts is not None


def test_forms_hold_the_same_rows() -> None:
    args = ["bench", "kv", TRACE, "-n", "30", "--max-tokens", "200", "--policies", "odma,static"]
    as_csv = CliRunner().invoke(app, [*args, "-o", "csv"]).stdout
    as_md = CliRunner().invoke(app, args).stdout
    as_json = rows_of(*args[2:])

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
        ([TRACE, "--page-slots", "24"], ["24", "16"]),
        ([TRACE, "--step-ms", "5"], ["--step-ms"]),
        ([TRACE, "--estimate", "none.safetensors"], ["length log"]),
    ],
)
def test_a_mistake_is_named(args: list[str], words: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "kv", *args])

    assert result.exit_code != 0
    told = " ".join((result.output + str(result.exception)).split())
    assert all(word in told for word in words), told


def test_columns_of_a_csv_file_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("id,short,long\n1,2,3\n")

    with pytest.raises(TraceError, match="id, short, long: name with --column"):
        read_samples(str(path), TraceSelection())
    with pytest.raises(TraceError, match="absent"):
        read_samples(str(tmp_path / "absent.csv"), TraceSelection("long"))


def test_a_limit_that_static_never_reaches_is_refused() -> None:
    samples = read_samples("fixed:1000/1", TraceSelection(count=5))

    assert limit_for(requests_of(samples), "final:0.5") >= 1
    with pytest.raises(TraceError, match=r"live:0\.999"):
        limit_for(requests_of(read_samples(TRACE, TraceSelection(count=50))), "live:0.999")


def test_no_estimate_of_a_predictor_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="reads prompts"):
        estimates_for(str(tmp_path / "x.safetensors"), read_samples(TRACE, TraceSelection(count=5)), 0)


JUDGED = ["--column", "L_t0.0", "--slots", "4096", "-n", "400", "--part", "second", "--policies"]


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


@pytest.mark.skipif(not ALPACA.exists(), reason="needs the Alpaca lengths of the reference data")
def test_odma_follows_a_drift_that_fixed_buckets_do_not() -> None:
    """Instructions, then questions with short answers: 15 points and more of the slots that are held."""
    fixed, odma = rows_of(
        str(ALPACA), "lognormal:40,0.1/60,0.6", *JUDGED, "fixed,odma", "--estimate", "error:0.3"
    )

    assert odma["live_reserved"] - fixed["live_reserved"] >= 0.15  # type: ignore[operator]
    assert odma["live_pool"] - fixed["live_pool"] >= 0.1  # type: ignore[operator]
    assert odma["failed"] == 0

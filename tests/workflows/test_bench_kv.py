"""Replays of KV policies: every request served whole, shares, speeds, inputs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasewise.tuner.errors import TraceError
from phasewise.workflows.bench.kv.inputs import (
    estimates_for,
    limit_for,
    read_samples,
    requests_of,
    static_shares,
)
from phasewise.workflows.bench.kv.replay import KV_POLICIES, Replay, replay_of, replay_policies, replayed
from phasewise.workflows.bench.kv.settings import ReplayWish

TRACE = "lognormal:40,0.4/90,0.7"


def load(*traces: str, **wish: object) -> Replay:
    settings = {"count": 150, "max_tokens": "256", "slots": 2048, "max_sequences": 64, **wish}
    return replay_of(traces, ReplayWish(**settings))[0]  # type: ignore[arg-type]


@pytest.mark.many
@pytest.mark.parametrize("estimate", ["none", "exact", "constant", "error:0.5"])
def test_every_policy_serves_every_request_whole(estimate: str) -> None:
    """However wrong the estimates are; and each token is computed once, or again after a preemption."""
    replay = load(TRACE, estimate=estimate)
    wanted = sum(arrival.output_tokens for arrival in replay.trace)
    for row in replayed(replay, KV_POLICIES):
        assert (row.failed, row.output_tokens) == (0, wanted)
        assert (row.recomputed_tokens > 0) == (row.preemptions > 0)
        assert 0 < row.live_pool <= row.live_reserved <= 1
        assert 0 < row.final_reserved <= 1
        assert 1 <= row.mean_running <= row.peak_running <= 64


def test_static_shares_are_what_the_replay_finds() -> None:
    """Computed beforehand, to set the limit; and found again by running."""
    replay = load("uniform:30-40/1-200", max_tokens="final:0.55", slots=4096)
    row = next(replayed(replay, ["static"]))

    shares = static_shares(replay.trace, replay.max_tokens)
    assert row.final_reserved == pytest.approx(shares["final"], abs=1e-9)
    assert row.live_reserved == pytest.approx(shares["live"], abs=0.03)
    assert shares["final"] >= 0.55


def test_a_request_that_can_never_run_has_failed() -> None:
    replay = load("fixed:100/50", "fixed:1000/10", count=5, slots=512, max_sequences=8)
    row = next(replayed(replay, ["static"]))

    assert row.failed == 5
    assert "512 tokens here (the KV cache holds no more)" in row.failed_why


def test_why_requests_failed_is_told_and_nothing_where_none_did() -> None:
    told: list[str] = []
    wish = ReplayWish(count=5, slots=512, policies="static", max_tokens="50")
    for traces in (["fixed:1000/10"], ["fixed:100/10"]):
        replay_policies(traces, wish, told.append)

    (line,) = [line for line in told if "failed" in line]
    assert line.startswith("static, -: 5 requests failed; ")
    assert "512 tokens here (the KV cache holds no more)" in line


def test_a_length_log_tells_its_lengths(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    line = {"schema_version": 1, "model": "m", "prompt_token_ids": [1, 2, 3], "output_tokens": 7}
    log.write_text(json.dumps(line) + "\n")

    (sample,) = read_samples(str(log), ReplayWish())

    assert (sample.request.prompt_tokens, sample.request.output_tokens) == (3, 7)
    assert sample.facts is not None


def test_columns_of_a_csv_file_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text("id,short,long\n1,2,3\n")

    with pytest.raises(TraceError, match="id, short, long: name with --column"):
        read_samples(str(path), ReplayWish())
    with pytest.raises(TraceError, match="no column 'shrt', only id, short, long; did you mean short"):
        read_samples(str(path), ReplayWish("shrt"))
    with pytest.raises(TraceError, match="absent"):
        read_samples(str(tmp_path / "absent.csv"), ReplayWish("long"))


def test_a_limit_that_static_never_reaches_is_refused() -> None:
    samples = read_samples("fixed:1000/1", ReplayWish(count=5))

    assert limit_for(requests_of(samples), "final:0.5") >= 1
    with pytest.raises(TraceError, match=r"live:0\.999"):
        limit_for(requests_of(read_samples(TRACE, ReplayWish(count=50))), "live:0.999")


def test_no_estimate_of_a_predictor_without_prompts(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="reads prompts"):
        estimates_for(str(tmp_path / "x.safetensors"), read_samples(TRACE, ReplayWish(count=5)), 0)

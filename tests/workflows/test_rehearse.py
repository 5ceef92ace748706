"""A rehearsal: what it reads of a log, what it proposes, and what it says of bad input."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.simulated.recorded_steps import TimedStep, steps_of
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.tuner.config.simulate import Objective
from phasewise.tuner.config.trace import read_trace
from phasewise.tuner.errors import TraceError
from phasewise.workflows.rehearse.hour import HOUR_S, Hour, busiest_part, read_hour
from phasewise.workflows.rehearse.replayed import replayed
from phasewise.workflows.rehearse.run import rehearse
from phasewise.workflows.rehearse.timed_steps import resampled, timed_steps
from phasewise.workflows.rehearse.ways import IN_USE, ServerRoom, ServerWay, Stage, best_way
from phasewise.workflows.report import silent
from tests.cli import command
from tests.support.models.tiny_models import write_tiny_gguf
from tests.support.tiers import examples

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
STEPS = [
    *(TimedStep("prefill", n, 1, 0, 0.002 * n) for n in (16, 64, 256, 512)),
    *(TimedStep("decode", 1, n, context, 0.02 + 0.001 * n) for n in (1, 4, 16) for context in (64, 512)),
]


def line(arrived_s: float | None, prompt: int = 40, output: int = 8, **more: object) -> str:
    arrived = {} if arrived_s is None else {"arrived_at_s": arrived_s, "at_s": arrived_s + 3}
    return json.dumps({"prompt_token_ids": [1] * prompt, "output_tokens": output, **arrived, **more}) + "\n"


def stage(objective: Objective) -> Stage:
    return Stage({IN_USE: steps_of(STEPS)}, ServerRoom(4096, 8), objective)


def test_a_length_log_is_a_trace_and_an_older_one_too(tmp_path: Path) -> None:
    path = tmp_path / "lengths.jsonl"
    path.write_text(line(1_700_000_000.5) + line(1_700_000_002.0, 5, 3))
    assert [(one.prompt_tokens, one.output_tokens, one.arrival_s) for one in read_trace(path)] == [
        (40, 8, 0.0),
        (5, 3, 1.5),
    ]
    path.write_text(line(None, at_s=1_700_000_003.5) + line(None, at_s=1_700_000_007.0))
    assert [one.arrival_s for one in read_trace(path)] == [0.0, 3.5]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no trace"),
        ("{\n", "row 1: not JSON"),
        (line(1.0) + line(1.0, output=8, output_tokens="x"), "row 2: an answer of a length log"),
        (line(1.0, arrived_at_s="soon"), "row 1: arrived_at_s must be Unix seconds"),
        (line(None), "states no arrivals"),
        (line(1.0, output=0), "holds no request"),
    ],
)
def test_a_bad_log_is_told_in_one_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError, match=told) as error:
        read_hour(path, silent)
    assert "\n" not in str(error.value)


def test_no_more_than_the_last_hour_counts(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("".join(line(at_s) for at_s in (0.0, 100.0, 50.0, HOUR_S + 60.0, 200.0)))
    hour = read_hour(path, silent)
    assert [one.at_s for one in hour.arrivals] == [0.0, 100.0, HOUR_S - 40.0]


@examples(30)
@given(
    gaps=st.lists(st.floats(0, 20), min_size=1, max_size=30),
    window_s=st.floats(1, 60),
    step_s=st.floats(0.1, 10),
)
def test_the_part_that_is_run_is_consecutive_and_ends_in_time(
    gaps: list[float], window_s: float, step_s: float
) -> None:
    at_s, arrivals = 0.0, []
    for index, gap in enumerate(gaps):
        at_s += gap
        arrivals.append(Arrival(index, at_s, 10 + index, 4))
    part = busiest_part(Hour(tuple(arrivals)), window_s, lambda some: some[-1].at_s + step_s * len(some))
    first = part[0].prompt_tokens - 10
    assert [one.prompt_tokens for one in part] == list(range(10 + first, 10 + first + len(part)))
    assert part[0].at_s == 0.0
    assert len(part) == 1 or part[-1].at_s + step_s * len(part) <= window_s


@pytest.mark.parametrize("kind", ["ttft", "tpot", "e2e"])
def test_nothing_worse_than_today_is_proposed(kind: str) -> None:
    draw = random.Random(3)
    arrivals = [
        Arrival(index, 0.15 * index, draw.randint(8, 300), draw.randint(2, 40)) for index in range(40)
    ]
    on = stage(Objective(kind))  # type: ignore[arg-type]
    today = ServerWay(tpot_ms=25.0)
    best, tried = best_way(on, today, arrivals, lambda: False)
    assert tried[best] == max(tried.values()) or tried[best] >= 0.99 * max(tried.values())
    assert tried[best] >= tried[today] == on.merit(today, arrivals)
    assert best_way(on, today, arrivals, lambda: True)[0] == today, "no time, no proposal"


def test_drawn_steps_are_of_the_kinds_that_were_timed() -> None:
    rows = [replace_seconds(one, factor) for one in STEPS for factor in (0.9, 1.0, 1.2)]
    drawn = resampled(rows, random.Random(0))
    assert sorted(one[:4] for one in drawn) == sorted(one[:4] for one in rows)
    assert {*drawn} <= {*rows}


def replace_seconds(one: TimedStep, factor: float) -> TimedStep:
    return one._replace(seconds=factor * one.seconds)


def test_options_are_those_that_differ() -> None:
    assert ServerWay().options(ServerWay()) == []
    changed = replace(ServerWay(), kv_policy="paged", tpot_ms=50.0)
    assert changed.options(ServerWay()) == ["--kv-policy paged", "--tpot 50"]


def test_the_engine_answers_all_that_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.open_engine import open_engine
    from phasewise.workflows.opening.open_model import open_model

    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    found = open_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")), threads=1, db=str(tmp_path / "none.db"))
    context = found.model.config.context_length
    size = EngineSize.for_many(found.model, 4, None, None)
    arrivals = [Arrival(index, 0.0, 3 + index, 2) for index in range(4)]
    with open_engine(found.model, found.plans, size) as opened:
        lives = replayed(opened, arrivals)
        steps = timed_steps(opened, 1)
    assert [life.arrival for life in lives] == arrivals
    assert all(0 <= life.first_token_s <= life.end_s for life in lives)
    assert {one.phase for one in steps} == {"prefill", "decode"}
    assert max(one.context + one.tokens for one in steps) <= context


run = partial(command.run, "tune-config")
fields_of = partial(command.fields_of, "tune-config")


def test_a_tiny_model_is_rehearsed_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    model, log = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "log.jsonl"
    log.write_text("".join(line(0.01 * at, 6, 3) for at in range(20)))
    found = fields_of(model, "--rehearse", log, "--db", tmp_path / "none.db", "--budget", "30s")
    assert found["requests"] == 20
    assert found["tried"][0] == {**found["today"], "gain": 1.0}
    if found["options"]:
        assert found["expected_gain"]["low"] > 1
        assert found["check"]["n_requests"] >= 1
    else:
        assert found["proposed"] == found["today"]
        assert found["check"] is None


@pytest.mark.parametrize(
    "given", [["--phase", "decode"], ["--lengths", "fixed:8/8"], ["--emit", "vllm"], ["--dry-run"]]
)
def test_options_of_a_search_are_refused_by_name(tmp_path: Path, given: list[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(line(1.0))
    found = run("no-model", "--rehearse", log, *given)
    assert found.exit_code == 2
    assert f"leave {given[0]} out" in found.stderr


TRACES = ("azure/AzureLLMInferenceTrace_code.csv", "splitwise/test_trace.csv")
MOONCAKE = "traces/mooncake_synthetic_trace.jsonl.xz"


@pytest.mark.slow
@pytest.mark.parametrize("name", [*TRACES, MOONCAKE])
def test_public_traces_are_rehearsed(name: str) -> None:
    path = SHARED / name
    if not path.exists():
        pytest.skip("shared/data is not here")
    hour = read_hour(path, silent)
    hour = Hour(hour.arrivals[:40]).fitted(2048)
    on = replace(stage(Objective()), room=ServerRoom(65536, 8))
    best, tried = best_way(on, ServerWay(), hour.arrivals, lambda: False)
    assert tried[best] >= tried[ServerWay()]


def test_a_rehearsal_says_what_it_left_out(tmp_path: Path) -> None:
    from phasewise.workflows.tune_config.settings import TuneConfigSettings
    from phasewise.workflows.tune_config.subject import wish_of
    from tests.support.models.tiny_models import TinyShape, hf_config

    log, folder = tmp_path / "log.jsonl", tmp_path / "llama"
    folder.mkdir()
    shape = TinyShape(2, 256, 512, 4, 2, 64, 3200, 2048, tied=False)
    (folder / "config.json").write_text(json.dumps(hf_config("llama", shape)))
    log.write_text("".join(line(0.5 * at) for at in range(12)))
    wish = wish_of(str(folder), TuneConfigSettings(evaluator="modelled"))
    from phasewise.tuner.measurement_lock import NoLock

    found = rehearse(log, wish, 1e12, NoLock(), silent)
    assert any("drafts are not rehearsed" in one for one in found.remarks)
    assert found.source == "modelled"

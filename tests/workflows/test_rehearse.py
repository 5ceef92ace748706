"""A rehearsal: what it reads of a log, what it proposes, and what it says of bad input."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.cluster.simulated.recorded_steps import TimedStep, steps_of
from phasewise.cluster.simulated.simulated_requests import Arrival
from phasewise.serving.engine.engine_host import Deliver, EngineHost
from phasewise.serving.engine.messages import Delivery
from phasewise.tuner.config.simulate import Objective
from phasewise.tuner.config.trace import read_trace
from phasewise.tuner.errors import TraceError
from phasewise.workflows.errors import UsageError
from phasewise.workflows.rehearse.check import Check, Merits
from phasewise.workflows.rehearse.engines import halves_of
from phasewise.workflows.rehearse.hour import HOUR_S, Hour, busiest_part, read_hour
from phasewise.workflows.rehearse.replayed import replayed
from phasewise.workflows.rehearse.run import (
    FIRST_CHECK_SHARE,
    Interval,
    Rehearsal,
    rehearse,
    surest,
    surviving,
    todays_way,
)
from phasewise.workflows.rehearse.timed import Timed, timed_halves
from phasewise.workflows.rehearse.timed_pools import GROUPS, LEAST_GROUPS, TimedPools
from phasewise.workflows.rehearse.timed_steps import resampled, timed_steps
from phasewise.workflows.rehearse.ways import (
    DEFAULT_PLAN,
    IN_USE,
    PoolCores,
    ServerRoom,
    ServerWay,
    Stage,
    best_way,
)
from phasewise.workflows.report import silent
from phasewise.workflows.serve.pools import SPLIT_ABOVE_TOKENS
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
    assert [
        (request.prompt_tokens, request.output_tokens, request.arrival_s) for request in read_trace(path)
    ] == [
        (40, 8, 0.0),
        (5, 3, 1.5),
    ]
    path.write_text(line(None, at_s=1_700_000_003.5) + line(None, at_s=1_700_000_007.0))
    assert [request.arrival_s for request in read_trace(path)] == [0.0, 3.5]


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
    assert [arrival.at_s for arrival in hour.arrivals] == [0.0, 100.0, HOUR_S - 40.0]


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
    assert [arrival.prompt_tokens for arrival in part] == list(range(10 + first, 10 + first + len(part)))
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
    rows = [replace_seconds(step, factor) for step in STEPS for factor in (0.9, 1.0, 1.2)]
    drawn = resampled(rows, random.Random(0))
    assert sorted(step[:4] for step in drawn) == sorted(step[:4] for step in rows)
    assert {*drawn} <= {*rows}


def replace_seconds(step: TimedStep, factor: float) -> TimedStep:
    return step._replace(seconds=factor * step.seconds)


def test_options_are_those_that_differ() -> None:
    assert ServerWay().options(ServerWay()) == []
    changed = replace(ServerWay(), kv_policy="paged", tpot_ms=50.0)
    assert changed.options(ServerWay()) == ["--kv-policy paged", "--tpot 50"]


def test_the_engine_answers_all_that_is_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from phasewise.serving.engine.engine_size import EngineSize
    from phasewise.serving.engine.engine_thread import EngineThread
    from phasewise.serving.engine.open_engine import open_engine
    from phasewise.workflows.opening.open_model import open_model

    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    loaded = open_model(str(write_tiny_gguf(tmp_path / "tiny.gguf")), threads=1, db=str(tmp_path / "none.db"))
    context = loaded.model.config.context_length
    size = EngineSize.for_many(loaded.model, 4, None, None)
    arrivals = [Arrival(index, 0.0, 3 + index, 2) for index in range(4)]
    with open_engine(loaded.model, loaded.plans, size) as opened:
        replay = replayed(partial(EngineThread, opened.engine), loaded.model.config.vocab_size, arrivals)
    lives = replay.lives
    with open_engine(loaded.model, loaded.plans, size) as opened:
        steps = timed_steps(opened, 1)
    assert [len(answer) for answer in replay.answers] == [2] * 4
    assert [life.arrival for life in lives] == arrivals
    assert all(0 <= life.first_token_s <= life.end_s for life in lives)
    assert {step.phase for step in steps} == {"prefill", "decode"}
    assert {step.tokens for step in steps if step.phase == "decode"} > {1}, "steps with drafts are timed too"
    assert max(step.context + step.tokens for step in steps) <= context


run = partial(command.run, "tune-config")
fields_of = partial(command.fields_of, "tune-config")


@pytest.mark.slow
def test_a_tiny_model_is_rehearsed_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    model, log = write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "log.jsonl"
    log.write_text("".join(line(0.01 * number, 6, 3) for number in range(20)))
    rehearsed = fields_of(model, "--rehearse", log, "--db", tmp_path / "none.db", "--budget", "30s")
    assert rehearsed["requests"] == 20
    assert rehearsed["tried"][0] == {**rehearsed["today"], "gain": 1.0}
    if rehearsed["options"]:
        assert rehearsed["expected_gain"]["low"] > 1
        assert rehearsed["check"]["n_requests"] >= 1
    else:
        assert rehearsed["proposed"] == rehearsed["today"]
        assert rehearsed["check"] is None


@pytest.mark.parametrize(
    "given", [["--phase", "decode"], ["--lengths", "fixed:8/8"], ["--emit", "vllm"], ["--dry-run"]]
)
def test_options_of_a_search_are_refused_by_name(tmp_path: Path, given: list[str]) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(line(1.0))
    done = run("no-model", "--rehearse", log, *given)
    assert f"{given[0]} has no effect with --rehearse" in done.usage_error


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


POOLED = ServerWay(pools=PoolCores("0", "1"))


def rehearsal_of(proposed: ServerWay, remarks: Sequence[str] = ()) -> Rehearsal:
    hour = Hour(())
    return Rehearsal(
        Objective(), hour, ServerWay(), proposed, 1.0, Interval(1.5, 1.2, 1.6), None, {}, "measured",
        tuple(remarks),
    )  # fmt: skip


@pytest.mark.parametrize("measured", [1.5, 1.36, 1.34, 0.8])
@pytest.mark.parametrize("proposed", [ServerWay(), ServerWay(tpot_ms=50.0), POOLED])
@pytest.mark.parametrize("instead", [ServerWay(), ServerWay(tpot_ms=50.0)])
def test_pools_whose_run_refutes_them_are_not_proposed(
    measured: float, proposed: ServerWay, instead: ServerWay
) -> None:
    checks: list[tuple[ServerWay, float]] = []

    def with_check(rehearsal: Rehearsal, share: float) -> Rehearsal:
        checks.append((rehearsal.proposed, share))
        gain = measured if rehearsal.proposed.pools else 1.5
        return replace(rehearsal, check=Check(9, 1.0, Merits(1.0, 1.0), Merits(1.5, gain)))

    end = surviving(rehearsal_of(proposed), with_check, partial(rehearsal_of, instead))

    is_refuted = proposed == POOLED and measured < 0.9 * 1.5
    assert end.proposed == (instead if is_refuted else proposed)
    assert (end.check is None) == (end.proposed == end.today)
    assert len(end.remarks) == is_refuted
    if is_refuted:
        assert f"--prompt-pool 0 --token-pool 1 gave {measured:.3f}x of today's" in end.remarks[0]
    assert checks == [
        *([(POOLED, FIRST_CHECK_SHARE)] if proposed == POOLED else []),
        *([(end.proposed, 1.0)] if end.check and end.proposed != POOLED else []),
    ]


def test_a_rehearsal_says_what_it_left_out(tmp_path: Path) -> None:
    from phasewise.workflows.tune_config.settings import TuneConfigSettings
    from phasewise.workflows.tune_config.subject import wish_of
    from tests.support.models.tiny_models import TinyShape, hf_config

    log, folder = tmp_path / "log.jsonl", tmp_path / "llama"
    folder.mkdir()
    shape = TinyShape(2, 256, 512, 4, 2, 64, 3200, 2048, tied=False)
    (folder / "config.json").write_text(json.dumps(hf_config("llama", shape)))
    log.write_text("".join(line(0.5 * number) for number in range(12)))
    wish = wish_of(str(folder), TuneConfigSettings(evaluator="modelled"))
    from phasewise.tuner.measurement_lock import NoLock

    rehearsal = rehearse(log, wish, 1e12, NoLock(), silent)
    assert any("drafts are not rehearsed" in remark for remark in rehearsal.remarks)
    assert any("pools are not rehearsed" in remark for remark in rehearsal.remarks)
    assert rehearsal.source == "modelled"


SLOTS = 4096


def timed(
    prefill_s: float = 0.002, decode_s: float = 0.02, row_s: float = 0.001, *, step_s: float = 0.0
) -> list[TimedStep]:
    """Steps of a machine: of a prompt's token, of a decode step and of each of its rows."""
    return [
        *(TimedStep("prefill", n, 1, 0, step_s + prefill_s * n) for n in (16, 64, 256, 512)),
        *(TimedStep("decode", 1, n, 64, decode_s + row_s * n) for n in (1, 4, 16, 32)),
    ]


def found_by(
    planted: Timed, arrivals: list[Arrival], today: ServerWay, kind: str = "e2e", slots: int = SLOTS
) -> tuple[ServerWay, ServerWay]:
    """The best way of a search, and the one that is proposed."""
    room, objective = ServerRoom(slots, 8), Objective(kind)  # type: ignore[arg-type]
    best, tried = best_way(planted.stage(room, objective), today, arrivals, lambda: False)
    ways = [best, *sorted((way for way in tried if way != best), key=lambda way: -tried[way])]
    stages = [planted.stage(room, objective, random.Random(seed)) for seed in range(3)]
    proposed, expected = surest(stages, today, ways, tried, arrivals, lambda: False)
    assert (proposed == today) == (expected.low <= 1.0)
    return best, proposed


def test_where_nothing_gains_nothing_is_proposed() -> None:
    """One request at a time, and prompts of one step: no setting has a part in that."""
    arrivals = [Arrival(index, 10.0 * index, 10, 4) for index in range(8)]
    assert found_by(Timed({IN_USE: timed()}), arrivals, ServerWay())[1] == ServerWay()


def test_a_kv_policy_that_lets_more_run_is_proposed() -> None:
    """Static blocks are as long as the longest request: of 4096 slots two are all that run at once."""
    arrivals = [Arrival(0, 0.0, 2000, 40), *(Arrival(index, 0.0, 20, 40) for index in range(1, 25))]
    today = ServerWay(kv_policy="static")
    proposed = found_by(Timed({IN_USE: timed()}), arrivals, today)[1]
    assert proposed.kv_policy in ("odma", "paged")


def test_a_larger_step_is_proposed_where_steps_cost_more_than_tokens() -> None:
    arrivals = [Arrival(index, 0.0, 1000, 2) for index in range(6)]
    today = ServerWay(batch_tokens=256, tpot_ms=1000.0)
    planted = Timed({IN_USE: timed(1e-6, 0.001, step_s=0.5)})
    assert found_by(planted, arrivals, today, slots=1 << 15)[1].batch_tokens > 256


def test_faster_plans_are_proposed() -> None:
    arrivals = [Arrival(index, 0.2 * index, 60, 20) for index in range(12)]
    planted = Timed({IN_USE: timed(0.004, 0.04), DEFAULT_PLAN: timed()})
    assert found_by(planted, arrivals, ServerWay())[1].plans == DEFAULT_PLAN


def looked(n_right: int, n_answer: int) -> str:
    """An answer each of whose tokens has a long match before it, with so many drafts that are right."""
    return "00" + "".join(f"w{min(n_right, n_answer - position):x}" for position in range(1, n_answer))


@pytest.mark.parametrize(
    ("n_right", "row_s", "expected"), [(15, 0.0, {15}), (2, 0.004, {2, "auto"}), (0, 0.004, {None})]
)
def test_drafts_are_as_long_as_they_are_right(n_right: int, row_s: float, expected: set[object]) -> None:
    arrivals = [Arrival(index, index, 10, 64, lookup=looked(n_right, 64)) for index in range(6)]
    planted = Timed({IN_USE: timed(row_s=row_s)})
    assert found_by(planted, arrivals, ServerWay())[1].draft_tokens in expected


def test_drafts_that_are_wrong_are_given_up() -> None:
    arrivals = [Arrival(index, index, 10, 64, lookup=looked(0, 64)) for index in range(6)]
    today = ServerWay(draft_tokens=8)
    proposed = found_by(Timed({IN_USE: timed(row_s=0.01)}), arrivals, today)[1]
    assert proposed.draft_tokens in (None, "auto")


def test_pools_are_proposed_where_halves_keep_answers_going() -> None:
    """Halves that are each as fast as the whole: a prompt then holds up no answer."""
    cores = PoolCores("0-3", "4-7")
    arrivals = [Arrival(index, 0.7 * index, 300, 60) for index in range(16)]

    def proposed(hand_over_s: float) -> ServerWay:
        halves = {cores: TimedPools(timed(), hand_over_s)}
        return found_by(Timed({IN_USE: timed()}, halves), arrivals, ServerWay(), "e2e", 1 << 14)[1]

    assert proposed(0.001).pools == cores
    assert proposed(30.0).pools is None, "hand-overs that take longer than answers pay nowhere"


def test_pools_are_timed_in_the_pools_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts on one half beside answers on the other: steps of both phases, and hand-overs."""
    from phasewise.tuner.plans import PHASES
    from phasewise.workflows.opening.open_model import open_model
    from phasewise.workflows.rehearse.engines import Engines
    from phasewise.workflows.tune_config.subject import Wish

    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs")
    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("phasewise.workflows.rehearse.timed_pools.REPEATS", 1000)  # until all run at once
    path, db = str(write_tiny_gguf(tmp_path / "tiny.gguf")), str(tmp_path / "none.db")
    engines = Engines(
        {IN_USE: open_model(path, threads=2, db=db)}, Wish(path, "native", PHASES, Objective(), 9.0, db=db)
    )

    (half,) = timed_halves(engines, ServerWay(), lambda: True).values()

    assert half.hand_over_s > 0
    assert all(step.seconds > 0 for step in half.steps)
    sequences = {step.sequences for step in half.steps if step.phase == "decode"}
    assert sequences >= {group.sequences for group in GROUPS[:LEAST_GROUPS]}
    prompts = {step.tokens for step in half.steps if step.phase == "prefill"}
    assert max(prompts) > SPLIT_ABOVE_TOKENS, "those of the prompt pool"
    assert min(prompts) <= SPLIT_ABOVE_TOKENS, "those of the token pool"
    assert steps_of(half.steps).decode_s(1, 64) > 0


def test_a_static_pool_gives_as_much_room_as_the_server_does() -> None:
    """A block as long as the context, however short the requests are: what does not fit waits."""
    arrivals = [Arrival(index, 0.0, 20, 40) for index in range(24)]
    on = stage(Objective("ttft"))
    static = ServerWay(kv_policy="static")
    long_context = replace(on, room=replace(on.room, context_tokens=2048))
    assert long_context.merit(static, arrivals) < on.merit(static, arrivals)
    assert best_way(long_context, ServerWay(), arrivals, lambda: False)[0].kv_policy != "static"


def test_halves_that_are_slow_are_not_proposed() -> None:
    cores = PoolCores("0", "1")
    arrivals = [Arrival(index, 0.7 * index, 100, 30) for index in range(12)]
    halves = {cores: TimedPools(timed(0.004, 0.04), 0.01)}
    planted = Timed({IN_USE: timed()}, halves)
    assert found_by(planted, arrivals, ServerWay(), slots=1 << 14)[1].pools is None


@examples(20)
@given(seed=st.integers(0, 1 << 30), n_tokens=st.sampled_from(["auto", 1, 3, 15]))
def test_simulated_drafts_keep_every_token(seed: int, n_tokens: int | str) -> None:
    """Every request ends, after as many tokens as it has; drafts that are never right cost no fewer steps."""
    draw = random.Random(seed)
    arrivals = []
    for index in range(8):
        n_answer = draw.randint(1, 30)
        text = "00" + "".join(
            draw.choice(["00", f"{draw.choice('29w')}{min(draw.randint(0, 15), n_answer - position):x}"])
            for position in range(1, n_answer)
        )
        arrivals.append(Arrival(index, draw.random(), draw.randint(1, 200), n_answer, lookup=text))
    on = stage(Objective())
    plain = on.lives(ServerWay(), arrivals)
    drafted = on.lives(ServerWay(draft_tokens=n_tokens), arrivals)  # type: ignore[arg-type]
    assert all(life.end_s >= life.first_token_s >= life.arrival.at_s for life in drafted)
    assert len(plain) == len(drafted) == len(arrivals)


def test_steps_with_drafts_cost_what_rows_do_and_what_was_timed_beyond() -> None:
    assert steps_of(STEPS).drafted_row_s == 0.0
    n_rows, context = 8, 64
    plain_s = steps_of(STEPS).decode_s(n_rows, n_rows * context)
    more = TimedStep("decode", 4, 2, context, plain_s + 6 * 0.5e-3)
    assert steps_of([*STEPS, more]).drafted_row_s == pytest.approx(0.5e-3)


def test_options_tell_drafts_and_pools() -> None:
    off = ServerWay()
    assert replace(off, draft_tokens="auto").options(off) == ["--draft lookup"]
    assert replace(off, draft_tokens=4).options(off) == ["--draft lookup", "--draft-tokens 4"]
    assert off.options(replace(off, draft_tokens=4)) == ["(without --draft)"]
    assert replace(off, draft_tokens="auto").options(replace(off, draft_tokens=4)) == ["--draft-tokens auto"]
    assert replace(off, pools=PoolCores("0", "1")).options(off) == ["--prompt-pool 0 --token-pool 1"]


@pytest.mark.parametrize(
    ("standing", "told"),
    [
        ({"PHASEWISE_DRAFT": "lookup"}, "does not say which drafts"),
        ({"PHASEWISE_DRAFT": "some-model"}, "only the drafts of lookup"),
        ({"PHASEWISE_PROMPT_POOL": "0"}, "prompt_pool divides today's server"),
        ({"PHASEWISE_TPOT": "soon"}, "not a number of milliseconds"),
    ],
)
def test_a_server_whose_hour_cannot_be_run_again_is_refused(
    monkeypatch: pytest.MonkeyPatch, standing: dict[str, str], told: str
) -> None:
    for name, value in standing.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=told) as error:
        todays_way(Hour((Arrival(0, 0.0, 4, 4),)))
    assert "\n" not in str(error.value)


def test_todays_drafts_are_those_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PHASEWISE_DRAFT", "lookup")
    hour = Hour((Arrival(0, 0.0, 4, 4, lookup="00000000"),))
    assert todays_way(hour).draft_tokens == "auto"
    monkeypatch.setenv("PHASEWISE_DRAFT_TOKENS", "4")
    assert todays_way(hour).draft_tokens == 4


@pytest.mark.parametrize("lookup", ["0", "zz", "0g", "05", 7, "00" * 9])
def test_a_bad_lookup_of_a_log_is_told_in_one_line(tmp_path: Path, lookup: object) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(line(1.0, lookup=lookup))
    with pytest.raises(TraceError, match="row 1: lookup") as error:
        read_hour(path, silent)
    assert "\n" not in str(error.value)


@examples(100)
@given(prompt=st.integers(1, 5000), output=st.integers(1, 5000), context=st.integers(2, 3000))
def test_a_request_that_is_cut_fits_and_keeps_its_answer(prompt: int, output: int, context: int) -> None:
    whole = Arrival(0, 0.0, prompt, output, lookup="00" * output)
    cut = Hour((whole,)).fitted(context).arrivals[0]
    assert cut.prompt_tokens + cut.output_tokens <= context
    assert 1 <= cut.prompt_tokens <= prompt
    assert min(output, context // 2) <= cut.output_tokens <= output
    assert len(cut.lookup) == 2 * cut.output_tokens
    if prompt + output <= context:
        assert cut == whole


def test_the_cores_of_one_rank_and_the_ranks_of_a_plan_are_halved() -> None:
    from phasewise.tuner.plans import RankCores, ServicePlan

    def halved(*ranks: tuple[int, ...]) -> PoolCores | None:
        cores = tuple(RankCores(rank, 0) for rank in ranks)
        return halves_of({"prefill": ServicePlan("prefill", cores, "flag")})

    assert halved((0, 1)) == PoolCores("0", "1")
    assert halved((0, 1, 2, 3), (4, 5, 6, 7)) == PoolCores("0-3", "4-7")
    assert halved((0,)) is None
    assert halved((0,), (1,), (2,)) is None


def test_drafts_of_a_log_come_again_in_the_real_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tokens; and as many drafts are right as the log says, whatever the model answers."""
    from phasewise.tuner.config.simulate import Objective as Wanted
    from phasewise.tuner.plans import PHASES
    from phasewise.workflows.opening.open_model import open_model
    from phasewise.workflows.rehearse.engines import Engines
    from phasewise.workflows.tune_config.subject import Wish

    monkeypatch.setenv("PHASEWISE_CACHE", str(tmp_path / "cache"))
    path, db = str(write_tiny_gguf(tmp_path / "tiny.gguf")), str(tmp_path / "none.db")
    opened = open_model(path, threads=1, db=db)
    engines = Engines({IN_USE: opened}, Wish(path, "native", PHASES, Wanted(), 9.0, db=db))
    arrivals = [Arrival(index, 0.0, 5, 16, lookup=looked(index, 16)) for index in range(3)]
    with engines.host(ServerWay(), arrivals) as host:
        plain = replayed(host, engines.n_vocabulary, arrivals)
    counts = []

    def host_that_counts(deliver: Deliver, on_lost: Callable[[], None]) -> EngineHost:
        def counting(delivery: Delivery) -> None:
            counts.extend(out.drafts for out in delivery.outs if getattr(out, "finish_reason", None))
            deliver(delivery)

        return host(counting, on_lost)

    with engines.host(ServerWay(draft_tokens=4), arrivals, plain.answers) as host:
        drafted = replayed(host_that_counts, engines.n_vocabulary, arrivals)
    assert drafted.answers == plain.answers
    assert sorted(count.accepted for count in counts if count is not None) == [
        accepted_of(n_right, 4, 16) for n_right in range(3)
    ]


def accepted_of(n_right: int, n_drafted: int, n_answer: int) -> int:
    """Drafts that come: after the first token, in steps of the right ones and the token behind them."""
    n_done, accepted = 1, 0
    while n_done < n_answer:
        n = min(n_right, n_drafted, n_answer - n_done - 1)
        n_done, accepted = n_done + n + 1, accepted + n
    return accepted

"""The worth of a predictor: the half that it learnt from is not served, every contestant runs, a verdict."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks.predictor_worth import (
    CONTESTANTS,
    EXACT,
    NONE,
    PREDICTED,
    WITH,
    answered,
    trace_of,
    verdict,
    worth,
)
from phasewise.tuner.predictor.log import Example, held_out, read_log
from tests.support.models.tiny_models import write_tiny_gguf

N_ANSWERS = 160


@pytest.fixture
def log(tmp_path: Path) -> Path:
    rng = random.Random(0)
    path = tmp_path / "log.jsonl"
    lines = [
        {
            "schema_version": 1,
            "model": "tiny",
            "prompt_token_ids": rng.choices(range(100, 200), k=rng.randint(4, 12)),
            "output_tokens": rng.randint(1, 40),
            "finish_reason": "stop",
        }
        for _ in range(N_ANSWERS)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return str(path)


def served_of(log: Path) -> list[Example]:
    return held_out(read_log(log).examples, 0.5, 0)[1]


def test_what_the_predictor_learnt_from_is_not_served(log: Path, model: str) -> None:
    replay = trace_of(log, model, "40", 512, 1000, 8, 0)

    wanted = [example.output_tokens for example in served_of(log)]
    assert [request.output_tokens for request in replay.trace] == wanted
    assert set(replay.estimates) == {NONE, PREDICTED, EXACT}
    exact = [estimate.output_tokens for estimate in replay.estimates[EXACT] if estimate is not None]
    assert exact == wanted
    assert all(
        estimate is not None and estimate.output_tokens > 0 for estimate in replay.estimates[PREDICTED]
    )


def test_every_contestant_serves_every_request(log: Path, model: str) -> None:
    said = list(
        worth([log], model, "native", "40", slots=256, requests=24, warm=4, max_sequences=8, rounds=1)
    )

    rows = [part for part in said if not isinstance(part, str)]
    assert [f"{row['policy']}:{row['estimate']}" for row in rows] == CONTESTANTS.split(",")
    assert {row["failed"] for row in rows} == {0}
    assert all(isinstance(row["preemptions"], int) for row in rows)
    assert [part for part in said if isinstance(part, str)][-1].startswith("the predictor gains ")


@pytest.mark.parametrize(
    ("gains", "said"),
    [([0.001, -0.2], "less than 2 % on every trace"), ([0.001, 0.03], "at least 2 % on a trace")],
)
def test_the_verdict_is_of_the_best_trace(gains: list[float], said: str) -> None:
    assert list(verdict({WITH: gains}))[-1] == f"the predictor gains {said}"
    assert list(verdict({WITH: []})) == []


def test_a_log_of_few_answers_is_one_line(log: Path, model: str) -> None:
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:30]))
    with pytest.raises(SystemExit, match="too few to learn from"):
        trace_of(log, model, "40", 512, 1000, 8, 0)


def test_answers_with_texts_become_a_log(tmp_path: Path, model: str) -> None:
    prompts, answers, log = (tmp_path / name for name in ("prompts.jsonl", "answers.jsonl", "log.jsonl"))
    prompts.write_text(json.dumps({"prompt_id": 0, "instruction": "say a"}) + "\n")
    lines = [{"prompt_id": 0, "model": name, "output": text} for name, text in (("A", "a"), ("B", "a a a"))]
    answers.write_text("".join(json.dumps(line) + "\n" for line in lines))

    list(answered(prompts, answers, "A", log, model))

    (line,) = log.read_text().splitlines()
    assert json.loads(line)["prompt"] == "say a"
    assert json.loads(line)["output_tokens"] >= 2

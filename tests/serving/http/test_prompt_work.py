"""The time until a first token: laws of its estimate, on drawn loads."""

from __future__ import annotations

import random

import pytest

from phasewise.serving.engine.messages import EngineLoad, Progress, Submit
from phasewise.serving.http.answers.prompt_work import PromptWork
from tests.support.tiers import n_examples

LOAD = EngineLoad(0, 1, 0, 100, prompt_token_ns=2e6)


def asked(name: str, n_tokens: int, model: str = "") -> Submit:
    return Submit(name, (1,) * n_tokens, model=model)


def seconds(
    work: PromptWork, n_tokens: int, client: str, load: EngineLoad = LOAD, wait_s: float = 0
) -> float:
    first_token_s = work.seconds_until_first_token(asked("new", n_tokens), client, load, wait_s)
    assert first_token_s is not None
    return first_token_s


def test_a_prompt_alone_takes_its_own_tokens() -> None:
    assert seconds(PromptWork(), 500, "a") == pytest.approx(1.0)


def test_nothing_is_told_before_anything_was_seen() -> None:
    work, request = PromptWork(), asked("new", 5)
    assert work.seconds_until_first_token(request, "a", None, 0) is None
    assert work.seconds_until_first_token(request, "a", LOAD._replace(prompt_token_ns=0), 0) is None


@pytest.mark.parametrize("seed", range(n_examples(40)))
def test_it_is_between_that_of_its_own_client_alone_and_that_of_all(seed: int) -> None:
    """Equal parts: another client costs at most as much as one's own prompts, and at most all it has."""
    rng = random.Random(seed)
    work, own, others = PromptWork(), 0, {"b": 0, "c": 0}
    for number in range(rng.randrange(12)):
        client, n_tokens = rng.choice("abc"), rng.randrange(1, 3000)
        work.sent(asked(str(number), n_tokens), client)
        n_done = rng.randrange(n_tokens)
        work.goes_on(Progress(str(number), n_tokens, 0, n_done, 5))
        if rng.random() < 0.3:
            work.ended(str(number))
            continue
        left = n_tokens - n_done
        own += left * (client == "a")
        others = {other: had + left * (client == other) for other, had in others.items()}
    n_new = rng.randrange(1, 2000)
    token_s = LOAD.prompt_token_ns / 1e9
    expected = n_new + own + sum(min(had, n_new + own) for had in others.values())
    assert seconds(work, n_new, "a") == pytest.approx(expected * token_s)
    assert seconds(work, n_new, "a", wait_s=1e6) == pytest.approx(1e6 + n_new * token_s)
    assert seconds(work, n_new + 1, "a") > seconds(work, n_new, "a")


def test_engines_of_other_models_take_turns() -> None:
    busy, idle = LOAD._replace(n_running=1), LOAD._replace(n_running=0)
    load = LOAD._replace(by_model={"x": idle, "y": busy, "z": idle})
    work = PromptWork()
    work.sent(asked("other", 1000, "y"), "a")
    request = asked("new", 500, "x")
    assert work.seconds_until_first_token(request, "a", load, 0) == pytest.approx(2.0)
    assert work.seconds_until_first_token(asked("new", 5, "gone"), "a", load, 0) is None

"""Scoring is generation: a prompt's log-probabilities are those of generating it, in every bit."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip(
    "phasewise.serving.engine.open_engine", reason="the kernels are not built", exc_type=ImportError
)
from phasewise.serving.drafts.opening import DraftSource
from phasewise.serving.engine.engine_size import EngineSize
from phasewise.serving.engine.live_request import PromptScores
from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.engine.open_engine import OpenEngine, open_engine
from phasewise.serving.loaders import load_model
from phasewise.serving.sampling.sampling import PromptToken, SampledToken, SamplingParams
from tests.support.servers.fake_engine import run_all
from tests.support.servers.pools import open_alone, plans_of, pools, prompt, size_of, tiny_model
from tests.support.tiers import examples, first_is_smoke

N_TOP = 3
PROMPTS = (1, 2, 15, 16, 17, 63, 64, 65, 130, 700)
FREE = SamplingParams(temperature=1.0, seed=5, top_logprobs=N_TOP)

Scores = dict[str, tuple[PromptToken, ...]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def requests() -> list[Submit]:
    return [Submit(f"p{n}", prompt(n, n), 12, FREE, ignore_eos=True) for n in PROMPTS]


def generated(opened: OpenEngine, requests: list[Submit]) -> dict[str, list[SampledToken]]:
    outs = run_all(opened.engine, *requests)
    return {
        name: [token._replace(begin=0) for out in pieces for token in _answer(out).tokens]
        for name, pieces in outs.items()
    }


def _answer(out: object) -> Answer:
    assert isinstance(out, Answer), out
    return out


def scored(opened: OpenEngine, requests: list[Submit]) -> Scores:
    outs = run_all(opened.engine, *requests)
    for name, pieces in outs.items():
        assert [_answer(out).prompt is None for out in pieces] == [False, *[True] * (len(pieces) - 1)], name
    return {name: _answer(pieces[0]).prompt or () for name, pieces in outs.items()}


def texts_of(requests: list[Submit], answers: dict[str, list[SampledToken]]) -> list[Submit]:
    """Prompt and answer together, to be scored; nothing is answered to some."""
    return [
        replace(
            request,
            prompt_token_ids=(
                *request.prompt_token_ids,
                *(token.token_id for token in answers[request.request_id]),
            ),
            max_tokens=place % 2 * 4,
            prompt_logprobs=N_TOP,
        )
        for place, request in enumerate(requests)
    ]


def is_generation(requests: list[Submit], answers: dict[str, list[SampledToken]], scores: Scores) -> bool:
    for request in requests:
        tokens = scores[request.request_id]
        assert tokens[0] == PromptToken(tokens[0].token_id)
        assert len(tokens) == len(request.prompt_token_ids) + len(answers[request.request_id])
        told = [SampledToken(token.token_id, token.logprob, token.top) for token in tokens]
        assert told[len(request.prompt_token_ids) :] == answers[request.request_id]
    return True


def limited(size: EngineSize, **limits: Any) -> EngineSize:
    return replace(size, limits=replace(size.limits, **limits))


@pytest.fixture(scope="module")
def answers(path: Path, requests: list[Submit]) -> dict[str, list[SampledToken]]:
    with open_alone(path) as opened:
        return generated(opened, requests)


@pytest.fixture(scope="module")
def alone(path: Path, requests: list[Submit], answers: dict[str, list[SampledToken]]) -> Scores:
    """Each text scored when nothing else was computed."""
    scores: Scores = {}
    with open_alone(path) as opened:
        for text in texts_of(requests, answers):
            scores |= scored(opened, [text])
    return scores


def test_scoring_is_generation(
    requests: list[Submit], answers: dict[str, list[SampledToken]], alone: Scores
) -> None:
    assert is_generation(requests, answers, alone)
    for tokens in alone.values():
        for token in tokens[1:]:
            likelier = sum(value > (token.logprob or 0.0) for _, value in token.top)
            assert token.rank == likelier + 1 if likelier < N_TOP else (token.rank or 0) > N_TOP


@pytest.mark.slow
@pytest.mark.parametrize("chunk", first_is_smoke([96, 16, 33]))
@pytest.mark.parametrize("kv_policy", ["odma", "paged"])
def test_scores_are_the_same_in_company_and_in_pieces(
    path: Path,
    requests: list[Submit],
    answers: dict[str, list[SampledToken]],
    alone: Scores,
    chunk: int,
    kv_policy: str,
) -> None:
    """Beside answers whose prompts begin like them, so that there is something to take over."""
    size = limited(size_of(path, kv_slots=2048, kv_policy=kv_policy), max_batch_tokens=chunk)
    texts = texts_of(requests, answers)
    others = [replace(text, request_id=f"o-{text.request_id}", prompt_logprobs=None) for text in texts]
    others = [replace(other, max_tokens=200) for other in others]
    with open_alone(path, size) as opened:
        outs = run_all(
            opened.engine, *(request for pair in zip(others, texts, strict=True) for request in pair)
        )
        assert {text.request_id: _answer(outs[text.request_id][0]).prompt for text in texts} == alone


def test_a_prompt_that_is_preempted_is_scored_to_its_end(path: Path, alone: Scores) -> None:
    """It is computed from its beginning again, and what was scored before stays."""
    ids = tuple(token.token_id for token in alone["p130"])
    with open_alone(path, limited(size_of(path), max_batch_tokens=16)) as opened:
        scheduler = opened.engine.scheduler
        opened.engine.submit(Submit("text", ids, 3, FREE, ignore_eos=True, prompt_logprobs=N_TOP))
        for _ in range(4):
            opened.engine.step()
        assert scheduler.n_computed("text") == 64
        (sequence,) = scheduler._lanes.running
        scheduler._preempt(sequence)
        assert scheduler.n_computed("text") == 0
        outs = run_all(opened.engine)["text"]
        assert _answer(outs[0]).prompt == alone["p130"]
        assert [_answer(out).prompt for out in outs[1:]] == [None, None]


def test_scores_are_the_same_with_drafts(
    path: Path, requests: list[Submit], answers: dict[str, list[SampledToken]], alone: Scores
) -> None:
    plans = {plan.phase: plan for plan in plans_of(1)}
    model = load_model(str(path), "native")
    with open_engine(model, plans, size_of(path), pinned=False, drafts=DraftSource()) as opened:
        assert scored(opened, texts_of(requests, answers)) == alone


@pytest.mark.slow
@pytest.mark.parametrize("weight_format", first_is_smoke(["int8", "bf16", "f32", "int4"]))
@pytest.mark.parametrize("kv_format", ["f32", "f16", "int8"])
def test_scoring_is_generation_in_every_format(
    path: Path, requests: list[Submit], weight_format: str, kv_format: str
) -> None:
    plans = {plan.phase: plan for plan in plans_of(1)}
    model = load_model(str(path), weight_format)
    size = limited(size_of(path, kv_format=kv_format), max_batch_tokens=100)
    with open_engine(model, plans, size, pinned=False) as opened:
        answers = generated(opened, requests)
        assert is_generation(requests, answers, scored(opened, texts_of(requests, answers)))


@pytest.mark.slow
def test_scores_are_the_same_from_pools(
    path: Path, requests: list[Submit], answers: dict[str, list[SampledToken]], alone: Scores
) -> None:
    """Such a request is not divided: who answers it computes its prompt."""
    scores: Scores = {}
    with pools(path) as server:
        take = server.take

        def watch(out: Answer) -> None:
            if out.prompt is not None:
                scores[out.request_id] = out.prompt
            take(out)

        server.take = watch  # type: ignore[method-assign]
        server.run(texts_of(requests, answers))
        assert server.front.n_divided == 0
    assert scores == alone


@given(st.integers(1, 60), st.integers(0, 4), st.randoms(use_true_random=False))
@examples(60)
def test_rows_may_come_in_any_pieces_and_again(n_tokens: int, n_top: int, rng: random.Random) -> None:
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    logits = numbers.normal(size=(n_tokens, 11)).astype(np.float32)
    ids = tuple(int(token_id) for token_id in numbers.integers(0, 11, n_tokens))
    whole = PromptScores(ids, n_top)
    whole.add(0, logits)
    pieces = PromptScores(ids, n_top)
    start = 0
    while start < n_tokens:
        if rng.random() < 0.2:  # preempted
            start = 0
        end = min(n_tokens, start + rng.randrange(1, 12))
        pieces.add(start, logits[start:end])
        start = end
    assert whole.is_whole
    assert pieces.is_whole
    assert pieces.tokens == whole.tokens
    assert [token.token_id for token in whole.tokens] == list(ids)

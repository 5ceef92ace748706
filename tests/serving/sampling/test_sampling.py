"""Choosing tokens: the filters keep what they say, seeds repeat, the odds are those of the distribution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.errors import RequestError, StepFailed
from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.requests.request_to_messages import chat_requests, completion_requests
from phasewise.serving.http.requests.schemas import CompletionRequest
from phasewise.serving.sampling.sampling import GREEDY, Sampler, SamplingParams, sample_rows
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults, stated_by_gguf, stated_by_hf
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.tiers import examples

SEEDS = st.integers(0, 2**32)


def logits_of(seed: int, n: int = 300, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(n) * spread).astype(np.float32)


def draw(logits: np.ndarray, n: int, **params: object) -> list[int]:
    sampler = Sampler(SamplingParams(**params), (), logits.size)  # type: ignore[arg-type]
    return [sampler.sample(logits).token_id for _ in range(n)]


def probabilities(logits: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    weights = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    return weights / weights.sum()


def kept_by_reference(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> set[int]:
    """Straight from the definitions: sort all, then filter one after the other."""
    order = np.argsort(-logits, kind="stable")[:top_k]
    odds = probabilities(logits[order], temperature)
    before = np.cumsum(odds) - odds
    kept = order[before < top_p]
    return {
        int(token_id) for token_id in kept if np.exp((logits[token_id] - logits.max()) / temperature) >= min_p
    }


@given(seed=SEEDS)
def test_greedy_takes_the_largest_and_the_first_of_equals(seed: int) -> None:
    logits = np.round(logits_of(seed, 50, 1.0))

    assert draw(logits, 1, temperature=0.0) == [int(np.flatnonzero(logits == logits.max())[0])]


@examples(60)
@given(
    seed=SEEDS,
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(1, 300),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
def test_only_tokens_that_the_filters_keep_are_drawn(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = logits_of(seed)
    kept = kept_by_reference(logits, temperature, top_k, top_p + 1e-5, min_p - 1e-6)

    drawn = draw(
        logits, 50, temperature=temperature, top_k=top_k, top_p=top_p, min_p=max(0.0, min_p), seed=seed
    )

    assert set(drawn) <= kept


@pytest.mark.many
@pytest.mark.parametrize("spread", [0.05, 1.0, 8.0])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.95])
def test_the_nucleus_is_found_in_a_large_vocabulary(spread: float, top_p: float) -> None:
    """Flat or peaked: the search among the likeliest few gives the same as sorting everything."""
    logits = logits_of(3, 20_000, spread)
    kept = kept_by_reference(logits, 1.0, logits.size, top_p + 1e-5, 0.0)

    drawn = draw(logits, 200, top_p=top_p, seed=1)

    assert set(drawn) <= kept
    if len(kept) > 100:
        assert len(set(drawn)) > 50


@pytest.mark.many
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}, {"temperature": 2.0}]
)
def test_the_odds_are_those_of_the_filtered_distribution(params: dict[str, float]) -> None:
    logits, n = logits_of(1, 12, 1.5), 20_000
    temperature = params.get("temperature", 1.0)
    kept = kept_by_reference(
        logits, temperature, int(params.get("top_k", 12)), params.get("top_p", 1.0), params.get("min_p", 0.0)
    )
    wanted = probabilities(logits, temperature)
    wanted[[token_id for token_id in range(12) if token_id not in kept]] = 0.0
    wanted /= wanted.sum()

    seen = np.bincount(draw(logits, n, seed=5, **params), minlength=12) / n

    assert np.abs(seen - wanted).max() < 5 * np.sqrt(0.25 / n)


def test_a_seed_repeats_whoever_else_is_in_the_batch() -> None:
    logits = np.stack([logits_of(seed) for seed in range(3)])
    params = SamplingParams(seed=42, top_p=0.9)
    alone, among = Sampler(params, (), 300), Sampler(params, (), 300)
    others = [Sampler(SamplingParams(), (), 300), Sampler(SamplingParams(temperature=0), (), 300)]

    for _ in range(20):
        by_itself = sample_rows(logits[1:2], [alone])[0]
        in_company = sample_rows(logits, [others[0], among, others[1]])[1]
        assert by_itself == in_company


def test_a_repetition_penalty_counts_prompt_and_answer() -> None:
    logits = np.array([2.0, 1.9, -1.0, -1.1], dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=0, repetition_penalty=2.0), (0,), 4)

    assert [sampler.sample(logits).token_id for _ in range(2)] == [1, 0]
    assert logits[0] == 2.0


def test_frequency_and_presence_penalties_count_the_answer_only() -> None:
    logits = np.array([2.0, 1.0, 0.0], dtype=np.float32)
    presence = Sampler(SamplingParams(temperature=0, presence_penalty=1.5), (0, 0, 0), 3)
    frequency = Sampler(SamplingParams(temperature=0, frequency_penalty=0.6), (0, 0, 0), 3)

    assert [presence.sample(logits).token_id for _ in range(3)] == [0, 1, 0]
    assert [frequency.sample(logits).token_id for _ in range(4)] == [0, 0, 1, 0]


def test_a_bias_moves_the_choice_and_must_name_a_token() -> None:
    logits = logits_of(0)

    assert draw(logits, 3, temperature=0.0, logit_bias={17: 100.0}) == [17] * 3
    with pytest.raises(RequestError, match="names token 300"):
        Sampler(SamplingParams(logit_bias={300: 1.0}), (), 300)


def test_log_probabilities_are_the_models_own() -> None:
    logits = logits_of(2)
    params = SamplingParams(temperature=0, top_logprobs=4, logit_bias={9: 100.0})

    sampled = Sampler(params, (), 300).sample(logits)

    wanted = np.log(probabilities(logits))
    assert sampled.token_id == 9
    assert sampled.logprob == pytest.approx(wanted[9], abs=1e-6)
    order = np.argsort(-logits)[:4]
    assert [token_id for token_id, _ in sampled.top] == order.tolist()
    assert [value for _, value in sampled.top] == pytest.approx(wanted[order], abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.01, 1.0])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e4])
def test_extreme_logits_and_temperatures_still_give_a_token(temperature: float, scale: float) -> None:
    logits = logits_of(4) * np.float32(scale)

    assert 0 <= draw(logits, 1, temperature=temperature, top_p=0.9)[0] < 300


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
def test_logits_that_are_no_numbers_fail_the_step(bad: float, params: SamplingParams) -> None:
    logits = logits_of(0)
    logits[7] = bad

    with pytest.raises(StepFailed, match="not numbers"):
        sample_rows(logits[None], [Sampler(params, (), 300)])


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", 0),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 2.1),
        ("presence_penalty", -2.1),
        ("logit_bias", {1: 101.0}),
    ],
)
def test_values_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]

    assert caught.value.param == name


@examples(60)
@given(seed=SEEDS, size=st.integers(1, 20_000), n=st.integers(1, 50), steps=st.integers(1, 1000))
def test_the_largest_logits_are_found_without_sorting(seed: int, size: int, n: int, steps: int) -> None:
    """Also among many equals, where the first stay."""
    logits = np.round(logits_of(seed, size) * steps / 100).astype(np.float32)
    n = min(n, size)

    sampled = Sampler(SamplingParams(temperature=0, top_logprobs=n), (), size).sample(logits)

    assert [token_id for token_id, _ in sampled.top] == np.argsort(-logits, kind="stable")[:n].tolist()


def test_a_token_that_cannot_come_is_never_drawn() -> None:
    logits = np.full(5000, -np.inf, dtype=np.float32)
    logits[[7, 4999]] = 0.0

    for params in ({}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_p": 0.9, "top_k": 3}):
        assert set(draw(logits, 200, seed=2, **params)) <= {7, 4999}


STATED = SamplingDefaults(0.6, 20, 0.8, 0.01, 1.05, "model")


def test_both_file_formats_say_the_same() -> None:
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "repetition_penalty": 1.05}
    keys = ("temp", "top_k", "top_p", "min_p", "penalty_repeat")
    gguf = {f"general.sampling.{key}": value for key, value in zip(keys, values.values(), strict=True)}
    assert stated_by_hf(values) == stated_by_gguf(gguf) == STATED


@pytest.mark.parametrize(
    "hostile",
    [
        {"temperature": "hot"},
        {"temperature": float("nan")},
        {"temperature": -1},
        {"top_p": 0},
        {"top_p": 7},
        {"min_p": 2},
        {"top_k": 1e300},
        {"top_k": 2.5},
        {"temperature": True},
        {"temperature": [1]},
        {"repetition_penalty": 0},
    ],
)
def test_values_that_no_sampler_can_use_count_as_not_stated(hostile: dict[str, Any]) -> None:
    assert stated_by_hf(hostile) == SamplingDefaults()


def served(defaults: SamplingDefaults) -> ServedModel:
    return ServedModel(
        ("m",),
        0,
        500,
        VOCAB_SIZE,
        frozenset({END}),
        encode,
        piece,
        lambda messages, _patience: encode(str(messages)),
        sampling=defaults,
    )


def test_a_request_that_states_nothing_gets_the_models_values() -> None:
    (chat,) = chat_requests(
        ChatRequest(model="m", messages=[{"role": "user", "content": "a"}]), served(STATED)
    )  # type: ignore[list-item]
    (text,) = completion_requests(CompletionRequest(model="m", prompt="a"), served(STATED))
    for sampling in (chat.sampling, text.sampling):
        assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.6, 20, 0.8, 0.01)
        assert sampling.repetition_penalty == 1.05


def test_what_a_request_states_wins_field_by_field() -> None:
    body = CompletionRequest(
        model="m", prompt="a", temperature=0.0, top_k=-1, top_p=1.0, min_p=0.0, repetition_penalty=1.0
    )
    (request,) = completion_requests(body, served(STATED))
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.0, None, 1.0, 0.0)
    assert sampling.repetition_penalty == 1.0
    (request,) = completion_requests(
        CompletionRequest(model="m", prompt="a", temperature=2.0), served(STATED)
    )
    assert (request.sampling.temperature, request.sampling.top_p) == (2.0, 0.8)

"""A value that a request leaves out is the operator's, else the model's, else ours."""

from __future__ import annotations

from typing import Any

import pytest

from phasewise.serving.http.http_settings import ServedModel
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.requests.request_to_messages import chat_requests, completion_requests
from phasewise.serving.http.requests.schemas import CompletionRequest
from phasewise.serving.sampling.sampling_defaults import SamplingDefaults, stated_by_gguf, stated_by_hf
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece

STATED = SamplingDefaults(0.6, 20, 0.8, 0.01, 1.05, "model")


def test_a_model_that_states_nothing_gets_our_defaults() -> None:
    assert stated_by_hf({"eos_token_id": 2}) == SamplingDefaults()
    assert stated_by_gguf({"general.architecture": "llama"}) == SamplingDefaults()
    defaults = SamplingDefaults()
    assert (defaults.temperature, defaults.top_p, defaults.min_p, defaults.top_k) == (0.7, 0.95, 0.05, None)


def test_what_a_model_leaves_out_beside_what_it_states_is_neutral() -> None:
    defaults = stated_by_hf({"temperature": 0.6, "top_k": 20})
    assert defaults == SamplingDefaults(0.6, 20, 1.0, 0.0, 1.0, "model")


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


def test_an_operators_values_replace_only_what_they_name() -> None:
    assert STATED.with_overrides(top_p=0.5) == SamplingDefaults(0.6, 20, 0.5, 0.01, 1.05, "model")
    assert STATED.with_overrides() == STATED

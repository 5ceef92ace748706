"""Answers that must look like something, through the OpenAI client; fields that generation has or has not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest

from phasewise.serving.grammar.guides import GuideCompiler, TokenView
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, piece
from tests.support.servers.fake_server import FakeServer, fake_server

SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "ok": {"type": "boolean"}},
    "required": ["size", "ok"],
    "additionalProperties": False,
}
BY_SCHEMA: Any = {"type": "json_schema", "json_schema": {"name": "size", "schema": SCHEMA, "strict": True}}
HELLO: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    guides = GuideCompiler(TokenView(VOCAB_SIZE, frozenset({END}), frozenset({END}), piece, encode))
    with fake_server(model=lambda served: replace(served, guides=guides)) as running:
        yield running


@pytest.fixture(scope="module")
def api(server: FakeServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def asked(server: FakeServer, path: str = "completions", **fields: object) -> httpx.Response:
    start = {"prompt": "a"} if path == "completions" else {"messages": HELLO}
    return httpx.post(f"{server.url}/v1/{path}", json={"model": "fake", "max_tokens": 60, **start, **fields})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chat_answer_follows_its_schema_in_every_choice(api: openai.OpenAI, temperature: float) -> None:
    answer = api.chat.completions.create(
        model="fake",
        messages=HELLO,
        response_format=BY_SCHEMA,
        n=3,
        seed=1,
        temperature=temperature,
        logprobs=True,
        top_logprobs=2,
    )

    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        said = json.loads(choice.message.content or "")
        assert said["size"] in ("small", "large")
        assert isinstance(said["ok"], bool)
        assert choice.logprobs is not None
        assert "".join(scored.token for scored in choice.logprobs.content or []) == choice.message.content


def test_any_object_can_be_asked_for(server: FakeServer) -> None:
    said = asked(server, response_format={"type": "json_object"}, temperature=0).json()["choices"][0]

    assert said["text"].startswith("{")


@pytest.mark.parametrize(
    ("wanted", "answers"),
    [
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "[0-9]{3}"}, {f"{number:03}" for number in range(1000)}),
        ({"json": {"const": 7}}, {"7"}),
    ],
)
def test_structured_outputs_say_it_vllms_way(server: FakeServer, wanted: object, answers: set[str]) -> None:
    for path, text in (("completions", lambda choice: choice["text"]), ("chat/completions", _content)):
        choice = asked(server, path, structured_outputs=wanted).json()["choices"][0]
        assert text(choice) in answers
        assert choice["finish_reason"] == "stop"


def _content(choice: Any) -> str:
    return str(choice["message"]["content"])


def test_an_answer_cut_at_max_tokens_says_length(server: FakeServer) -> None:
    choice = asked(server, response_format=BY_SCHEMA, max_tokens=5).json()["choices"][0]

    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format", "only 'text', 'json_object'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema: Field required"),
        ({"response_format": BY_SCHEMA, "structured_outputs": {}}, "structured_outputs", "one of the two"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "(?=a)"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"regex": "(a{999}){999}"}}, "structured_outputs", "4096"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs", "not"),
        ({"response_format": BY_SCHEMA, "ignore_eos": True}, "ignore_eos", "ignore_eos"),
        ({"best_of": 3}, "best_of", "not supported"),
        ({"suffix": "z"}, "suffix", "not supported"),
        ({"guided_regex": "a"}, "guided_regex", "not supported"),
        ({"tools": [{"type": "function"}]}, "tools", "not supported"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "not a token id"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        ({"repetition_penalty": 1e-320}, "repetition_penalty", "0.01"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(
    server: FakeServer, fields: dict[str, object], param: str, said: str
) -> None:
    answer = asked(server, **fields)

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert said in answer.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"echo": False}, {"best_of": 1}, {"tools": []}, {"user": "u"}, {"x": {}}])
def test_what_asks_for_nothing_is_no_reason_to_refuse(server: FakeServer, fields: dict[str, object]) -> None:
    assert asked(server, **fields).status_code == 200


def test_without_a_compiler_there_are_no_guided_answers() -> None:
    with fake_server() as bare:
        answer = asked(bare, response_format={"type": "json_object"})

    assert answer.json()["error"]["code"] == "unsupported_parameter"

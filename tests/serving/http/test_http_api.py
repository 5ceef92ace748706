"""The OpenAI API as its official client sees it, against a real server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import httpx
import openai
import pytest

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.http.models.served_models import ListedModel
from phasewise.serving.model_table import with_adapters
from phasewise.serving.models.linears import Adapter
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, next_letter, piece
from tests.support.servers.fake_server import CONTEXT, FakeServer, fake_server
from tests.support.servers.rude_clients import ENOUGH_S


@pytest.fixture
def api(server: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client
    server.ranks.successor = next_letter
    server.ranks.fail_with = None
    server.ranks.before_step = lambda: None
    server.wait_until_idle()


HELLO = [{"role": "user", "content": "xyz"}]


def test_models_are_listed_and_shown(api: openai.OpenAI) -> None:
    assert [model.id for model in api.models.list()] == ["fake"]
    assert api.models.retrieve("fake").id == "fake"
    assert api.models.retrieve("alias").id == "fake"
    with pytest.raises(openai.NotFoundError) as caught:
        api.models.retrieve("other/one")
    assert caught.value.code == "model_not_found"


def test_a_completion_has_sixteen_tokens_unless_told(api: openai.OpenAI) -> None:
    got = api.completions.create(model="fake", prompt="z", temperature=0)

    assert got.choices[0].text == "abcdefghijklmnop"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [("c", ["def"]), (["a", "k"], ["bcd", "lmn"]), ([97, 98], ["cde"]), ([[97], [107, 108]], ["bcd", "mno"])],
)
def test_every_shape_of_prompt(api: openai.OpenAI, prompt: object, texts: list[str]) -> None:
    got = api.completions.create(model="fake", prompt=prompt, max_tokens=3, temperature=0)  # type: ignore[call-overload]

    assert [choice.text for choice in got.choices] == texts
    assert [choice.index for choice in got.choices] == list(range(len(texts)))


def test_n_choices_of_several_prompts_come_in_order(api: openai.OpenAI) -> None:
    got, again = (
        api.completions.create(
            model="fake",
            prompt=["a", "k"],
            max_tokens=8,
            n=3,
            seed=1,
            temperature=3,
            extra_body={"ignore_eos": True},
        )
        for _ in range(2)
    )

    assert [choice.index for choice in got.choices] == list(range(6))
    assert [choice.text for choice in got.choices] == [choice.text for choice in again.choices]
    assert len({choice.text for choice in got.choices[:3]}) > 1
    assert got.usage is not None
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (2, 48)


def test_a_chat_without_a_limit_ends_by_itself(server: FakeServer, api: openai.OpenAI) -> None:
    server.ranks.successor = lambda last: END if last == ord("f") else next_letter(last)

    got = api.chat.completions.create(model="fake", messages=HELLO, temperature=0)

    assert (got.choices[0].message.content, got.choices[0].finish_reason) == ("abcdef", "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_a_chat(api: openai.OpenAI, stream: bool) -> None:
    got = api.chat.completions.create(
        model="fake",
        messages=HELLO,
        max_tokens=3,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        stream=stream,
    )

    if isinstance(got, openai.Stream):
        parts = [chunk.choices[0].logprobs for chunk in got]
        entries = [entry for part in parts if part is not None for entry in part.content or []]
    else:
        assert got.choices[0].logprobs is not None
        entries = got.choices[0].logprobs.content or []  # type: ignore[assignment]
    assert [entry.token for entry in entries] == ["a", "b", "c"]
    assert [entry.bytes for entry in entries] == [[97], [98], [99]]
    assert all(
        len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token for entry in entries
    )


def test_logprobs_leave_the_end_token_out(server: FakeServer, api: openai.OpenAI) -> None:
    server.ranks.successor = lambda last: END if last == ord("c") else next_letter(last)

    got = api.completions.create(model="fake", prompt="a", max_tokens=9, temperature=0, logprobs=0)

    assert got.choices[0].logprobs is not None
    assert got.choices[0].logprobs.tokens == ["b", "c"]
    assert got.usage is not None
    assert got.usage.completion_tokens == 3


def test_extensions_reach_the_sampler(api: openai.OpenAI) -> None:
    bias = {str(ord("q")): 100}
    biased = api.completions.create(model="fake", prompt="a", max_tokens=3, temperature=0, logit_bias=bias)
    assert biased.choices[0].text == "qqq"
    unlimited = {"top_k": -1, "min_p": 0.9, "repetition_penalty": 1.0, "something_new": {"ignored": True}}
    got = api.completions.create(model="fake", prompt="a", max_tokens=3, temperature=1, extra_body=unlimited)
    assert got.choices[0].text == "bcd"


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_step_is_a_server_error_and_the_server_stays_up(
    server: FakeServer, api: openai.OpenAI, stream: bool
) -> None:
    server.ranks.fail_with = ValueError("boom")
    with pytest.raises(openai.InternalServerError) as caught:
        api.completions.create(model="fake", prompt="a", stream=stream)
    assert caught.value.code == "engine_error"

    server.ranks.fail_with = None
    assert (
        api.completions.create(model="fake", prompt="a", max_tokens=1, temperature=0).choices[0].text == "b"
    )


def test_a_failure_in_midstream_is_told_in_the_stream(server: FakeServer, api: openai.OpenAI) -> None:
    n_before, go_on = len(server.ranks.batches), threading.Event()
    server.ranks.before_step = lambda: len(server.ranks.batches) == n_before or go_on.wait(ENOUGH_S)
    stream = api.completions.create(model="fake", prompt="a", max_tokens=400, stream=True, temperature=0)
    assert next(iter(stream)).choices[0].text == "b"

    server.ranks.fail_with = ValueError("boom")
    go_on.set()

    with pytest.raises(openai.APIError, match="boom"):
        list(stream)


def test_a_key_is_asked_for_everywhere_but_at_health() -> None:
    with fake_server(HttpLimits(api_keys=("sesame", "other"))) as server:
        good = openai.OpenAI(base_url=f"{server.url}/v1", api_key="sesame", max_retries=0)
        bad = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)

        assert good.completions.create(model="fake", prompt="a", max_tokens=1).choices
        with pytest.raises(openai.AuthenticationError) as caught:
            bad.models.list()
        assert caught.value.code == "invalid_api_key"
        assert httpx.get(f"{server.url}/health").status_code == 200
        for path in ("/metrics", "/v1/models", "/nowhere"):
            assert httpx.get(server.url + path).status_code == 401
        assert (
            httpx.get(f"{server.url}/metrics", headers={"Authorization": "Bearer other"}).status_code == 200
        )


def test_without_a_template_there_is_no_chat() -> None:
    with fake_server(has_template=False) as server:
        api = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        with pytest.raises(openai.BadRequestError) as caught:
            api.chat.completions.create(model="fake", messages=HELLO)  # type: ignore[arg-type]
        assert caught.value.code == "no_chat_template"


def test_the_openapi_document_describes_the_bodies(server: FakeServer) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()

    body = document["paths"]["/v1/completions"]["post"]["requestBody"]
    assert body["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/CompletionRequest"}
    assert "prompt" in document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert CONTEXT == 500


FINGERPRINT = Fingerprint("a" * 64, "b" * 64, "c" * 64, "", "native", "f16", "1/portable/0", "1/0")
MODEL = ServedModel(("tiny",), 0, 500, VOCAB_SIZE, frozenset({END}), encode, piece, None)
ADAPTERS = (Adapter("poet", "a" * 64, {}), Adapter("fake", "b" * 64, {}))


def test_adapters_are_named_by_their_model_and_alone_where_that_is_clear() -> None:
    own = replace(MODEL, names=("tiny", "models/tiny"), fingerprint=lambda: FINGERPRINT)
    poet, fake = with_adapters(own, ADAPTERS, {"tiny", "models/tiny", "fake"})

    assert poet.names == ("tiny:poet", "models/tiny:poet", "poet")
    assert fake.names == ("tiny:fake", "models/tiny:fake")
    assert (poet.engine_id, poet.adapter, poet.parent) == ("tiny", "poet", "tiny")
    cards = [ListedModel(model.model_id, model.names, 0, 0, None, model).card() for model in (poet, own)]
    assert cards[0]["parent"] == "tiny"
    assert "parent" not in cards[1]


PROMPT = list(range(5, 25)) * 10
"""200 tokens."""
ALIGNED = 16
"""Keys and values are taken over in panels of so many."""


@pytest.mark.parametrize("fields", [{}, {"logprobs": 5}, {"best_of": 4}, {"echo": True, "logprobs": 2}])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_choices_share_the_prefill_of_their_prompt(path: str, fields: dict[str, object]) -> None:
    is_chat = path.endswith("chat/completions")
    if is_chat and fields:
        fields = {"logprobs": True, "top_logprobs": 5}
    prompt = {"messages": [{"role": "user", "content": "a" * 200}]} if is_chat else {"prompt": PROMPT}
    with fake_server(max_sequences=8) as server:
        alone = server.n_computed(path, max_tokens=4, **prompt, cache_salt="one")  # type: ignore[arg-type]
        four = server.n_computed(path, max_tokens=4, n=4, **prompt, **fields, cache_salt="four")  # type: ignore[arg-type]

    assert alone >= 200
    assert four <= alone + 3 * ALIGNED


def test_log_probabilities_of_tokens_compute_nothing_more() -> None:
    with fake_server() as server:
        steps = []
        for fields in ({}, {"logprobs": 20}):
            before = len(server.ranks.batches)
            salt = f"salt {len(steps)}"
            server.n_computed("/v1/completions", prompt=PROMPT, max_tokens=9, cache_salt=salt, **fields)
            steps.append([(batch.phase, batch.n_tokens) for batch in server.ranks.batches[before:]])

    assert steps[0] == steps[1]

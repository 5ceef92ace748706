"""Log-probabilities of prompts (OpenAI's `echo`, vLLM's `prompt_logprobs`), fingerprints and receipts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.messages import Submit
from phasewise.serving.engine.receipts import read_receipt
from phasewise.serving.http.answers.openai_objects import text_offsets
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.requests.request_to_messages import chat_requests, completion_requests
from phasewise.serving.http.requests.schemas import CompletionRequest
from tests.support.servers.fake_engine import END, VOCAB_SIZE, encode, next_letter, piece
from tests.support.servers.fake_server import CONTEXT, FakeServer, fake_server
from tests.support.tiers import examples

PROMPTS = ["abc", "the sea", "zyx", "a"]


@pytest.fixture(scope="module")
def client(server: FakeServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


def known(text: str) -> list[float | None]:
    """The log-probability that the fake model gives each byte of a text, None for the first."""
    ids = list(text.encode())
    rows = [-0.5 * np.abs(np.arange(VOCAB_SIZE) - next_letter(byte)) for byte in ids[:-1]]
    pairs = zip(rows, ids[1:], strict=True)
    return [None, *(float(row[byte] - np.log(np.exp(row).sum())) for row, byte in pairs)]


def close(logprobs: Sequence[float | None], wanted: Sequence[float | None]) -> bool:
    assert logprobs[0] is None
    assert wanted[0] is None
    return np.allclose(logprobs[1:], wanted[1:], rtol=0, atol=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
def test_an_echo_has_the_tokens_of_prompt_and_answer(client: openai.OpenAI, max_tokens: int) -> None:
    answer = client.completions.create(
        model="fake", prompt=PROMPTS, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0
    )
    assert len(answer.choices) == len(PROMPTS)
    for prompt, choice in zip(PROMPTS, answer.choices, strict=True):
        scored = choice.logprobs
        assert scored is not None
        assert choice.text.startswith(prompt)
        assert len(choice.text) == len(prompt) + max_tokens
        assert "".join(scored.tokens or ()) == choice.text
        assert scored.text_offset == list(range(len(choice.text)))
        assert close(scored.token_logprobs or (), known(choice.text))
        assert [None if top is None else len(top) for top in scored.top_logprobs or ()] == [
            None,
            *[2] * (len(choice.text) - 1),
        ]
        assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == max_tokens * len(PROMPTS)
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))


def test_an_echo_of_tokens_and_of_nothing_else(client: openai.OpenAI) -> None:
    """Tokens are echoed as their text; without logprobs there are none."""
    answer = client.completions.create(model="fake", prompt=[97, 98], echo=True, max_tokens=0)
    assert (answer.choices[0].text, answer.choices[0].logprobs) == ("ab", None)


def test_an_end_token_counts_where_the_prompt_is_echoed() -> None:
    """A client that scores leaves out the last token, which was generated: it must be there."""

    def ends(model: ServedModel) -> ServedModel:
        return replace(model, end_token_ids=frozenset({ord("d")}))

    with fake_server(model=ends) as server:
        server.engine.vocabulary = replace(server.engine.vocabulary, end_token_ids=frozenset({ord("d")}))
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any")
        (choice,) = client.completions.create(
            model="fake", prompt="abc", echo=True, logprobs=1, max_tokens=1, temperature=0
        ).choices
        assert (choice.text, choice.finish_reason) == ("abc", "stop")
        assert choice.logprobs is not None
        assert choice.logprobs.tokens == ["a", "b", "c", "d"]
        assert len(choice.logprobs.token_logprobs or ()) == 4


def test_the_tokens_that_end_turns_of_a_template_end_answers() -> None:
    """The file names another end."""
    model = ServedModel(
        ("m",), 0, 500, VOCAB_SIZE, frozenset({END}), encode, piece, lambda _chat, _patience: [1]
    )
    model = replace(model, dialect=replace(model.dialect, ends=frozenset({7})))
    chat = ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 2})
    text = CompletionRequest.model_validate({"model": "m", "prompt": "hi"})
    assert [request.ends for request in chat_requests(chat, model)] == [{7}, {7}]
    assert [request.ends for request in completion_requests(text, model)] == [{7}]


@pytest.mark.parametrize("scored", [True, False])
def test_a_streamed_echo_is_the_whole_one(client: openai.OpenAI, scored: bool) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": ["abc", "xy"], "echo": True, "n": 2, "seed": 3}
    asked |= {"max_tokens": 6, "logprobs": 2} if scored else {"max_tokens": 6}
    whole = client.completions.create(**asked)
    texts: dict[int, str] = {}
    numbers: dict[int, dict[str, list[Any]]] = {}
    for event in client.completions.create(stream=True, **asked):
        for choice in event.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
            if choice.logprobs is not None:
                kept = numbers.setdefault(choice.index, {})
                for name, values in choice.logprobs.model_dump().items():
                    kept.setdefault(name, []).extend(values)
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        wanted = None if choice.logprobs is None else choice.logprobs.model_dump()
        assert numbers.get(choice.index) == wanted
        assert (wanted is not None) == scored


@pytest.mark.parametrize("n_top", [0, 1, 4])
def test_prompt_logprobs_as_vllm_tells_them(server: FakeServer, n_top: int) -> None:
    """In a completion of each choice, in a chat of the response; by token id, with its rank."""
    asked: dict[str, Any] = {"model": "fake", "max_tokens": 2, "prompt_logprobs": n_top, "n": 2}
    whole = httpx.post(f"{server.url}/v1/completions", json={**asked, "prompt": "abz"}).json()
    chat = httpx.post(
        f"{server.url}/v1/chat/completions", json={**asked, "messages": [{"role": "user", "content": "abz"}]}
    ).json()
    for text, places in (
        *(("abz", choice["prompt_logprobs"]) for choice in whole["choices"]),
        ("<user>abz<assistant>", chat["prompt_logprobs"]),
    ):
        assert len(places) == len(text)
        assert places[0] is None
        for letter, place, value in zip(text[1:], places[1:], known(text)[1:], strict=True):
            own = place[str(ord(letter))]
            assert math.isclose(own["logprob"], value or 0.0, abs_tol=1e-5)
            assert own["decoded_token"] == letter
            likelier = [candidate for candidate in place.values() if candidate["logprob"] > own["logprob"]]
            assert own["rank"] > len(likelier)
            assert len(place) == max(1, n_top) + (own["rank"] > n_top > 0)
            ranks = sorted(candidate["rank"] for candidate in place.values())
            assert ranks[:n_top] == list(range(1, n_top + 1))


def test_a_prompt_s_numbers_are_computed_for_one_of_its_choices(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Submit] = []
    submit = server.engine.submit

    def listed(message: Submit) -> None:
        sent.append(message)
        submit(message)

    monkeypatch.setattr(server.engine, "submit", listed)
    asked: dict[str, Any] = {"model": "fake", "prompt": ["abc", "xyz"], "n": 3, "max_tokens": 2}

    answer = httpx.post(f"{server.url}/v1/completions", json={**asked, "prompt_logprobs": 2}).json()

    assert [message.prompt_logprobs for message in sent] == [2, None, None] * 2
    told = [choice["prompt_logprobs"] for choice in answer["choices"]]
    assert all(told)
    assert told == [told[0]] * 3 + [told[3]] * 3
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("completions", {"max_tokens": 0}, "max_tokens"),
        ("completions", {"max_tokens": 0, "echo": True, "receipt": True}, "receipt"),
        ("completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("completions", {"prompt_logprobs": -1}, "prompt_logprobs"),
        ("chat/completions", {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ("chat/completions", {"max_tokens": 0, "prompt_logprobs": 1}, "max_tokens"),
        ("chat/completions", {"echo": True}, "echo"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_name(path: str, fields: dict[str, object], param: str) -> None:
    said = {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
    with fake_server(model=lambda model: replace(model, gives_receipts=True)) as server:
        refused = httpx.post(f"{server.url}/v1/{path}", json={"model": "fake", **said, **fields})
        assert refused.status_code == 400, refused.text
        assert refused.json()["error"]["param"] == param


def test_the_memory_of_a_prompt_s_numbers_is_bounded() -> None:
    """As that of an answer's: a request that would hold more is refused."""
    with fake_server(HttpLimits(max_response_bytes=50_000)) as server:
        asked = {"model": "fake", "prompt": "a" * (CONTEXT - 10), "max_tokens": 0, "echo": True}
        refused = httpx.post(f"{server.url}/v1/completions", json={**asked, "logprobs": 20})
        assert refused.status_code == 400, refused.text[:200]
        assert "log-probabilities" in refused.json()["error"]["message"]
        assert httpx.post(f"{server.url}/v1/completions", json=asked).status_code == 200


def test_a_text_s_control_tokens_are_told(server: FakeServer) -> None:
    """A token that a prompt cannot spell is told as none: the fake's end token has no text."""
    assert httpx.get(f"{server.url}/tokenizer_info").json() == {"bos_token": None, "eos_token": None}

    def spelled(model: ServedModel) -> ServedModel:
        return replace(model, end_token_ids=frozenset({ord("~")}))

    with fake_server(model=spelled) as other:
        info = json.loads(httpx.get(f"{other.url}/tokenizer_info").text)
        assert info == {"bos_token": None, "eos_token": "~"}


@given(words=st.lists(st.text(min_size=1, max_size=5), min_size=1, max_size=8), data=st.data())
@examples(100)
def test_offsets_are_of_the_characters_at_which_tokens_begin(words: list[str], data: st.DataObject) -> None:
    """However the bytes are cut; with a token that every prompt begins with, and a space of the tokens."""
    text = "".join(words)
    raw = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw)), max_size=6)) - {len(raw)})
    pieces = [raw[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    wanted = [len(raw[:cut].decode("utf-8", "ignore")) for cut in (0, *cuts)]
    assert text_offsets(text, pieces) == wanted
    assert text_offsets(text, [b"\0<s>", *pieces]) == [0, *wanted]
    if not raw.startswith(b" "):
        assert text_offsets(text, [b" " + pieces[0], *pieces[1:]]) == wanted


FINGERPRINT = Fingerprint("a" * 64, "b" * 64, "c" * 64, "", "native", "f16", "1/portable/0", "1/0")
PATHS = ("/v1/completions", "/v1/chat/completions")
KEYS = ("one", "two")


def receipted(model: ServedModel) -> ServedModel:
    return replace(model, fingerprint=lambda: FINGERPRINT, gives_receipts=True)


@pytest.fixture(scope="module")
def receipting() -> Iterator[FakeServer]:
    with fake_server(HttpLimits(api_keys=KEYS), model=receipted) as running:
        yield running


def ask(receipting: FakeServer, path: str, key: str = "one", **body: object) -> httpx.Response:
    asked = {"model": "fake", "max_tokens": 20, "temperature": 0, **body}
    asked |= {"prompt": "xyz"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "xyz"}]}
    return httpx.post(receipting.url + path, json=asked, headers={"Authorization": f"Bearer {key}"})


def show(receipting: FakeServer, path: str, key: str = "one") -> httpx.Response:
    return httpx.get(receipting.url + path, headers={"Authorization": f"Bearer {key}"})


def events(response: httpx.Response) -> list[dict[str, object]]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_and_every_event_has_the_fingerprint(receipting: FakeServer, path: str) -> None:
    assert ask(receipting, path).json()["system_fingerprint"] == FINGERPRINT.short
    usage = {"include_usage": True}
    said = events(ask(receipting, path, stream=True, stream_options=usage))
    assert len(said) > 2
    assert {event["system_fingerprint"] for event in said} == {FINGERPRINT.short}


@pytest.mark.parametrize("path", PATHS)
def test_one_fingerprint_and_seeded_request_give_the_same_bytes(receipting: FakeServer, path: str) -> None:
    """Alone, and on another receipting beside other answers; but for ids and times."""
    asked = {"temperature": 1.0, "seed": 7, "n": 3, "logprobs": 2 if path == PATHS[0] else True}
    alone = ask(receipting, path, **asked).json()
    with fake_server(HttpLimits(api_keys=KEYS), model=receipted, max_sequences=2) as other:
        again = ask(other, path, **asked).json()

    assert alone["system_fingerprint"] == again["system_fingerprint"]
    assert alone["choices"] == again["choices"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_has_its_receipt(receipting: FakeServer, path: str, stream: bool) -> None:
    response = ask(receipting, path, receipt=True, n=2, temperature=1.0, stream=stream, stop="q")
    assert response.status_code == 200, response.text
    if stream:
        choices = [choice for event in events(response) for choice in event["choices"]]  # type: ignore[attr-defined]
    else:
        choices = response.json()["choices"]
    last = [choice for choice in choices if choice["finish_reason"] is not None]
    assert [choice for choice in choices if "receipt" in choice] == last
    receipts = [read_receipt(choice["receipt"]) for choice in sorted(last, key=lambda ended: ended["index"])]
    assert [receipt.contradictions() for receipt in receipts] == [[], []]
    seeds = [receipt.settings.sampling.seed for receipt in receipts]
    assert None not in seeds
    assert seeds[1] == (seeds[0] or 0) + 1
    assert all(receipt.settings.stop == ("q",) for receipt in receipts)


def test_a_server_without_receipts_refuses_by_name() -> None:
    with fake_server() as receipting:
        asked = {"model": "fake", "prompt": "a", "receipt": True}
        refused = httpx.post(f"{receipting.url}/v1/completions", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "receipt"
        assert "--receipts" in refused.json()["error"]["message"]


def test_before_an_instance_is_there_an_answer_says_no_fingerprint() -> None:
    with fake_server(model=lambda model: replace(model, gives_receipts=True)) as receipting:
        asked = {"model": "fake", "prompt": "a", "max_tokens": 2}
        answer = httpx.post(f"{receipting.url}/v1/completions", json=asked)
        assert answer.json()["system_fingerprint"] is None
        refused = httpx.post(f"{receipting.url}/v1/completions", json=asked | {"receipt": True})
        assert refused.status_code == 503

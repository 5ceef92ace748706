"""Fingerprints and receipts over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest

from phasewise.serving.engine.fingerprint import Fingerprint
from phasewise.serving.engine.receipts import read_receipt
from phasewise.serving.http.answers.last_answers import MOST_KEPT, MOST_KEPT_CHARACTERS, ReceiptStore
from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import HttpLimits, ServedModel
from tests.support.servers.fake_server import FakeServer, fake_server

FINGERPRINT = Fingerprint("a" * 64, "b" * 64, "c" * 64, "", "native", "f16", "1/portable/0", "1/0")
PATHS = ("/v1/completions", "/v1/chat/completions")
KEYS = ("one", "two")


def receipted(model: ServedModel) -> ServedModel:
    return replace(model, fingerprint=lambda: FINGERPRINT, gives_receipts=True)


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(HttpLimits(api_keys=KEYS), model=receipted) as running:
        yield running


def ask(server: FakeServer, path: str, key: str = "one", **body: object) -> httpx.Response:
    asked = {"model": "fake", "max_tokens": 20, "temperature": 0, **body}
    asked |= {"prompt": "xyz"} if path == PATHS[0] else {"messages": [{"role": "user", "content": "xyz"}]}
    return httpx.post(server.url + path, json=asked, headers={"Authorization": f"Bearer {key}"})


def show(server: FakeServer, path: str, key: str = "one") -> httpx.Response:
    return httpx.get(server.url + path, headers={"Authorization": f"Bearer {key}"})


def events(response: httpx.Response) -> list[dict[str, object]]:
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_and_every_event_has_the_fingerprint(server: FakeServer, path: str) -> None:
    assert ask(server, path).json()["system_fingerprint"] == FINGERPRINT.short()
    usage = {"include_usage": True}
    said = events(ask(server, path, stream=True, stream_options=usage))
    assert len(said) > 2
    assert {event["system_fingerprint"] for event in said} == {FINGERPRINT.short()}


@pytest.mark.parametrize("path", PATHS)
def test_one_fingerprint_and_one_seeded_request_give_the_same_bytes(server: FakeServer, path: str) -> None:
    """Alone, and on another server beside other answers; but for ids and times."""
    asked = {"temperature": 1.0, "seed": 7, "n": 3, "logprobs": 2 if path == PATHS[0] else True}
    alone = ask(server, path, **asked).json()
    with fake_server(HttpLimits(api_keys=KEYS), model=receipted, max_sequences=2) as other:
        again = ask(other, path, **asked).json()

    assert alone["system_fingerprint"] == again["system_fingerprint"]
    assert alone["choices"] == again["choices"]


def test_models_and_responses_have_the_fingerprint(server: FakeServer) -> None:
    (card,) = show(server, "/v1/models").json()["data"]
    assert card["system_fingerprint"] == FINGERPRINT.short()
    assert card["arithmetic"] == FINGERPRINT.arithmetic
    assert card["arithmetic_paths"] == FINGERPRINT.paths
    assert show(server, "/v1/models/alias").json() == card
    headers = {"Authorization": "Bearer one"}
    asked = {"model": "fake", "input": "xyz", "max_output_tokens": 3}
    answer = httpx.post(f"{server.url}/v1/responses", json=asked, headers=headers).json()
    assert answer["system_fingerprint"] == FINGERPRINT.short()
    refused = httpx.post(f"{server.url}/v1/responses", json=asked | {"receipt": True}, headers=headers)
    assert refused.status_code == 400
    assert "receipt" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_has_its_receipt(server: FakeServer, path: str, stream: bool) -> None:
    response = ask(server, path, receipt=True, n=2, temperature=1.0, stream=stream, stop="q")
    assert response.status_code == 200, response.text
    if stream:
        choices = [choice for event in events(response) for choice in event["choices"]]  # type: ignore[attr-defined]
        answer_id = str(events(response)[0]["id"])
    else:
        choices, answer_id = response.json()["choices"], response.json()["id"]
    last = [choice for choice in choices if choice["finish_reason"] is not None]
    assert [choice for choice in choices if "receipt" in choice] == last
    receipts = [read_receipt(choice["receipt"]) for choice in sorted(last, key=lambda ended: ended["index"])]
    assert [receipt.contradictions() for receipt in receipts] == [[], []]
    seeds = [receipt.settings.sampling.seed for receipt in receipts]
    assert None not in seeds
    assert seeds[1] == (seeds[0] or 0) + 1
    assert all(receipt.settings.stop == ("q",) for receipt in receipts)
    kept = show(server, f"/v1/receipts/{answer_id}").json()["data"]
    assert sorted(map(str, kept)) == sorted(str(receipt.to_json()) for receipt in receipts)
    assert show(server, f"/v1/receipts/{answer_id}", key="two").status_code == 404


def test_without_being_asked_there_is_none(server: FakeServer) -> None:
    answer = ask(server, PATHS[0]).json()
    assert "receipt" not in answer["choices"][0]
    refused = show(server, f"/v1/receipts/{answer['id']}")
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "receipt_not_found")


def test_a_server_without_receipts_refuses_by_name() -> None:
    with fake_server() as server:
        asked = {"model": "fake", "prompt": "a", "receipt": True}
        refused = httpx.post(f"{server.url}/v1/completions", json=asked)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "receipt"
        assert "--receipts" in refused.json()["error"]["message"]


def test_before_an_instance_is_there_an_answer_says_no_fingerprint() -> None:
    with fake_server(model=lambda model: replace(model, gives_receipts=True)) as server:
        asked = {"model": "fake", "prompt": "a", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=asked)
        assert answer.json()["system_fingerprint"] is None
        refused = httpx.post(f"{server.url}/v1/completions", json=asked | {"receipt": True})
        assert refused.status_code == 503


def test_receipts_that_are_kept_have_bounds() -> None:
    """A client that asks for many displaces its own."""
    store = ReceiptStore()
    store.put("quiet", "first", "{}")
    for number in range(2 * MOST_KEPT):
        store.put("busy", str(number), "{}")
    large = "x" * (MOST_KEPT_CHARACTERS // 4)
    for number in range(8):
        store.put("busy", f"large {number}", large)

    assert json.loads(store.receipts("quiet", "first"))["data"] == [{}]
    assert store.receipts("busy", "large 7")
    for answer_id in ("0", str(2 * MOST_KEPT - 1), "large 1"):
        with pytest.raises(ApiError):
            store.receipts("busy", answer_id)

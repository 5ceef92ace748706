"""Requests have ids and lines in a log, pages of named origins may call, and tokens are told."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.errors import ServingError
from phasewise.serving.http.http_settings import ApiKey, HttpLimits
from phasewise.serving.http.monitoring.access_log import AccessLog, Logging, Record, open_log
from phasewise.serving.http.routes.app import ServerContext
from tests.support.servers.fake_server import FakeServer, fake_server

LINES: list[str] = []
PAGE = "https://chat.example"


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    log = AccessLog(LINES.append, "debug", as_json=True)
    with fake_server(surroundings=ServerContext((PAGE,), log)) as running:
        yield running


def written() -> list[dict[str, object]]:
    return [entry for entry in map(json.loads, list(LINES)) if entry["path"] != "/health"]


@pytest.fixture(autouse=True)
def _no_lines(server: FakeServer) -> None:
    """No line of an earlier test comes late: lines are written in turn, and a request's after its answer."""
    mark = f"mark-{uuid.uuid4().hex}"
    for _ in range(2000):
        httpx.get(f"{server.url}/health", headers={"X-Request-Id": mark})
        if any(mark in line for line in LINES):
            break
    LINES.clear()


def lines(server: FakeServer, n: int = 1) -> list[dict[str, object]]:
    server.wait_until_idle()
    for _ in range(200):
        if len(written()) >= n:
            break
        httpx.get(f"{server.url}/health")
    return written()


def test_an_answer_has_an_id_its_own_or_the_one_that_came(server: FakeServer) -> None:
    answer = httpx.get(f"{server.url}/health")
    assert answer.headers["x-request-id"].startswith("req_")
    assert httpx.get(f"{server.url}/nowhere").headers["x-request-id"] != answer.headers["x-request-id"]
    given = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    for hostile in ("a b", "a" * 200, 'x"y', "a\tb"):
        answer = httpx.get(f"{server.url}/health", headers={"X-Request-Id": hostile})
        assert answer.headers["x-request-id"].startswith("req_")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as api:
        assert str(api.models.list()._request_id).startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_without_what_was_said(server: FakeServer, stream: bool) -> None:
    body = {"model": "fake", "prompt": "secretxyz", "max_tokens": 4, "temperature": 0, "stream": stream}
    body["top_kk"] = 3
    httpx.post(f"{server.url}/v1/completions", json=body, headers={"X-Request-Id": "one"})
    (line,) = lines(server)
    assert (line["id"], line["method"], line["path"], line["status"]) == (
        "one",
        "POST",
        "/v1/completions",
        200,
    )
    assert (line["prompt_tokens"], line["output_tokens"], line["finish"]) == (9, 4, "length")
    assert line["ignored"] == "top_kk"
    assert {"ttft_ms", "tpot_ms", "total_ms", "at", "cached_tokens"} <= line.keys()
    assert not any("secret" in text or "abcd" in text for text in LINES)


@pytest.mark.parametrize(
    ("level", "n"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0), ("off", 0)]
)
def test_levels(level: str, n: int) -> None:
    written: list[str] = []
    log = AccessLog(written.append, level)  # type: ignore[arg-type]
    with fake_server(surroundings=ServerContext((), log)) as server:
        httpx.get(f"{server.url}/health")
        httpx.get(f"{server.url}/v1/models")
        httpx.get(f"{server.url}/nowhere")
    assert len(written) == n
    assert all("id=req_" in entry and "\n" not in entry for entry in written)


def test_unknown_fields_are_named_in_the_answers_header(server: FakeServer) -> None:
    body = {
        "model": "fake",
        "prompt": "x",
        "max_tokens": 1,
        "user": "me",
        "top_kk": 1,
        "temprature": 0,
        "a\n": 1,
    }
    for stream in (False, True):
        answer = httpx.post(f"{server.url}/v1/completions", json={**body, "stream": stream})
        assert answer.headers["x-ignored-fields"] == "temprature,top_kk"
    del body["top_kk"], body["temprature"], body["a\n"]
    assert "x-ignored-fields" not in httpx.post(f"{server.url}/v1/completions", json=body).headers


def test_pages_of_named_origins_may_call(server: FakeServer) -> None:
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    allowed = httpx.options(f"{server.url}/v1/chat/completions", headers=asked)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    answer = httpx.get(f"{server.url}/v1/models", headers={"Origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    other = httpx.get(f"{server.url}/v1/models", headers={"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_health_can_be_asked_with_head(server: FakeServer, path: str) -> None:
    answer = httpx.head(f"{server.url}{path}")
    assert (answer.status_code, answer.content) == (200, b"")


def test_tokens_of_texts_and_conversations_and_back(server: FakeServer) -> None:
    said = httpx.post(f"{server.url}/tokenize", json={"prompt": "aé", "return_token_strs": True}).json()
    assert (said["count"], said["tokens"]) == (3, [97, 195, 169])
    assert said["token_strs"][0] == "a"
    assert httpx.post(f"{server.url}/detokenize", json={"tokens": said["tokens"]}).json() == {"prompt": "aé"}
    chat = httpx.post(f"{server.url}/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]) == b"<user>x<assistant>"


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("tokenize", {}, 400),
        ("tokenize", {"prompt": "a", "messages": []}, 400),
        ("tokenize", {"prompt": "a", "model": "other"}, 404),
        ("detokenize", {"tokens": [9999]}, 400),
        ("detokenize", {"tokens": [-1]}, 400),
        ("detokenize", {"tokens": "a"}, 400),
    ],
)
def test_tokens_that_cannot_be(server: FakeServer, path: str, body: object, status: int) -> None:
    assert httpx.post(f"{server.url}/{path}", json=body).status_code == status


def test_a_wrong_key_is_told_from_a_missing_one() -> None:
    with fake_server(HttpLimits(api_keys=("right",))) as server:
        missing = httpx.get(f"{server.url}/v1/models")
        wrong = httpx.get(f"{server.url}/v1/models", headers={"Authorization": "Bearer x"})
    assert (missing.status_code, wrong.status_code) == (401, 401)
    assert "is needed" in missing.json()["error"]["message"]
    assert "is wrong" in wrong.json()["error"]["message"]


def test_a_line_names_the_key_the_address_and_the_model() -> None:
    """By labels: no key is in it nor in the counters, right or wrong."""
    keys = ("secret-of-first", ApiKey("secret-of-alice", "alice"))
    told: list[str] = []
    surroundings = ServerContext(log=AccessLog(told.append, as_json=True))
    body = {"model": "fake", "prompt": "abc", "max_tokens": 2}
    with fake_server(HttpLimits(api_keys=keys), surroundings=surroundings) as server:
        for key in (*keys, "secret-that-is-wrong"):
            bearer = {"Authorization": f"Bearer {key}"}
            httpx.post(f"{server.url}/v1/completions", json=body, headers=bearer)
        server.wait_until_idle()
        counted = httpx.get(f"{server.url}/metrics", headers={"x-api-key": keys[0]}).text
    lines = [json.loads(line) for line in told if "completions" in line]

    assert [line.get("key") for line in lines] == ["key-1", "alice", None]
    assert [line.get("model") for line in lines] == ["fake", "fake", None]
    assert {line["address"] for line in lines} == {"127.0.0.1"}
    assert "phasewise_generated_tokens_total 4.0" in counted
    assert "secret" not in counted + "".join(told)


def test_a_refused_request_names_its_model_unless_that_is_a_stranger_s_word(server: FakeServer) -> None:
    for named, prompt in (("fake", "a" * 300_000), ("such\nas", "a")):
        body = {"model": named, "prompt": prompt, "max_tokens": 1}
        assert 400 <= httpx.post(f"{server.url}/v1/completions", json=body).status_code < 500

    assert [line.get("model") for line in lines(server, 2)] == ["fake", None]


@given(st.text(max_size=20))
def test_no_name_ends_a_field_of_a_line(name: str) -> None:
    """The names of models are those of files."""
    lines: list[str] = []
    record = Record("id", "POST", "/v1/completions", 0, datetime.now(UTC), model=name, adapter=name)
    AccessLog(lines.append).ended(record)

    (line,) = lines
    assert line.isprintable()
    names = re.findall(r' (\w+)=(?:"(?:[^"\\]|\\.)*"|[^ "]*)(?= |$)', line)
    assert names == ["id", *(["model", "adapter"] if name else []), "total_ms"]


def test_cached_tokens_are_told(server: FakeServer) -> None:
    body = {"model": "fake", "prompt": "q" * 200, "max_tokens": 1}
    first = httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]
    again = httpx.post(f"{server.url}/v1/completions", json=body).json()["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert 100 < again["prompt_tokens_details"]["cached_tokens"] < 200


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([{"role": "usr", "content": "a"}], "'user'"),
        ([{"role": "user"}], "needs a content"),
        ([{"role": "user", "content": None}], "needs a content"),
        ([{"role": "user", "content": "a", "tool_calls": [
            {"id": "a", "function": {"name": "f", "arguments": "{}"}}]}], "role assistant"),
    ],
)  # fmt: skip
def test_messages_that_say_nothing_are_refused(server: FakeServer, messages: object, says: str) -> None:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json={"model": "fake", "messages": messages})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages"


def test_lines_go_to_a_file_which_can_be_moved_away(tmp_path: Path) -> None:
    path = tmp_path / "access.log"
    said: list[str] = []
    with open_log(Logging(path), said.append) as (lines, _):
        lines.write(lambda: b"one\n")
        while not path.read_text():
            pass
        path.rename(tmp_path / "old.log")
        lines.reopen()
        lines.write(lambda: b"two\n")
    assert (tmp_path / "old.log").read_text() == "one\n"
    assert path.read_text() == "two\n"
    (tmp_path / "link").symlink_to(path)
    for impossible in (tmp_path / "no" / "log", tmp_path / "link"):
        with (
            pytest.raises(ServingError, match="cannot be written"),
            open_log(Logging(impossible), said.append),
        ):
            pass
    assert said == [f"the access log is opened anew: {path}"]

"""Bad input gets the right status and OpenAI's shape, always."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from phasewise.serving.http.transport.listening import CannotListen, TcpAddress
from tests.support.models.encoder_models import write_encoder
from tests.support.servers.fake_embedding import embedding_server
from tests.support.servers.fake_server import CONTEXT, FakeServer, fake_server


def post(server: FakeServer, body: object, path: str = "/v1/completions") -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(server.url + path, content=content, timeout=60)


def refusal(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after checking what must hold for every one."""
    assert response.status_code == status, response.text
    fields = response.json()
    assert set(fields) == {"error"}
    error = fields["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    return dict(error)


def completion(**fields: object) -> dict[str, object]:
    return {"model": "fake", "prompt": "a", **fields}


def chat(**fields: object) -> dict[str, object]:
    return {"model": "fake", "messages": [{"role": "user", "content": "a"}], **fields}


@pytest.mark.many
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**30]}, "prompt"),
        ({"model": 3}, "model"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 1e300}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 2}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"stop": 3}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": "a" * 300}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"seed": "x"}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"echo": "yes"}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
    ],
    ids=str,
)
def test_wrong_fields_of_a_completion(server: FakeServer, fields: dict[str, object], param: str) -> None:
    error = refusal(post(server, completion(**fields)), 400)

    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
    ids=str,
)
def test_wrong_fields_of_a_chat(server: FakeServer, fields: dict[str, object], param: str) -> None:
    assert refusal(post(server, chat(**fields), "/v1/chat/completions"), 400)["param"] == param


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"model": "fake", "prompt": "\xff"}',
        b'{"model": "fake", "prompt": "a", "temperature": NaN}',
        b'{"model": "fake", "prompt": "a", "temperature": Infinity}',
        b'{"model": "fake", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    ],
    ids=lambda raw: repr(raw[:40]),
)
def test_bodies_that_are_no_request(server: FakeServer, raw: bytes) -> None:
    refusal(post(server, raw), 400)
    refusal(post(server, raw, "/v1/chat/completions"), 400)


def test_half_a_surrogate_pair_is_no_crash(server: FakeServer) -> None:
    response = post(server, b'{"model": "fake", "prompt": "\\ud800", "max_tokens": 1}')

    assert response.status_code in (200, 400)


def test_a_body_of_ten_megabytes(server: FakeServer) -> None:
    body = json.dumps(completion(prompt="a" * 10_000_000)).encode()

    assert refusal(post(server, body), 413)["code"] == "body_too_large"
    chunked = httpx.post(
        f"{server.url}/v1/completions",
        content=(body[offset : offset + 65536] for offset in range(0, len(body), 65536)),
    )
    refusal(chunked, 413)


def test_the_context_can_be_used_to_its_last_token(server: FakeServer) -> None:
    response = post(server, completion(prompt="a" * (CONTEXT - 9), max_tokens=9))

    assert response.json()["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_a_wrong_method(server: FakeServer, method: str) -> None:
    response = httpx.request(method, f"{server.url}/v1/completions")

    assert refusal(response, 405)["message"].endswith("use POST")
    assert "POST" in response.headers["Allow"]


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/engines", "/v1/completions/", "/docs", "/%00", "/v1/../etc/passwd"]
)
def test_an_unknown_path(server: FakeServer, path: str) -> None:
    refusal(httpx.get(server.url + path), 404)


def test_a_port_in_use_is_one_line() -> None:
    with TcpAddress("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(CannotListen, match="is in use") as caught:
            TcpAddress("127.0.0.1", port_of(taken))

    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 1


def test_of_two_that_bind_at_once_one_listens() -> None:
    with TcpAddress("127.0.0.1", 0) as first, TcpAddress("127.0.0.1", port_of(first)) as second:
        first.listen()
        with pytest.raises(CannotListen, match="is in use"):
            second.listen()


def port_of(address: TcpAddress) -> int:
    return urlsplit(address.url).port or 0


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1", "", "a b", "x" * 300])
def test_a_host_that_is_not_ours_is_one_line(host: str) -> None:
    with pytest.raises(CannotListen, match="address"):
        TcpAddress(host, 0)


MESSAGES = [{"role": "user", "content": "a"}]


def worded(server: FakeServer, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}{path}", json={"model": "fake", **body})
    assert answer.status_code == status, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert "\n" not in error["message"]
    assert "()" not in error["message"]  # no name of a function of ours
    return error


LONG = "a" * (CONTEXT + 1)


@pytest.mark.many
@pytest.mark.parametrize("most", [None, 100])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        ("/v1/completions", "prompt", LONG),
        ("/v1/chat/completions", "messages", [{"role": "user", "content": LONG}]),
        ("/v1/responses", "input", LONG),
    ],
)
def test_too_long_a_prompt_is_refused_in_openais_words(
    path: str, field: str, value: object, stream: bool, most: int | None
) -> None:
    with fake_server(model=lambda model: replace(model, max_prompt_tokens=most)) as server:
        error = worded(server, path, **{field: value}, stream=stream)

    assert (error["param"], error["code"]) == (field, "context_length_exceeded")
    assert f"This model's maximum context length is {CONTEXT} tokens" in error["message"]  # litellm's sign


def test_what_the_engine_refuses_has_the_words_too() -> None:
    """A KV cache that holds less than the context."""
    with fake_server(model=lambda model: replace(model, context_length=100 * CONTEXT)) as server:
        long = "a" * (5 * CONTEXT)
        error = worded(server, "/v1/chat/completions", messages=[{"role": "user", "content": long}])

    assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
    assert "This model's maximum context length is" in error["message"]


@pytest.mark.parametrize("content", [["a"], [["a"]], [1], 1, {"text": "a"}, True])
def test_a_content_of_no_kind_says_what_one_is(server: FakeServer, content: object) -> None:
    error = worded(server, "/v1/chat/completions", messages=[{"role": "user", "content": content}])

    assert error["message"].startswith("messages.0.content: it must be a text or a list of parts")


def message_of(worded: httpx.Response) -> str:
    """The message, in the shape of Ollama's API or of OpenAI's."""
    error = worded.json()["error"]
    return str(error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1", "base_url of a client"),
        ("/v1/", "base_url of a client"),
        ("/docs", "/openapi.json"),
        ("/redoc", "/openapi.json"),
        ("/", "POST /v1/chat/completions"),
        ("/api/pull", "/api/generate"),
        ("/api/create", "/api/tags"),
        ("/v1/complete", "POST /v1/chat/completions"),
        ("/v1/v1/chat/completions", "use /v1/chat/completions"),
        ("/v1/chat/completions/", "use /v1/chat/completions"),
        ("/v1/health", "use /health"),
        ("/v1/embeddings", "--embed-model"),
        ("/nowhere", "/openapi.json"),
    ],
)
def test_a_wrong_path_has_one_sentence_that_helps(server: FakeServer, path: str, says: str) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, f"{server.url}{path}")
        assert answer.status_code == 404
        assert says in message_of(answer)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("/v1/chat/completions", "makes vectors and no text: POST /v1/embeddings"),
        ("/v1/responses", "makes vectors and no text"),
        ("/api/embedding", "/openapi.json"),
    ],
)
def test_so_has_that_of_a_server_that_embeds(vectors: Path, path: str, says: str) -> None:
    with embedding_server(vectors) as server:
        answer = httpx.post(f"{server.url}{path}", json={})
    assert answer.status_code == 404
    assert says in message_of(answer)


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("words") / "bert", "bert")


def test_models_that_are_served_for_something_else_say_so(vectors: Path) -> None:
    with (
        embedding_server(vectors) as beside,
        fake_server(embeddings=beside.served) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as api,
    ):
        with pytest.raises(openai.NotFoundError, match="makes vectors and no text: use /v1/embeddings"):
            api.chat.completions.create(model="tiny", messages=MESSAGES)  # type: ignore[arg-type]
        with pytest.raises(openai.NotFoundError, match="no vectors: use /v1/chat/completions"):
            api.embeddings.create(model="fake", input="a")
        with pytest.raises(openai.NotFoundError, match="is not served here"):
            api.embeddings.create(model="nothing", input="a")

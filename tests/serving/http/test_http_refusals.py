"""Bad input gets the right status and OpenAI's shape, always."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from phasewise.serving.http.transport.listening import CannotListen, TcpAddress
from tests.support.servers.fake_server import CONTEXT, FakeServer


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
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"seed": "x"}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"echo": "yes"}, "echo"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
    ],
    ids=str,
)
def test_wrong_fields_of_a_completion(server: FakeServer, fields: dict[str, object], param: str) -> None:
    error = refusal(post(server, completion(**fields)), 400)

    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_a_bias_for_a_token_that_is_not_there(server: FakeServer) -> None:
    assert refusal(post(server, completion(logit_bias={"999": 1})), 400)["param"] == "logit_bias"


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


def test_an_unknown_model(server: FakeServer) -> None:
    for path, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        error = refusal(post(server, body(model="gpt-9"), path), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert "gpt-9" in error["message"]


@pytest.mark.parametrize(("n_prompt", "max_tokens"), [(CONTEXT, 1), (CONTEXT + 1, 1), (100_000, 5)])
@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt(server: FakeServer, n_prompt: int, max_tokens: int, stream: bool) -> None:
    body = completion(prompt="a" * n_prompt, max_tokens=max_tokens, stream=stream)

    error = refusal(post(server, body), 400)

    assert error["code"] == "context_length_exceeded"
    assert str(n_prompt) in error["message"]


def test_the_context_can_be_used_to_its_last_token(server: FakeServer) -> None:
    response = post(server, completion(prompt="a" * (CONTEXT - 9), max_tokens=9))

    assert response.json()["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
def test_a_wrong_method(server: FakeServer, method: str) -> None:
    response = httpx.request(method, f"{server.url}/v1/completions")

    refusal(response, 405)
    assert "POST" in response.headers["Allow"]


@pytest.mark.parametrize(
    "path", ["/", "/v1", "/v1/engines", "/v1/completions/", "/docs", "/%00", "/v1/../etc/passwd"]
)
def test_an_unknown_path(server: FakeServer, path: str) -> None:
    refusal(httpx.get(server.url + path), 404)


def test_bytes_that_are_no_http(server: FakeServer) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as raw:
        raw.sendall(b"\x00\x01\x02 nonsense\r\n\r\n")
        assert raw.recv(1000).startswith(b"HTTP/1.1 400")
    assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_body_that_never_comes_holds_nothing(server: FakeServer) -> None:
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname or "", address.port or 0), timeout=60) as raw:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{")
    assert post(server, completion(max_tokens=1)).status_code == 200


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

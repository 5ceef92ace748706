"""HTTP/1 connections of a bare application: Expect, HEAD, HTTP/1.0, pipelining, applications that fail."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from phasewise.serving.http.http_settings import HttpLimits
from tests.support.servers.bare_server import bare_server
from tests.support.servers.rude_clients import connect, read_to_end


class Application(FastAPI):
    """Answers by path, with what ASGI has and nothing else."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        if scope["path"] != "/unread":
            more = True
            while more:
                message: Message = await receive()
                body, more = body + message.get("body", b""), message.get("more_body", False)
        if scope["path"] == "/fails":
            raise ValueError("secret")
        if scope["path"] == "/silent":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"got %d" % len(body), "more_body": True})
        if scope["path"] == "/breaks":
            raise ValueError("secret")
        await send({"type": "http.response.body"})


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with bare_server(Application(), HttpLimits(keep_alive_s=0.3)) as running:
        yield running.url


def said(url: str, *sent: bytes) -> bytes:
    with connect(url) as raw:
        raw.sendall(b"".join(sent))
        return read_to_end(raw)


def request(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, "Host: a", *headers, "", ""]).encode()


def test_a_body_is_asked_for_once_it_is_wanted(url: str) -> None:
    with connect(url) as raw:
        raw.sendall(request("POST / HTTP/1.1", "Content-Length: 5", "Expect: 100-continue"))
        assert raw.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        raw.sendall(b"hello")
        assert b"got 5" in read_to_end(raw)


def test_a_body_that_nobody_reads_is_not_asked_for(url: str) -> None:
    sent = request("POST /unread HTTP/1.1", "Content-Length: 5", "Expect: 100-continue")

    with connect(url) as raw:
        raw.sendall(sent)
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")


def test_head_has_no_body(url: str) -> None:
    head, _, body = said(url, request("HEAD / HTTP/1.1")).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200")
    assert b"\r\ndate: " in head
    assert body == b""


def test_http_1_0_has_no_chunks_and_ends_with_its_connection(url: str) -> None:
    head, _, body = said(url, request("GET / HTTP/1.0")).partition(b"\r\n\r\n")

    assert b"connection: close" in head.lower()
    assert b"chunked" not in head.lower()
    assert body == b"got 0"


def test_pipelined_requests_are_answered_in_order(url: str) -> None:
    sent = [request("POST / HTTP/1.1", f"Content-Length: {n}") + b"x" * n for n in (1, 2, 3)]

    answers = said(url, *sent).split(b"HTTP/1.1 200")

    assert [answer[answer.index(b"got") :][:5] for answer in answers[1:]] == [b"got 1", b"got 2", b"got 3"]


@pytest.mark.parametrize(
    ("path", "status"),
    [("/fails", b"HTTP/1.1 500"), ("/silent", b"HTTP/1.1 500"), ("/breaks", b"HTTP/1.1 200")],
)
def test_an_application_that_fails_is_told_and_logged(
    url: str, path: str, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "phasewise.http"):
        answer = said(url, request(f"GET {path} HTTP/1.1"))

    assert answer.startswith(status)
    assert b"secret" not in answer
    assert answer.endswith(b"\r\n0\r\n\r\n") == (path != "/breaks")  # what breaks off has no last chunk
    assert [record.name for record in caplog.records] == ["phasewise.http"]

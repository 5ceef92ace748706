"""All reads share one buffer: no connection gets another's bytes, and reading takes no memory."""

from __future__ import annotations

import socket
import ssl
import tracemalloc
from pathlib import Path

import httpx

from phasewise.serving.http.transport.listening import TcpAddress, tls_context
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import completion, connect

TLS = Path(__file__).parents[3] / "data" / "tls"
ASYNCIO_READS_BYTES = 256 * 1024
"""Bytes of a read of asyncio where the protocol gives it no buffer."""
PADDING = 300_000
"""More than one read takes, in a field that is not read."""


def answer_on(raw: socket.socket) -> bytes:
    """The body of one answer, which is shorter than a read."""
    said = b""
    while b"\r\n\r\n" not in said or not said.endswith(b"}"):
        part = raw.recv(65536)
        assert part, said
        said += part
    return said.partition(b"\r\n\r\n")[2]


def test_bodies_that_come_in_turns_stay_apart(server: FakeServer) -> None:
    letters = "abcdefgh"
    sent = [
        completion(user=letter * PADDING, prompt=letter, max_tokens=3, temperature=0) for letter in letters
    ]
    senders = [connect(server.url) for _ in letters]
    for start in range(0, max(map(len, sent)), 10_000):
        for raw, whole in zip(senders, sent, strict=True):
            raw.sendall(whole[start : start + 10_000])

    answers = [answer_on(raw) for raw in senders]

    alphabet = "abcdefghijkl"
    for place, answer in enumerate(answers):
        assert f'"text":"{alphabet[place + 1 : place + 4]}"'.encode() in answer, answer
    for raw in senders:
        raw.close()


def test_a_large_body_over_tls_comes_whole() -> None:
    context = tls_context(TLS / "cert.pem", TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
    asked = {"model": "fake", "user": "x" * PADDING, "prompt": "a", "max_tokens": 3, "temperature": 0}
    with (
        fake_server(address=TcpAddress("127.0.0.1", 0, secure=True), tls=context) as server,
        httpx.Client(verify=trusting) as client,
    ):
        answer = client.post(f"{server.url}/v1/completions", json=asked)

    assert answer.json()["choices"][0]["text"] == "bcd"


def test_reading_a_request_takes_no_memory_beyond_what_came(server: FakeServer) -> None:
    """A read into fresh memory would take 256 KiB for these few bytes; holes that large the heap has none."""
    with connect(server.url) as raw:
        raw.sendall(completion(max_tokens=3))
        answer_on(raw)
        tracemalloc.start()
        try:
            raw.sendall(completion(max_tokens=3))
            answer_on(raw)
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()

    assert most < ASYNCIO_READS_BYTES

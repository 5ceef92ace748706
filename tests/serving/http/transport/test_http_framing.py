"""Requests are cut the same however their bytes come, and refused where two readers could disagree."""

from __future__ import annotations

import itertools
import re
import socket
import ssl
import tracemalloc
from pathlib import Path

import h11
import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.transport.framing import FREE_CHUNKS, MIN_MEAN_CHUNK_BYTES, Framing
from phasewise.serving.http.transport.listening import TcpAddress, tls_context
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import completion, connect

MAX_HEAD = 16 * 1024
POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def sized(body: bytes) -> bytes:
    return POST + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


def chunked(chunks: list[bytes], extension: bytes, trailer: bytes) -> bytes:
    lines = b"".join(b"%x%b\r\n%b\r\n" % (len(chunk), extension, chunk) for chunk in chunks if chunk)
    return CHUNKED + lines + b"0\r\n" + trailer + b"\r\n"


def read(parts: list[bytes]) -> list[tuple[bytes, bytes]]:
    """(Target, body) of every request that h11 sees, bytes coming as in `parts`."""
    framing, seen = Framing(MAX_HEAD), []
    conn = h11.Connection(h11.SERVER)
    target, body = b"", b""
    for part in parts:
        framing.add(part)
        while (piece := framing.next_piece()) is not None:
            conn.receive_data(piece)
            while not isinstance(event := conn.next_event(), type(h11.NEED_DATA)):
                if isinstance(event, h11.Request):
                    target, body = bytes(event.target), b""
                elif isinstance(event, h11.Data):
                    body += event.data
                elif isinstance(event, h11.EndOfMessage):
                    seen.append((target, body))
                    conn.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    conn.send(h11.EndOfMessage())
                    conn.start_next_cycle()
    return seen


bodies = st.binary(max_size=200)
messages = st.one_of(
    st.builds(lambda body: (sized(body), body), bodies),
    st.builds(
        lambda chunks, extension, trailer: (chunked(chunks, extension, trailer), b"".join(chunks)),
        st.lists(bodies, max_size=6),
        st.sampled_from([b"", b";a=b", b" ; x"]),
        st.sampled_from([b"", b"X-Sum: 1\r\n"]),
    ),
    st.just((b"GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n", b"")),
)


@given(sent=st.lists(messages, min_size=1, max_size=4), cuts=st.lists(st.integers(0, 2000), max_size=12))
def test_bytes_mean_the_same_however_they_come(sent: list[tuple[bytes, bytes]], cuts: list[int]) -> None:
    whole = b"".join(message for message, _ in sent)
    ends = [0, *sorted(cut % (len(whole) + 1) for cut in cuts), len(whole)]
    parts = [whole[start:end] for start, end in itertools.pairwise(ends)]
    wanted = [(b"/v1/completions", body) for _, body in sent]

    assert read(parts) == wanted
    assert read([whole[index : index + 1] for index in range(len(whole))]) == wanted


LONG_URL = b"GET /" + b"a" * 60_000
REFUSED = {
    "both framings": (POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "both, the other way round": (POST + b"Transfer-Encoding:chunked\r\ncontent-length:\t3\r\n\r\nabc", 400),
    "two lengths": (POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd", 400),
    "the same length twice": (POST + b"Content-Length: 3, 3\r\n\r\nabc", 400),
    "a signed length": (POST + b"Content-Length: +3\r\n\r\nabc", 400),
    "an endless length": (POST + b"Content-Length: 1" + b"0" * 40 + b"\r\n\r\n", 400),
    "gzip in chunks": (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 400),
    "chunks twice": (POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 400),
    "chunks in HTTP/1.0": (CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n", 400),
    "bare LF": (b"GET / HTTP/1.1\nHost: a\n\n", 400),
    "one bare LF": (b"GET / HTTP/1.1\r\nHost: a\nX: b\r\n\r\n", 400),
    "a bare CR": (b"GET / HTTP/1.1\r\nHost: a\rX: b\r\n\r\n", 400),
    "a folded header": (b"GET / HTTP/1.1\r\nHost: a\r\n b\r\n\r\n", 400),
    "a fold by tab": (b"GET / HTTP/1.1\r\nHost: a\r\n\tb\r\n\r\n", 400),
    "a fold before any header": (b"GET / HTTP/1.1\r\n Host: a\r\n\r\n", 400),
    "another version": (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 400),
    "no version": (b"GET /\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    "an empty line first": (b"\r\nGET / HTTP/1.1\r\nHost: a\r\n\r\n", 400),
    "a long URL": (LONG_URL + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
    "a long URL without end": (LONG_URL, 414),
    "a large head": (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD + b"\r\n\r\n", 431),
    "a large head without end": (b"GET / HTTP/1.1\r\nX: " + b"a" * MAX_HEAD, 431),
    "many headers": (b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 150 + b"\r\n", 431),
    "a chunk longer than it says": (CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n", 400),
    "a chunk that ends in LF": (CHUNKED + b"3\r\nabc\n0\r\n\r\n", 400),
    "a size that ends in LF": (CHUNKED + b"3\nabc\r\n0\r\n\r\n", 400),
    "no size": (CHUNKED + b"\r\nabc", 400),
    "a negative size": (CHUNKED + b"-3\r\nabc\r\n", 400),
    "a size in Python's manner": (CHUNKED + b"0x3\r\nabc\r\n", 400),
    "an endless size": (CHUNKED + b"1" * 16 + b"\r\nabc\r\n", 400),
    "an endless extension": (CHUNKED + b"3;" + b"a" * 300, 400),
    "a trailer that is none": (CHUNKED + b"0\r\nabc\r\n\r\n", 400),
    "large trailers": (CHUNKED + b"0\r\n" + b"a: b\r\n" * 1000, 431),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("at_once", [1, 7, 100_000])
def test_what_two_readers_could_read_differently_is_refused(name: str, at_once: int) -> None:
    sent, status = REFUSED[name]

    with pytest.raises(ApiError) as refusal:
        read([sent[start : start + at_once] for start in range(0, len(sent), at_once)])

    assert refusal.value.status == status
    assert refusal.value.closes


def test_a_body_of_very_small_chunks_is_refused_early() -> None:
    framing = Framing(MAX_HEAD)
    framing.add(CHUNKED)
    framing.next_piece()
    n_sent = 0

    def send_on() -> None:
        nonlocal n_sent
        while n_sent < 100_000:
            framing.add(b"1\r\n,\r\n" * 100)
            n_sent += 100
            while framing.next_piece() is not None:
                pass

    with pytest.raises(ApiError) as refusal:
        send_on()

    assert refusal.value.code == "chunks_too_small"
    assert FREE_CHUNKS <= n_sent <= FREE_CHUNKS + 300


@pytest.mark.parametrize("n_bytes", [MIN_MEAN_CHUNK_BYTES, MIN_MEAN_CHUNK_BYTES + 1, 1000])
def test_chunks_of_a_fair_size_are_never_too_many(n_bytes: int) -> None:
    n_chunks = 3 * FREE_CHUNKS
    sent = CHUNKED + b"%x\r\n%b\r\n" % (n_bytes, b"," * n_bytes) * n_chunks + b"0\r\n\r\n"

    assert read([sent]) == [(b"/v1/completions", b"," * n_bytes * n_chunks)]


def test_one_piece_is_a_bounded_piece_of_work() -> None:
    """The event loop has others waiting, so 64 KiB of chunks are not decoded in one go."""
    framing = Framing(MAX_HEAD)
    framing.add(CHUNKED + b"1\r\n,\r\n" * FREE_CHUNKS)
    framing.next_piece()

    while piece := framing.next_piece():
        size = re.match(rb"([0-9a-f]+)\r\n", piece)
        assert size
        assert int(size[1], 16) <= FREE_CHUNKS // 4


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

"""A running server bounds what one connection, one address and all unfinished bodies take from it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import shutil
import socket
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport import connection
from phasewise.serving.http.transport.connections import MOST_TURNED_AWAY
from phasewise.serving.http.transport.listening import TcpAddress, tls_context
from tests.serving.http.transport.test_http_connections import metric
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import ENOUGH_S, completion, connect, read_to_end, until

MIB = 1 << 20
TLS = Path(__file__).parents[3] / "data" / "tls"
LARGE = {"model": "fake", "prompt": "a", "user": "x" * 3 * MIB}
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def locked() -> Iterator[FakeServer]:
    with fake_server(HttpLimits(api_keys=("k",))) as running:
        yield running


def said(raw: socket.socket) -> tuple[int, dict[str, object]]:
    """Status and error of the answer with which a connection ends."""
    head, _, body = read_to_end(raw).partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


# ---- tiny chunks -----------------------------------------------------------------------------------------


def test_a_body_of_one_byte_chunks_ends_its_connection(server: FakeServer) -> None:
    with connect(server.url) as raw:
        raw.sendall(CHUNKED + b"1\r\n,\r\n" * 4000)
        status, error = said(raw)

    assert (status, error["code"]) == (400, "chunks_too_small")


@pytest.mark.parametrize("body", [b"1\r\n,\r\n" * 4000, b"", b"5\r\nhello\r\n0\r\n\r\n"])
def test_without_a_key_a_connection_ends_with_its_first_request(locked: FakeServer, body: bytes) -> None:
    with connect(locked.url) as raw:
        raw.sendall(CHUNKED + body)
        status, error = said(raw)

    assert (status, error["code"]) == (401, "invalid_api_key")


def test_a_wrong_key_before_a_large_body_is_told(locked: FakeServer) -> None:
    """A reset, in place of the answer, would look like a fault of the network."""
    answer = httpx.post(f"{locked.url}/v1/completions", json=LARGE, headers={"Authorization": "Bearer wrong"})

    assert answer.status_code == 401
    assert "the API key is wrong" in answer.json()["error"]["message"]
    assert answer.headers["connection"] == "close"


def test_over_tls_a_client_that_still_sends_reads_its_refusal_and_the_connection_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """TLS cannot close one half: the server reads on for a while, until the client has closed."""
    monkeypatch.setattr(connection, "_LINGER_S", ENOUGH_S)  # a busy machine's client takes its time
    context = tls_context(TLS / "cert.pem", TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
    place = TcpAddress("127.0.0.1", 0, secure=True)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % (9 * MIB)
    with fake_server(HttpLimits(api_keys=("k",)), address=place, tls=context) as server:
        with connect(server.url) as link, trusting.wrap_socket(link, server_hostname="localhost") as raw:
            raw.sendall(head)
            time.sleep(0.1)  # it is refused by now
            for _ in range(8):
                raw.sendall(b"x" * MIB)
                time.sleep(0.01)
            assert raw.recv(65536).startswith(b"HTTP/1.1 401")
        until(lambda: not server.connections.open, "a connection that was refused stays open")


@pytest.mark.parametrize("sent", [b"", b"\x16", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"])
def test_half_a_handshake_ends_its_connection_and_others_are_answered(sent: bytes) -> None:
    context = tls_context(TLS / "cert.pem", TLS / "key.pem")
    place = TcpAddress("127.0.0.1", 0, secure=True)
    trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
    with (
        fake_server(HttpLimits(header_s=0.5), address=place, tls=context) as server,
        httpx.Client(verify=trusting) as client,
        connect(server.url) as raw,
    ):
        raw.sendall(sent)
        url = f"{server.url.replace('127.0.0.1', 'localhost')}/health"
        until(lambda: is_answered(client, url), "another is not answered")
        assert read_to_end(raw) == b""


def is_answered(client: httpx.Client, url: str) -> bool:
    """Of a client that may be slow itself: on a busy machine its own handshake may take too long."""
    try:
        return client.get(url).status_code == 200
    except httpx.TransportError:
        return False


def test_requests_without_pause_are_read_in_turns(server: FakeServer) -> None:
    """Pipelined without end: all are answered, in order, though their connection has to wait."""
    n_requests = 150
    with connect(server.url) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n" * n_requests)
        answers = b""
        while answers.count(b'{"status":"ok"}') < n_requests:
            part = raw.recv(65536)
            assert part
            answers += part

    assert answers.count(b"HTTP/1.1 200") == n_requests


def test_what_nobody_reads_of_a_body_is_read_within_a_bound(server: FakeServer) -> None:
    """A route that does not exist answers at once; a long body that follows ends the connection."""
    with connect(server.url) as raw:
        raw.sendall(b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 30000000\r\n\r\n")
        head = raw.recv(65536)
        assert head.startswith(b"HTTP/1.1 404")
        with pytest.raises(ConnectionError):
            raw.sendall(b"x" * 30_000_000)


def test_a_short_body_that_nobody_reads_leaves_the_connection_in_use(server: FakeServer) -> None:
    with connect(server.url) as raw:
        raw.sendall(b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 3000\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}"):
            answer += raw.recv(65536)
        assert answer.startswith(b"HTTP/1.1 404")
        raw.sendall(b"x" * 3000 + b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")


# ---- unfinished bodies -----------------------------------------------------------------------------------


def test_unfinished_bodies_share_a_total_and_the_first_makes_room() -> None:
    limits = HttpLimits(max_unfinished_bytes=4 * MIB)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % MIB
    with fake_server(limits) as server:
        unfinished = server.bodies.unfinished
        senders = [connect(server.url) for _ in range(12)]
        for raw in senders:
            raw.sendall(head + b"x" * (MIB - 1))
        rejected = 'phasewise_requests_rejected_total{reason="bodies_too_large"}'
        until(lambda: metric(server, rejected) == 8, "eight of twelve make room for the others")
        until(lambda: unfinished.n_bytes == 4 * (MIB - 1), "four have room")
        large = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "fake", "prompt": "a", "max_tokens": 3, "temperature": 0, "user": "x" * 2 * MIB},
        )
        assert large.json()["choices"][0]["text"] == "bcd"
        until(lambda: metric(server, rejected) >= 10, "two MiB more needed no room")
        ended = [raw for raw in senders if select.select([raw], [], [], 0)[0]]
        assert {(status, error["code"]) for status, error in map(said, ended)} == {(503, "bodies_too_large")}
        for raw in senders:
            raw.close()
        until(lambda: unfinished.n_bytes == 0, "memory of closed connections is still held")


def test_one_address_has_not_all_connections() -> None:
    with fake_server(HttpLimits(max_connections=10, max_connections_per_address=3)) as server:
        held = [connect(server.url) for _ in range(3)]
        until(lambda: len(server.connections.open) == 3, "they were not accepted")
        with connect(server.url) as one_more:
            assert said(one_more)[0] == 503
        held.pop().close()
        until(lambda: len(server.connections.open) == 2, "it is still counted")
        assert httpx.get(f"{server.url}/health").status_code == 200
        for raw in held:
            raw.close()
        until(lambda: not server.connections.n_by_address, "addresses are kept")


# ---- hosts and types of content --------------------------------------------------------------------------

LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]"})


@pytest.fixture(scope="module")
def local() -> Iterator[FakeServer]:
    with fake_server(HttpLimits(allowed_hosts=LOCAL)) as running:
        yield running


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:8000", "[::1]:8000"])
def test_names_of_this_machine_are_answered(local: FakeServer, host: str) -> None:
    assert httpx.get(f"{local.url}/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.2", "", "[::2]", "[", ":80"],
)
@pytest.mark.parametrize("path", ["/v1/models", "/health", "/nowhere"])
def test_a_page_of_another_host_is_not_answered(local: FakeServer, host: str, path: str) -> None:
    answer = httpx.get(f"{local.url}{path}", headers={"Host": host})

    assert (answer.status_code, answer.json()["error"]["code"]) == (421, "host_not_allowed")


@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain; a=application/json", "multipart/form-data", "application/jsonp", ""]
)
@pytest.mark.parametrize("sender", [{"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}])
def test_what_a_page_may_post_without_asking_is_not_taken_for_json(
    server: FakeServer, kind: str, sender: dict[str, str]
) -> None:
    body = completion(max_tokens=1).partition(b"\r\n\r\n")[2]
    headers = {"Content-Type": kind, **sender}
    answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Origin": "http://evil.example"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 200),
        ({"Content-Type": "application/octet-stream"}, 200),
        ({"Content-Type": "text/plain"}, 200),
        ({"Origin": "null", "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Sec-Fetch-Site": "same-site", "Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Origin": "http://evil.example", "Content-Type": "application/json"}, 200),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, 200),
        ({"Content-Type": "application/vnd.api+json"}, 200),
    ],
)
def test_json_without_its_name_is_taken_from_all_but_browsers(
    server: FakeServer, headers: dict[str, str], status: int
) -> None:
    body = completion(max_tokens=1).partition(b"\r\n\r\n")[2]

    assert httpx.post(f"{server.url}/v1/completions", content=body, headers=headers).status_code == status


TIMES = 20
LARGE_BODY = b"x" * (3 << 20)


@contextlib.contextmanager
def full(server: FakeServer) -> Iterator[str]:
    """Its URL, while it holds as many connections as it may."""
    most = server.connections.limits.max_connections
    held = [connect(server.url) for _ in range(most)]
    until(lambda: len(server.connections.open) == most, "they were not accepted")
    yield server.url
    for raw in held:
        raw.close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with fake_server(HttpLimits(max_connections=4, header_s=600.0)) as server, full(server) as url:
        yield url


@pytest.mark.parametrize("body", [None, b"{}", LARGE_BODY], ids=["get", "small", "large"])
def test_httpx(url: str, body: bytes | None) -> None:
    for _ in range(TIMES):
        said = httpx.request("GET" if body is None else "POST", f"{url}/v1/completions", content=body)
        assert said.status_code == 503
        assert said.json()["error"]["code"] == "too_many_connections"
        assert int(said.headers["retry-after"]) > 0


@pytest.mark.parametrize("body", [None, b"{}", LARGE_BODY], ids=["get", "small", "large"])
def test_aiohttp_with_all_at_once(url: str, body: bytes | None) -> None:
    async def ask(session: aiohttp.ClientSession) -> int:
        method = "GET" if body is None else "POST"
        async with session.request(method, f"{url}/v1/completions", data=body) as said:
            assert (await said.json())["error"]["code"] == "too_many_connections"
            return said.status

    async def all_at_once() -> list[int]:
        async with aiohttp.ClientSession() as session:
            return await asyncio.gather(*(ask(session) for _ in range(TIMES)))

    assert asyncio.run(all_at_once()) == [503] * TIMES


NODE = """
const http = require('http');
const body = Buffer.alloc(Number(process.argv[2]), 'x');
const url = process.argv[1] + '/v1/completions';
const plain = () => new Promise((done) => {
  const one = http.request(url, { method: body.length ? 'POST' : 'GET', agent: false }, (said) => {
    said.resume(); said.on('end', () => done(said.statusCode));
  });
  one.on('error', (error) => done(error.code));
  one.end(body.length ? body : undefined);
});
const fetched = () => fetch(url, body.length ? { method: 'POST', body } : {}).then(
  async (said) => { await said.text(); return said.status; }, (error) => String(error.cause || error));
(async () => {
  const found = [];
  for (let i = 0; i < 20; i++) found.push(await plain(), await fetched());
  console.log(JSON.stringify(found));
})();
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="Node is not installed")
@pytest.mark.many
@pytest.mark.parametrize("n_bytes", [len(LARGE_BODY), 0, 2], ids=["large", "get", "small"])
def test_node(url: str, n_bytes: int) -> None:
    done = subprocess.run(
        ["node", "-e", NODE, url, str(n_bytes)], capture_output=True, text=True, timeout=120, check=True
    )

    assert Counter(json.loads(done.stdout)) == {503: 2 * TIMES}


def test_those_who_say_nothing_are_few_and_do_not_stay() -> None:
    """They are not served, make room for each other, and are told at their end all the same."""
    with fake_server(HttpLimits(max_connections=4, header_s=600.0)) as server, full(server) as url:
        silent = [connect(url) for _ in range(MOST_TURNED_AWAY + 10)]
        until(lambda: len(server.connections.turned_away) == MOST_TURNED_AWAY, "they were not accepted")
        assert read_to_end(silent[0]).startswith(b"HTTP/1.1 503")
        assert httpx.get(f"{url}/health").status_code == 503
        assert len(server.connections.open) == 4
        assert read_to_end(silent[-1]).startswith(b"HTTP/1.1 503")  # its own time is over
        for raw in silent:
            raw.close()
        until(lambda: not server.connections.turned_away, "connections that have ended are kept")

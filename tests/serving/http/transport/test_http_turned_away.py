"""A connection too many reads its 503, whatever client it is: no answer before the request, no reset."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import httpx
import pytest

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport.connections import MOST_TURNED_AWAY
from phasewise.serving.http.transport.listening import TcpAddress, tls_context
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import connect, read_to_end, until

TLS = Path(__file__).parents[3] / "data" / "tls"
TIMES = 20
LARGE = b"x" * (3 << 20)


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


@pytest.mark.parametrize("body", [None, b"{}", LARGE], ids=["get", "small", "large"])
def test_httpx(url: str, body: bytes | None) -> None:
    for _ in range(TIMES):
        said = httpx.request("GET" if body is None else "POST", f"{url}/v1/completions", content=body)
        assert said.status_code == 503
        assert said.json()["error"]["code"] == "too_many_connections"
        assert int(said.headers["retry-after"]) > 0


@pytest.mark.parametrize("body", [None, b"{}", LARGE], ids=["get", "small", "large"])
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
@pytest.mark.parametrize("n_bytes", [0, 2, len(LARGE)], ids=["get", "small", "large"])
def test_node(url: str, n_bytes: int) -> None:
    done = subprocess.run(
        ["node", "-e", NODE, url, str(n_bytes)], capture_output=True, text=True, timeout=120, check=True
    )

    assert Counter(json.loads(done.stdout)) == {503: 2 * TIMES}


def test_over_tls() -> None:
    context = tls_context(TLS / "cert.pem", TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
    place = TcpAddress("127.0.0.1", 0, secure=True)
    with fake_server(HttpLimits(max_connections=2), address=place, tls=context) as server:
        url = server.url.replace("127.0.0.1", "localhost")
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(httpx.Client(verify=trusting)) for _ in range(2)]
            assert [client.get(f"{url}/health").status_code for client in held] == [200, 200]
            for body in (b"{}", LARGE):
                said = httpx.post(f"{url}/v1/completions", content=body, verify=trusting)
                assert said.status_code == 503


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


def test_a_head_that_never_ends_is_not_kept() -> None:
    limits = HttpLimits(max_connections=4, max_header_bytes=4096)
    with fake_server(limits) as server, full(server) as url, connect(url) as raw:
        with contextlib.suppress(OSError):
            raw.sendall(b"GET / HTTP/1.1\r\nx: " + b"a" * 8192)
            raw.shutdown(socket.SHUT_WR)
        assert read_to_end(raw).startswith(b"HTTP/1.1 503")

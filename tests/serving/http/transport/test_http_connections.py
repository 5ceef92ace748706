"""Connections that are idle, slow, too many or gone: they hold nothing that others need."""

from __future__ import annotations

import gc
import json
import logging
import socket
import ssl
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.types import Message, Receive, Scope, Send

from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.transport.connections import ConnectionClocks
from phasewise.serving.http.transport.listening import TcpAddress, tls_context
from tests.support.servers.bare_server import BareServer, bare_server, loop_held
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import completion, connect, n_descriptors, read_to_end, until

TLS = Path(__file__).parents[3] / "data" / "tls"
HASTY = HttpLimits(
    header_s=0.3, body_s=0.3, keep_alive_s=0.3, stalled_write_s=0.3, max_header_bytes=4096, max_connections=64
)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as running:
        yield running


@pytest.fixture(scope="module")
def hasty() -> Iterator[FakeServer]:
    with fake_server(HASTY) as running:
        yield running


def metric(server: FakeServer, line: str) -> float:
    for sample in server.metrics.exposition().decode().splitlines():
        if sample.startswith(line + " "):
            return float(sample.split()[-1])
    return 0.0


def wait_until_nothing_is_left(server: FakeServer) -> None:
    server.wait_until_idle()
    until(lambda: server.client.n_answers == 0, "an answer is still being sent")


def test_idle_connections_are_in_nobodys_way(server: FakeServer) -> None:
    idle = [connect(server.url) for _ in range(200)]
    until(lambda: len(server.connections.open) >= 200, "they were not accepted")

    answers = [httpx.post(f"{server.url}/v1/completions", json={"model": "fake", "prompt": "a"})]

    assert [answer.status_code for answer in answers] == [200]
    assert httpx.get(f"{server.url}/health").status_code == 200
    for raw in idle:
        raw.close()
    until(lambda: not server.connections.open, "closed connections are still counted")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET /health HT",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nX-",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n{",
        completion(max_tokens=1),
        completion(max_tokens=1) + b"GET /heal",
    ],
    ids=["nothing", "half a line", "half a head", "half a body", "nothing more", "half a second one"],
)
def test_a_sender_that_takes_too_long_is_cut(hasty: FakeServer, sent: bytes) -> None:
    with loop_held(hasty.server):  # all that is sent is there when its clock starts
        raw = connect(hasty.url)
        raw.sendall(sent)
    with raw:
        said = read_to_end(raw)

    if sent.startswith(b"GET"):
        assert said.startswith(b"HTTP/1.1 408")
    wait_until_nothing_is_left(hasty)


def test_slow_bytes_win_no_time(hasty: FakeServer) -> None:
    """Each byte of a head would start the clock anew, if the clock were that of an idle connection."""
    stop = threading.Event()
    with connect(hasty.url) as raw:

        def drip() -> None:
            while not stop.wait(0.05):
                try:
                    raw.sendall(b"x")
                except OSError:
                    return

        raw.sendall(b"GET / HTTP/1.1\r\nHost: ")
        dripping = threading.Thread(target=drip)
        dripping.start()
        said = read_to_end(raw)
        stop.set()
        dripping.join()

    assert said == b"" or said.startswith(b"HTTP/1.1 408")


LONG_HEAD = b"GET / HTTP/1.1\r\nHost: a\r\nX-Long: " + b"a" * 8000


@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        pytest.param(LONG_HEAD, b"431", "header_too_large", id="begun"),
        pytest.param(LONG_HEAD + b"\r\n\r\n", b"431", "header_too_large", id="whole"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"400", "invalid_http", id="TLS"),
    ],
)
def test_a_head_that_cannot_be_is_told_so_in_our_shape(
    hasty: FakeServer, sent: bytes, status: bytes, code: str
) -> None:
    with loop_held(hasty.server):
        raw = connect(hasty.url)
        raw.sendall(sent)
    with raw:
        head, _, body = read_to_end(raw).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 " + status)
    assert json.loads(body)["error"]["code"] == code


def test_a_connection_too_many_is_told_to_come_back() -> None:
    with fake_server(HttpLimits(max_connections=5)) as server:
        held = [connect(server.url) for _ in range(5)]
        until(lambda: len(server.connections.open) == 5, "they were not accepted")
        with connect(server.url) as one_more:
            said = read_to_end(one_more)
        for raw in held:
            raw.close()
        until(lambda: not server.connections.open, "closed connections are still counted")

        assert said.startswith(b"HTTP/1.1 503")
        assert b"retry-after: " in said.lower()
        assert metric(server, 'phasewise_requests_rejected_total{reason="too_many_connections"}') == 1
        assert metric(server, 'phasewise_http_responses_total{path="none",status="503"}') == 1


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("how", ["closed", "reset", "half closed"])
def test_clients_that_leave_take_all_with_them(server: FakeServer, stream: bool, how: str) -> None:
    httpx.get(f"{server.url}/health")
    before = n_descriptors()
    for _ in range(25):
        n_steps = len(server.ranks.batches)
        with connect(server.url) as raw:
            raw.sendall(completion(max_tokens=400, stream=stream, n=2))
            if stream:
                raw.recv(1)
            else:
                until(lambda n=n_steps: len(server.ranks.batches) > n, "it was not sent on")  # type: ignore[misc]
            if how == "reset":
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            elif how == "half closed":
                raw.shutdown(socket.SHUT_WR)
                read_to_end(raw)

    wait_until_nothing_is_left(server)
    until(lambda: n_descriptors() <= before, f"{n_descriptors()} descriptors are open, {before} were")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/api/generate"])
def test_a_client_that_closes_its_own_side_is_told(server: FakeServer, path: str) -> None:
    """As `nc` does at the end of its input: it counts as gone, and what it asked for is not computed."""
    gate = threading.Event()
    server.ranks.before_step = lambda: gate.wait(60)
    fields = {"model": "fake", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "max_tokens": 9}
    body = json.dumps({**fields, "stream": False}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with connect(server.url) as raw:
        raw.sendall(head + body)
        until(lambda: server.client.n_live == 1, "it is not computed")
        raw.shutdown(socket.SHUT_WR)
        said = read_to_end(raw)
    gate.set()
    server.wait_until_idle()

    assert said.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in said
    assert b'"code":"half_closed"' in said


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_that_closes_its_own_side_of_tls_is_told(stream: bool, version: ssl.TLSVersion) -> None:
    trusting = ssl.create_default_context(cafile=TLS / "cert.pem")
    trusting.maximum_version = version
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    gate = threading.Event()
    context = tls_context(TLS / "cert.pem", TLS / "key.pem")
    with (
        fake_server(address=TcpAddress("127.0.0.1", 0, secure=True), tls=context) as server,
        connect(server.url) as raw,
    ):
        server.ranks.before_step = lambda: gate.wait(60)
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(65536))
        client.write(completion(max_tokens=9, stream=stream))
        raw.sendall(outgoing.read())
        until(lambda: server.client.n_live == 1, "it is not computed")
        with pytest.raises(ssl.SSLWantReadError):
            client.unwrap()  # its word that it sends no more
        raw.sendall(outgoing.read())
        incoming.write(read_to_end(raw))
        said = client.read(65536)
        gate.set()
        server.wait_until_idle()

    assert said.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"half_closed"' in said


def test_a_client_that_leaves_while_it_waits_leaves_the_queue(server: FakeServer) -> None:
    go_on = threading.Event()
    server.ranks.before_step = lambda: go_on.wait(60)
    sent = [connect(server.url) for _ in range(8)]
    for raw in sent:
        raw.sendall(completion(max_tokens=400))
    until(lambda: server.client.n_live == 8, "they were not sent on")
    for raw in sent:
        raw.close()
    until(lambda: server.client.n_live == 0, "the server did not notice that they left")
    go_on.set()

    wait_until_nothing_is_left(server)


def test_a_reader_that_is_too_far_behind_is_cut_and_the_others_are_not() -> None:
    limits = HttpLimits(max_pieces_unread=200, stalled_write_s=60)
    with fake_server(limits) as server, connect(server.url, receive_bytes=4096) as slow:
        slow.sendall(completion(max_tokens=490, stream=True, logprobs=5, n=8, temperature=0))
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={"model": "fake", "prompt": "a", "max_tokens": 150, "stream": True, "ignore_eos": True},
            timeout=60,
        )
        until(lambda: metric(server, "phasewise_slow_readers_cut_total") == 1, "the slow reader goes on")
        wait_until_nothing_is_left(server)

        assert answer.text.endswith("data: [DONE]\n\n")
        assert b"[DONE]" not in read_to_end(slow)


def test_a_reader_that_stands_still_is_cut() -> None:
    """An answer that has ended, and fits what may be unread, must not stay in memory for ever."""
    limits = replace(HASTY, max_pieces_unread=10**6)
    with fake_server(limits) as server:
        with loop_held(server.server):
            slow = connect(server.url, receive_bytes=4096)
            slow.sendall(completion(max_tokens=490, stream=True, logprobs=5, n=8, temperature=0))
        until(lambda: metric(server, "phasewise_slow_readers_cut_total") == 1, "it holds its answer")
        wait_until_nothing_is_left(server)
        slow.close()


@pytest.mark.parametrize("end", ["close", "keep-alive"])
def test_an_answer_that_nobody_fetches_does_not_keep_its_connection(end: str) -> None:
    """Whole, sent and over: what the reader has not taken must not stay in memory for ever."""
    with fake_server(HASTY) as server:
        whole = completion(max_tokens=490, logprobs=5, n=8, temperature=0)
        with loop_held(server.server):
            slow = connect(server.url, receive_bytes=4096)
            slow.sendall(whole.replace(b"Host: a", b"Host: a\r\nConnection: " + end.encode()))
        wait_until_nothing_is_left(server)
        until(lambda: not server.connections.open, "it waits for ever")
        slow.close()


@given(taken=st.lists(st.integers(0, 3), min_size=1, max_size=20), n_bytes=st.integers(1, 30))
def test_a_reader_is_cut_once_it_has_taken_nothing_for_a_while_and_no_slow_one_is(
    taken: list[int], n_bytes: int
) -> None:
    """`taken`: the bytes that a reader takes in each period; one that has taken all is cut no more."""
    loop = SteppedLoop()
    clocks, cuts, left = ConnectionClocks(loop), list[float](), n_bytes  # type: ignore[arg-type]
    clocks.watch_reader(1.0, lambda: left, lambda: cuts.append(loop.now_s))
    stands_still_s = None
    for period, n_taken in enumerate(taken, 1):
        if left and n_taken == 0 and stands_still_s is None:
            stands_still_s = float(period)
        left = max(0, left - n_taken)
        loop.step(1.0)

    assert cuts == ([] if stands_still_s is None else [stands_still_s])


class SteppedLoop:
    """The clock of an event loop, as far as a test steps it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._called: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> SimpleNamespace:
        timer = (self.now_s + seconds, call)
        self._called.append(timer)
        return SimpleNamespace(cancel=lambda: timer in self._called and self._called.remove(timer))

    def step(self, seconds: float) -> None:
        """Call what is due within this time."""
        ends_s = self.now_s + seconds
        while due := [timer for timer in self._called if timer[0] <= ends_s]:
            timer = min(due, key=lambda timer: timer[0])
            self._called.remove(timer)
            self.now_s = timer[0]
            timer[1]()
        self.now_s = ends_s


class Application(Starlette):
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
def bare() -> Iterator[BareServer]:
    with bare_server(Application(), HttpLimits(keep_alive_s=0.3)) as running:
        yield running


def asked(bare: BareServer, *sent: bytes) -> socket.socket:
    """A connection on which all of this has come before the time of an idle one begins."""
    with loop_held(bare.server):
        raw = connect(bare.url)
        raw.sendall(b"".join(sent))
    return raw


def said(bare: BareServer, *sent: bytes) -> bytes:
    with asked(bare, *sent) as raw:
        return read_to_end(raw)


def request(line: str, *headers: str) -> bytes:
    return "\r\n".join([line, "Host: a", *headers, "", ""]).encode()


def test_a_body_is_asked_for_once_it_is_wanted(bare: BareServer) -> None:
    with asked(bare, request("POST / HTTP/1.1", "Content-Length: 5", "Expect: 100-continue")) as raw:
        assert raw.recv(1000).startswith(b"HTTP/1.1 100 Continue")
        raw.sendall(b"hello")
        assert b"got 5" in read_to_end(raw)


def test_a_body_that_nobody_reads_is_not_asked_for(bare: BareServer) -> None:
    sent = request("POST /unread HTTP/1.1", "Content-Length: 5", "Expect: 100-continue")

    with asked(bare, sent) as raw:
        assert raw.recv(1000).startswith(b"HTTP/1.1 200")


def test_head_has_no_body(bare: BareServer) -> None:
    head, _, body = said(bare, request("HEAD / HTTP/1.1")).partition(b"\r\n\r\n")

    assert head.startswith(b"HTTP/1.1 200")
    assert b"\r\ndate: " in head
    assert body == b""


def test_http_1_0_has_no_chunks_and_ends_with_its_connection(bare: BareServer) -> None:
    head, _, body = said(bare, request("GET / HTTP/1.0")).partition(b"\r\n\r\n")

    assert b"connection: close" in head.lower()
    assert b"chunked" not in head.lower()
    assert body == b"got 0"


def test_pipelined_requests_are_answered_in_order(bare: BareServer) -> None:
    sent = [request("POST / HTTP/1.1", f"Content-Length: {n}") + b"x" * n for n in (1, 2, 3)]

    answers = said(bare, *sent).split(b"HTTP/1.1 200")

    assert [answer[answer.index(b"got") :][:5] for answer in answers[1:]] == [b"got 1", b"got 2", b"got 3"]


class Scopes(Application):
    """Tells which requests' scopes are in memory: a scope holds all that was made of its request."""

    class Mark:
        """Lives as long as the scope that it lies in."""

    def __init__(self) -> None:
        super().__init__()
        self.marks: weakref.WeakSet[Scopes.Mark] = weakref.WeakSet()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["mark"] = mark = self.Mark()
        self.marks.add(mark)
        del mark
        await super().__call__(scope, receive, send)


@pytest.mark.parametrize("path", ["/", "/unread"])
def test_an_answered_request_is_let_go_though_its_connection_stays(path: str) -> None:
    """At once, not when Python looks for cycles: a prompt or a grammar may take megabytes."""
    gc.disable()
    try:
        app = Scopes()
        with bare_server(app, HttpLimits()) as running, connect(running.url) as raw:
            raw.sendall(request(f"POST {path} HTTP/1.1", "Content-Length: 0"))
            assert raw.recv(1000).startswith(b"HTTP/1.1 ")
            until(lambda: not app.marks, "a request that was answered is still held")
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/fails", b"HTTP/1.1 500"), ("/silent", b"HTTP/1.1 500"), ("/breaks", b"HTTP/1.1 200")],
)
def test_an_application_that_fails_is_told_and_logged(
    bare: BareServer, path: str, status: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "phasewise.http"):
        answer = said(bare, request(f"GET {path} HTTP/1.1"))

    assert answer.startswith(status)
    assert b"secret" not in answer
    assert answer.endswith(b"\r\n0\r\n\r\n") == (path != "/breaks")  # what breaks off has no last chunk
    assert [record.name for record in caplog.records] == ["phasewise.http"]

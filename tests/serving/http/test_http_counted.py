"""A request is counted and logged as what its client was told, whoever told it."""

from __future__ import annotations

import json
import re
from collections import Counter

import httpx
import pytest

from phasewise.serving.engine.messages import Answer, Submit
from phasewise.serving.http.http_settings import RequestFacts
from phasewise.serving.http.monitoring.access_log import AccessLog
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.http.routes.app import ServerContext
from tests.support.servers.fake_server import fake_server
from tests.support.servers.rude_clients import connect, read_to_end, until

PATH = "/v1/completions"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
BROKEN = {
    "size": b"5\r\nhello\r\nzz\r\n",
    "longer": b"3\r\nhello\r\n",
    "at once": b"\xff\xff\r\n",
    "bare lf": b"5\nhello\n",
    "trailer": b"5\r\nhello\r\n0\r\n no name\r\n\r\n",
    "many": b"1\r\na\r\n" * 5000,
}


class Observed:
    """The lines of one server's log, and the surroundings that write them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.surroundings = ServerContext(log=AccessLog(self.lines.append, "debug", as_json=True))

    def logged(self) -> list[tuple[str, int | None]]:
        return [(line["path"], line["status"]) for line in map(json.loads, self.lines)]


def counted(url: str) -> Counter[tuple[str, int]]:
    text = httpx.get(f"{url}/metrics").text
    samples = re.findall(r'^phasewise_http_responses_total{path="(.*?)",status="(\d+)"} (\S+)$', text, re.M)
    return Counter({(path, int(status)): int(float(n)) for path, status, n in samples if path != "/metrics"})


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("separate", [True, False], ids=["in parts", "at once"])
def test_a_broken_chunk_is_a_400_to_all(broken: str, *, separate: bool) -> None:
    observed = Observed()
    with fake_server(surroundings=observed.surroundings) as server:
        with connect(server.url) as raw:
            if separate:
                raw.sendall(CHUNKED)
                until(lambda: bool(server.bodies.unfinished._bodies), "the request has not begun")
                raw.sendall(BROKEN[broken])
            else:
                raw.sendall(CHUNKED + BROKEN[broken])
            said = read_to_end(raw)
        until(lambda: bool(observed.lines), "the request is in no log")

        assert said.startswith(b"HTTP/1.1 400")
        assert observed.logged()[0] == (PATH, 400)
        assert counted(server.url) == {(PATH, 400): 1}


def test_a_client_that_leaves_within_its_body_was_told_nothing() -> None:
    observed = Observed()
    with fake_server(surroundings=observed.surroundings) as server:
        with connect(server.url) as raw:
            raw.sendall(CHUNKED + b"5\r\nhello\r\n")
            until(lambda: bool(server.bodies.unfinished._bodies), "the request has not begun")
        until(lambda: bool(observed.lines), "the request is in no log")

        assert observed.logged()[0] == (PATH, None)
        assert counted(server.url) == {}


def test_what_a_connection_answers_before_any_request_has_no_path() -> None:
    with fake_server() as server:
        with connect(server.url) as raw:
            raw.sendall(b"nonsense\r\n\r\n")
            said = read_to_end(raw)

        assert said.startswith(b"HTTP/1.1 400")
        assert counted(server.url) == {("none", 400): 1}


def test_tokens_that_were_held_back_and_sampled_again_count_once() -> None:
    """After a loss an answer goes on from what was given out: fewer tokens are told than before."""
    metrics = Metrics(Gauges())
    metrics.sent(Submit("r", (1,)), RequestFacts((1,), 0.0, None, 1, None))
    for n_generated, reason in ((1, None), (4, None), (3, None), (4, None), (5, "stop")):
        metrics.delivered((Answer("r", "", (), n_generated, 0, reason),), None)  # type: ignore[arg-type]

    assert "phasewise_generated_tokens_total 5.0" in metrics.exposition().decode().splitlines()

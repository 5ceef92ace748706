"""Counts and logs of a server, as Prometheus and endpoint pickers have them."""

from __future__ import annotations

import json
import re
import time
from collections import Counter

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from phasewise.serving.engine.messages import Answer, EngineLoad, Submit
from phasewise.serving.http.answers.client import RequestLife
from phasewise.serving.http.monitoring.access_log import AccessLog
from phasewise.serving.http.monitoring.metrics import Gauges, Metrics
from phasewise.serving.http.routes.app import ServerContext
from phasewise.serving.pools.contract import ALIGNMENT
from tests.support.servers.fake_server import fake_server
from tests.support.servers.rude_clients import connect, read_to_end, until
from tests.support.tiers import examples

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
    life = RequestLife(Submit("r", (1,)))
    for n_generated, reason in ((1, None), (4, None), (3, None), (4, None), (5, "stop")):
        piece = Answer("r", "", (), n_generated, 0, reason)  # type: ignore[arg-type]
        metrics.came(life, piece)
        life.add(piece)

    assert "phasewise_generated_tokens_total 5.0" in metrics.exposition().decode().splitlines()


Sample = tuple[dict[str, str], float]


def read(gauges: Gauges, models: tuple[str, ...] = ()) -> dict[str, list[Sample]]:
    """Labels and values of each metric, as a scraper reads them."""
    text = Metrics(gauges, models).exposition().decode()
    families = text_string_to_metric_families(text)
    return {
        family.name: [(dict(sample.labels), sample.value) for sample in family.samples] for family in families
    }


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 500), st.integers(0, 500))
@examples(50)
def test_use_is_a_share_and_blocks_are_whole_ones(
    used: int, free: int, n_waiting: int, n_running: int
) -> None:
    n_slots = used + free
    samples = read(Gauges(lambda: EngineLoad(n_waiting, n_running, used, n_slots)))

    assert samples["phasewise_requests_waiting"] == [({}, n_waiting)]
    assert samples["phasewise_requests_running"] == [({}, n_running)]
    ((_, use),) = samples["phasewise_kv_use"]
    assert 0 <= use <= 1
    assert abs(use * n_slots - used) < 1e-6 * max(1, n_slots)
    ((labels, value),) = samples["phasewise_kv_cache_info"]
    assert value == 1
    n_blocks = int(labels["num_gpu_blocks"])
    assert int(labels["block_size"]) == ALIGNMENT
    assert n_blocks * ALIGNMENT <= n_slots < (n_blocks + 1) * ALIGNMENT


def test_each_of_several_models_has_its_own_cache() -> None:
    loads = {name: EngineLoad(0, 0, number, 160 * number) for number, name in enumerate(("one", "other"), 1)}
    samples = read(Gauges(lambda: EngineLoad(0, 0, 3, 480, by_model=loads)), ("one", "other"))

    blocks = {labels["model"]: labels["num_gpu_blocks"] for labels, _ in samples["phasewise_kv_cache_info"]}
    assert blocks == {"one": "10", "other": "20"}
    assert {labels["model"] for labels, _ in samples["phasewise_kv_use"]} == {"one", "other"}


def test_adapters_in_memory_are_told_by_every_name_of_theirs() -> None:
    before_s = time.time()
    samples = read(Gauges(adapters=lambda: [("m:poet", "poet"), ("m:coder",)]))

    ((labels, at_s),) = samples["phasewise_lora_requests_info"]
    assert labels == {
        "max_lora": "2",
        "running_lora_adapters": "m:poet,poet,m:coder",
        "waiting_lora_adapters": "",
    }
    assert before_s - 1 <= at_s <= time.time() + 1


def test_without_adapters_nothing_is_said_of_them() -> None:
    assert "phasewise_lora_requests_info" not in read(Gauges(lambda: EngineLoad(0, 0, 0, 160)))

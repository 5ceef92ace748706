"""A server from start to end: readiness, the drain, and requests that come too many or too late."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import replace
from typing import Literal

import httpx
import pytest

from phasewise.serving.engine.messages import Submit
from phasewise.serving.errors import RanksError
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.monitoring.access_log import AccessLog
from phasewise.serving.http.routes.app import ServerContext
from phasewise.serving.pools.contract import Estimate
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import completion, connect, read_to_end, until

LONG = {"model": "fake", "prompt": "a", "max_tokens": 400, "ignore_eos": True}


def post(server: FakeServer, **fields: object) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**LONG, **fields}, timeout=60)


def ready(server: FakeServer) -> tuple[int, str]:
    answer = httpx.get(f"{server.url}/ready")
    return answer.status_code, answer.json()["status"]


class Gate:
    """Holds the engine between two steps, while a test looks around."""

    def __init__(self, server: FakeServer) -> None:
        self._open = threading.Event()
        self._open.set()
        self._holds = threading.Event()
        self._n_before = 0
        server.ranks.before_step = self._pass

    def shut(self, after_steps: int = 0) -> None:
        self._n_before = after_steps
        self._holds.clear()
        self._open.clear()

    def lift(self) -> None:
        self._open.set()

    def _pass(self) -> None:
        if self._n_before > 0:
            self._n_before -= 1
        else:
            self._holds.set()
            self._open.wait(60)

    def wait_until_it_holds(self) -> None:
        """Until a step waits for it, or one has, since it was shut."""
        assert self._holds.wait(60)


def test_at_the_end_readiness_goes_first_and_answers_in_progress_are_finished() -> None:
    with fake_server() as server:
        gate = Gate(server)
        gate.shut()
        answers: list[httpx.Response] = []
        asking = [
            threading.Thread(target=lambda stream=stream: answers.append(post(server, stream=stream)))  # type: ignore[misc]
            for stream in (True, False)
        ]
        for thread in asking:
            thread.start()
        until(lambda: server.client.n_live == 2, "they were not sent on")

        server.server.end()
        until(lambda: server.life.is_draining, "it goes on")
        assert ready(server) == (503, "draining")
        assert httpx.get(f"{server.url}/health").status_code == 200
        late = post(server)
        gate.lift()
        for thread in asking:
            thread.join(60)

        assert late.status_code == 503
        assert late.json()["error"]["code"] == "server_stopping"
        assert 1 <= int(late.headers["Retry-After"]) <= 30
        assert late.headers["Connection"] == "close"
        assert [answer.status_code for answer in answers] == [200, 200]
        assert sum(answer.text.endswith("data: [DONE]\n\n") for answer in answers) == 1
        until(lambda: server.server.has_ended, "it does not end")
        assert server.said[-1].startswith("stopping: 2 in progress have 30 s")


@pytest.mark.parametrize("hurried", [False, True], ids=["time is up", "a second signal"])
def test_what_is_not_finished_in_time_is_told(hurried: bool) -> None:
    with fake_server(HttpLimits(drain_s=60 if hurried else 0.2)) as server:
        gate = Gate(server)
        gate.shut()
        with connect(server.url) as stream, connect(server.url) as whole:
            stream.sendall(completion(max_tokens=400, stream=True))
            whole.sendall(completion(max_tokens=400))
            until(lambda: server.client.n_live == 2, "they were not sent on")
            server.server.end()
            if hurried:
                server.server.end()

            for raw in (stream, whole):
                said = read_to_end(raw)
                assert said.startswith(b"HTTP/1.1 503")
                assert b"server_stopping" in said
        gate.lift()
        until(lambda: server.server.has_ended, "it does not end")


@pytest.mark.parametrize("n", [1, 3])
def test_what_the_drain_cuts_off_is_an_error_in_the_log_and_the_metrics(n: int) -> None:
    lines: list[str] = []
    log = AccessLog(lines.append, "info", as_json=True)
    with fake_server(HttpLimits(drain_s=0.2), surroundings=ServerContext(log=log)) as server:
        gate = Gate(server)
        gate.shut(after_steps=3)
        with connect(server.url) as stream, connect(server.url) as whole:
            stream.sendall(completion(max_tokens=400, stream=True, n=n))
            whole.sendall(completion(max_tokens=400, n=n))
            until(lambda: server.client.n_live == 2 * n, "they were not sent on")
            server.server.end()
            read_to_end(stream)
            read_to_end(whole)
        metrics = server.metrics.exposition().decode()
        gate.lift()
        until(lambda: server.server.has_ended, "it does not end")
    records = [json.loads(line) for line in lines]
    assert [record["finish"] for record in records] == ["error", "error"]
    assert f'phasewise_requests_total{{reason="error"}} {2 * n}.0' in metrics


def test_an_engine_that_gives_up_is_neither_healthy_nor_ready() -> None:
    with fake_server() as server:
        server.ranks.fail_with = RanksError("the machine is on fire")
        assert post(server).status_code == 503

        until(lambda: not server.life.is_healthy, "it still hopes")
        assert ready(server) == (503, "lost")
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert post(server).json()["error"]["code"] == "engine_stopped"


@pytest.mark.parametrize("state", ["starting", "replacing"])
def test_while_nothing_can_compute_it_is_alive_and_not_ready(state: Literal["starting", "replacing"]) -> None:
    """Instances that load their model, and ranks or instances that have died and come again."""
    with fake_server() as server:
        server.thread.state = state

        assert ready(server) == (503, state)
        assert "phasewise_ready 0.0" in _metrics(server)
        assert httpx.get(f"{server.url}/health").status_code == 200
        server.thread.state = "running"


def test_a_reply_runs_again_and_a_stream_goes_on_when_a_rank_dies() -> None:
    with fake_server() as server:
        gate = Gate(server)
        answers: list[httpx.Response] = []
        gate.shut(after_steps=3)
        with connect(server.url) as stream:
            stream.sendall(completion(max_tokens=400, stream=True, temperature=0))
            stream.recv(1)
            gate.wait_until_it_holds()
            asking = threading.Thread(target=lambda: answers.append(post(server, temperature=0)))
            asking.start()
            until(lambda: server.client.n_live == 2, "it was not sent on")
            server.ranks.lose()
            gate.lift()
            asking.join(60)
            stream.shutdown(socket.SHUT_WR)
            said = stream.recv(1 << 20)
            while part := stream.recv(1 << 20):
                said += part

        assert answers[0].status_code == 200
        assert answers[0].json()["choices"][0]["text"].startswith("bcdefg")
        assert answers[0].json()["usage"]["completion_tokens"] == 400
        assert b"rank_lost" not in said
        assert said.count(b'"text"') >= 400
        assert b"[DONE]" in said
        for name in ("ranks_replaced", "answers_continued"):
            assert f"phasewise_{name}_total 1.0" in _metrics(server), name


def test_a_request_of_which_nothing_was_given_out_runs_again_and_is_counted() -> None:
    with fake_server() as server:
        gate = Gate(server)
        answers: list[httpx.Response] = []
        gate.shut()
        asking = threading.Thread(target=lambda: answers.append(post(server, temperature=0)))
        asking.start()
        until(lambda: server.client.n_live == 1, "it was not sent on")
        server.ranks.lose()
        gate.lift()
        asking.join(60)

        assert answers[0].status_code == 200
        assert answers[0].json()["usage"]["completion_tokens"] == 400
        assert "phasewise_requests_rerun_total 1.0" in _metrics(server)


def test_whoever_comes_too_many_is_told_when_to_come_again() -> None:
    with fake_server(HttpLimits(max_live_requests=6, max_waiting_requests=2)) as server:
        gate = Gate(server)
        post(server, max_tokens=1)  # so that the engine has a rate
        gate.shut()
        waiting = [connect(server.url) for _ in range(6)]
        for raw in waiting:
            raw.sendall(completion(max_tokens=5))
        until(lambda: server.client.n_live == 6, "they were not sent on")

        refused = post(server)
        n_waiting = server.client.n_live
        gate.lift()
        for raw in waiting:
            raw.close()

        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert 1 <= int(refused.headers["Retry-After"]) <= 300
        assert n_waiting == 6, "it was refused at once"
        assert 'phasewise_requests_rejected_total{reason="queue_full"} 1.0' in _metrics(server)


def test_the_estimate_of_when_to_come_again_follows_the_rate() -> None:
    with fake_server() as server:
        client = server.client
        client._ends_s.extend(time.monotonic() - ago_s for ago_s in range(20, 0, -1))

        assert 4 <= client.retry_after_s(5) <= 7
        assert client.retry_after_s(10**6) == 300


def test_the_estimator_is_asked_once_for_each_prompt_and_knows_the_conversation() -> None:
    asked: list[Submit] = []

    def estimate(request: Submit) -> Estimate:
        asked.append(request)
        return Estimate(5.0, 0.5)

    with fake_server(model=lambda model: replace(model, estimate=estimate)) as server:
        post(server, prompt=["a", "b"], n=3, max_tokens=4, temperature=0.5)
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "x"}]
        for text in ("y", "z"):
            messages[1]["content"] = text
            body = {"model": "fake", "messages": messages, "max_tokens": 4}
            httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

    assert [request.prompt_token_ids for request in asked[:2]] == [(97,), (98,)]
    for request in asked[:2]:
        assert (request.sampling.temperature, request.max_tokens) == (0.5, 4)
        assert (request.n_messages, request.system_prompt_id) == (1, None)
    assert [request.n_messages for request in asked[2:]] == [2, 2]
    assert asked[2].system_prompt_id == asked[3].system_prompt_id is not None


def _metrics(server: FakeServer, key: str = "none") -> str:
    return httpx.get(f"{server.url}/metrics", headers={"Authorization": f"Bearer {key}"}).text

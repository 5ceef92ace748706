"""One user's requests tell another's nothing and do not hold them up; failures are counted."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.serving.http.answers.client import displaced
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.sandbox.confined import Bounds, CancelToken
from phasewise.serving.text.chat_template import Conversation, Conversations
from tests.support.servers.fake_engine import encode
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import ENOUGH_S, connect, request, until
from tests.support.tiers import examples

PROMPT = "a prompt that no other client must learn " * 8
KEYS = ("first key", "second key")


def n_computed(server: FakeServer, key: str = "", **fields: object) -> int:
    return server.n_computed("/v1/completions", key, prompt=PROMPT, max_tokens=1, **fields)


def test_a_prompt_is_reused_within_a_key_and_never_across_keys() -> None:
    with fake_server(HttpLimits(api_keys=KEYS)) as server:
        whole = n_computed(server, KEYS[0])
        again = n_computed(server, KEYS[0])
        others = n_computed(server, KEYS[1])

    assert whole == others == len(PROMPT)
    assert again < whole / 2


def test_a_salt_isolates_within_a_key_too() -> None:
    with fake_server() as server:
        mine = [n_computed(server, cache_salt="mine") for _ in range(2)]
        others = [n_computed(server, cache_salt="yours"), n_computed(server)]

    assert mine[0] == others[0] == others[1] == len(PROMPT)
    assert mine[1] < mine[0] / 2


def test_a_failure_that_nobody_foresaw_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError("surprise")

    monkeypatch.setattr("phasewise.serving.http.requests.request_threads.completion_requests", fails)
    with fake_server() as server:
        answer = httpx.post(f"{server.url}/v1/completions", json={"model": "fake", "prompt": "a"})
        metrics = httpx.get(f"{server.url}/metrics").text

    assert answer.status_code == 500
    assert 'phasewise_http_responses_total{path="/v1/completions",status="500"} 1.0' in metrics


def many(server: FakeServer, n: int, key: str, prompt: str = "a", **fields: object) -> httpx.Response:
    return server.post("/v1/completions", key, prompt=prompt, n=n, ignore_eos=True, **fields)


def test_one_key_leaves_places_for_the_others() -> None:
    limits = HttpLimits(
        api_keys=KEYS, max_live_requests=32, max_waiting_requests=32, max_sequences_per_key=24
    )
    with fake_server(limits) as server, ThreadPoolExecutor() as clients:
        go_on = threading.Event()
        server.ranks.before_step = lambda: go_on.wait(ENOUGH_S)
        greedy = [clients.submit(many, server, 12, KEYS[0], max_tokens=100) for _ in range(2)]
        until(lambda: server.client.n_live == 24, "two requests hold their key's share")

        refused = many(server, 1, KEYS[0], max_tokens=1)
        too_many = many(server, 25, KEYS[1], max_tokens=1)
        other = clients.submit(many, server, 8, KEYS[1], max_tokens=1)
        until(lambda: server.client.n_live == 32, "the other key's request has its places")
        go_on.set()
        served = other.result()

        assert [future.result().status_code for future in greedy] == [200, 200]
        assert many(server, 24, KEYS[0], max_tokens=1).status_code == 200
    assert (refused.status_code, served.status_code, too_many.status_code) == (429, 200, 400)
    assert int(refused.headers["retry-after"]) >= 1


def test_a_backlog_of_one_key_costs_another_one_turn() -> None:
    """The engine computes one answer at a time; eleven of one key wait when the other key's request comes."""
    with fake_server(HttpLimits(api_keys=KEYS), max_sequences=1) as server, ThreadPoolExecutor() as clients:
        go_on = threading.Event()
        server.ranks.before_step = lambda: not server.ranks.batches or go_on.wait(ENOUGH_S)
        with server.paused():
            greedy = clients.submit(many, server, 12, KEYS[0], max_tokens=50)
            server.wait_until_submitted(12)
        line = b"phasewise_clients_waiting 1.0"
        until(lambda: line in server.metrics.exposition().splitlines(), "no metric tells of the client")
        other = clients.submit(many, server, 1, KEYS[1], prompt="b", max_tokens=1)
        server.wait_until_submitted(13)
        go_on.set()

        assert greedy.result().status_code == other.result().status_code == 200
        begun = [
            list(batch.slices[0].token_ids) for batch in server.ranks.batches if batch.phase == "prefill"
        ]
    assert len(begun) == 13
    assert begun.index(encode("b")) <= 2, "behind the answer in progress, and one more of that key"


def test_an_answer_that_takes_too_much_memory_ends_and_others_go_on() -> None:
    with fake_server(HttpLimits(api_keys=KEYS, max_response_bytes=100_000)) as server:
        refused = many(server, 16, KEYS[0], max_tokens=100, logprobs=20)
        streamed = many(server, 2, KEYS[0], max_tokens=10, logprobs=20, stream=True)
        served = many(server, 1, KEYS[1], max_tokens=20, logprobs=20)
        server.wait_until_idle()

    assert refused.status_code == 400
    assert "bytes of memory" in refused.json()["error"]["message"]
    assert streamed.text.endswith("data: [DONE]\n\n")
    assert served.status_code == 200


ENDLESS_FOR_ONE = (
    "{% if messages[0].content == 'endless' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}{{ messages[0].content }}"
)


def test_a_template_ends_with_the_wait_of_its_client() -> None:
    """The bound is not met: another client's conversation is written once the first has left."""
    conversations = Conversations(ENDLESS_FOR_ONE, {}, [], Bounds(10 * ENOUGH_S, memory_bytes=256 << 20))
    conversations.start()
    has_begun = threading.Event()

    def encode_chat(chat: Conversation, cancel: CancelToken) -> list[int]:
        has_begun.set()
        return encode(conversations.write(chat, cancel).text)

    def body(content: str) -> dict[str, Any]:
        return {"model": "fake", "messages": [{"role": "user", "content": content}], "max_tokens": 2}

    with (
        closing(conversations),
        fake_server(model=lambda served: replace(served, encode_chat=encode_chat)) as server,
    ):
        with connect(server.url) as leaving:
            leaving.sendall(request("/v1/chat/completions", body("endless")))
            assert has_begun.wait(ENOUGH_S)
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body("hello"), timeout=ENOUGH_S)
        assert answer.status_code == 200


MOST = 24
OF_PLACES = ("one", "two", "three", "newcomer")


@dataclass(eq=False)
class One:
    owner: str
    n_places: int


@examples(200)
@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(OF_PLACES), st.integers(1, 8), st.booleans()), min_size=20, max_size=120
    )
)
def test_places_go_from_those_who_hold_more_and_a_fair_share_is_never_refused(
    arrivals: list[tuple[str, int, bool]],
) -> None:
    waiting: list[One] = []
    held: Counter[str] = Counter()
    for owner, n_new, ends in arrivals:
        if ends and waiting:
            held[waiting[0].owner] -= waiting[0].n_places
            del waiting[0]
        n_missing = held.total() + n_new - MOST
        others = displaced(n_missing, owner, n_new, held, waiting)

        before = held.copy()
        for other in others:
            assert other is [request for request in waiting if request.owner == other.owner][-1]  # the newest
            assert held[other.owner] > held[owner] + n_new
            waiting.remove(other)
            held[other.owner] -= other.n_places
        is_refused = n_missing > 0 and not others
        if is_refused and n_new == 1:
            n_clients = len({request.owner for request in waiting} | {owner})
            assert held[owner] >= MOST // n_clients
        if not is_refused:
            waiting.append(One(owner, n_new))
            held[owner] += n_new
        else:
            assert held == before
        assert held.total() <= MOST


def test_what_has_begun_never_gives_way() -> None:
    assert displaced(1, "newcomer", 1, {"one": MOST}, []) == []


def ask(server: FakeServer, key: str, n: int = 1, **fields: object) -> httpx.Response:
    return server.post("/v1/completions", key, prompt="a", n=n, ignore_eos=True, **fields)


def test_greedy_clients_together_keep_no_newcomer_out() -> None:
    """Three keys hold all places, none more than its share. The newest request that waits is told 429."""
    limits = HttpLimits(
        api_keys=OF_PLACES, max_live_requests=24, max_waiting_requests=24, max_sequences_per_key=8
    )
    with fake_server(limits, max_sequences=2) as server, ThreadPoolExecutor(13) as clients:
        gate = threading.Event()
        server.ranks.before_step = lambda: gate.wait(60) and None
        greedy = [
            clients.submit(ask, server, key, 2, max_tokens=20, stream=index % 2 == 0)
            for key in OF_PLACES[:3]
            for index in range(4)
        ]
        until(lambda: server.client.n_live == 24, "three keys hold all places")

        newcomer = clients.submit(ask, server, OF_PLACES[3], max_tokens=1)
        until(lambda: any(future.done() for future in greedy), "a greedy request gives way")
        gate.set()
        served = newcomer.result()
        said = [future.result() for future in greedy]
        server.wait_until_idle()

    assert served.status_code == 200
    refused = [answer for answer in said if answer.status_code != 200]
    assert [answer.status_code for answer in refused] == [429]
    assert int(refused[0].headers["retry-after"]) >= 1

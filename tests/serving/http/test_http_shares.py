"""No request to any route takes more than its share of the loop's time, lanes or stored responses."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.http.requests import response_schemas
from phasewise.serving.http.requests.request_threads import FairLane
from phasewise.serving.http.routes import responses
from phasewise.serving.http.routes.responses import ResponseStore
from phasewise.serving.http.transport import connections, exchange
from phasewise.serving.http.transport.connections import UNKNOWN, LoopShare
from tests.support.servers.fake_engine import piece
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import until

KEYS = ("first key", "second key")
LARGE = "x " * 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    with fake_server(HttpLimits(allowed_hosts=frozenset({"127.0.0.1"}))) as running:
        yield running


def post(server: FakeServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": "fake", **body}, timeout=60)


# ---- the event loop --------------------------------------------------------------------------------------


class Clock:
    """Stands still, but for what a test adds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def perf_counter(self) -> float:
        return self.now_s


def test_only_the_steps_of_a_request_count_and_not_its_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Clock(), list[float]()
    monkeypatch.setattr(exchange, "time", clock)

    async def work(failing: asyncio.Future[None]) -> None:
        clock.now_s += 1.0
        await asyncio.sleep(0)
        clock.now_s += 2.0
        with pytest.raises(KeyError):
            await failing
        clock.now_s += 4.0

    async def other(failing: asyncio.Future[None]) -> None:
        clock.now_s += 100.0
        failing.set_exception(KeyError("told"))

    async def both() -> None:
        failing = asyncio.get_running_loop().create_future()
        timed = exchange.timed_steps(work(failing), told.append)
        await asyncio.gather(_as_coroutine(timed), other(failing))

    asyncio.run(both())

    assert told == [7.0]


def test_a_request_that_is_cancelled_is_told_too() -> None:
    told: list[float] = []

    async def cancelled() -> None:
        task = asyncio.ensure_future(_as_coroutine(exchange.timed_steps(asyncio.sleep(60), told.append)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert len(told) == 1


async def _as_coroutine(work: Any) -> None:
    await work


def test_what_was_spent_is_waited_for_after_the_next_charge() -> None:
    share = LoopShare()
    allowance, other = share.allowance(0.0), share.allowance(0.0)
    allowance.spend(1.0)

    waits_s = allowance.charge(0.0, 0.0)

    assert waits_s * UNKNOWN.per_connection > 0.9
    assert other.charge(0.0, 0.0) == 0.0


def test_requests_that_the_engine_does_not_answer_are_charged_what_they_took(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    spent: list[float] = []
    monkeypatch.setattr(connections.Allowance, "spend", lambda _one, cost_s: spent.append(cost_s))

    for path in ("/metrics", "/v1/models", "/openapi.json", "/nowhere"):
        httpx.get(f"{server.url}{path}")
    post(server, "/v1/responses", input=7)
    until(lambda: len(spent) == 5, "each was charged when it ended")
    post(server, "/v1/completions", prompt="a", max_tokens=1)
    httpx.get(f"{server.url}/nowhere")
    until(lambda: len(spent) >= 6, "what came after the answer was charged")

    assert len(spent) == 6


@pytest.fixture
def threads(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Threads that turned responses into chats, or wrote tokens."""
    seen: set[str] = set()

    def noted(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen.add(threading.current_thread().name)
            return work(*arguments)

        return call

    monkeypatch.setattr("phasewise.serving.http.routes.responses.chat_of", noted(response_schemas.chat_of))
    return seen


def test_a_large_conversation_is_converted_beside_the_loop(server: FakeServer, threads: set[str]) -> None:
    loop_thread = next(thread.name for thread in threading.enumerate() if "run" in thread.name)
    items = [{"role": "user", "content": "x" * 100}] * 9000

    assert post(server, "/v1/responses", input=items).status_code == 400  # too long for the context
    assert threads
    assert loop_thread not in threads
    assert post(server, "/v1/responses", input="a", max_output_tokens=1).status_code == 200
    assert loop_thread in threads


def test_tokens_are_written_beside_the_loop() -> None:
    seen: set[str] = set()

    def noted(token: int) -> bytes:
        seen.add(threading.current_thread().name)
        return piece(token)

    with fake_server(model=lambda model: replace(model, piece=noted)) as server:
        seen.clear()
        answer = post(server, "/tokenize", prompt="abc", return_token_strs=True).json()

    assert answer == {"count": 3, "max_model_len": 500, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
    assert {name.rpartition("_")[0] for name in seen} == {"phasewise-prompt"}


# ---- lanes -----------------------------------------------------------------------------------------------

MESSAGE = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": LARGE}]},
        {"messages": [{"role": "assistant", "content": "a", "reasoning_content": LARGE}]},
        {"messages": [{**MESSAGE, "unknown": LARGE}]},
        {"messages": [MESSAGE], "chat_template_kwargs": {"unknown": LARGE}},
        {
            "messages": [
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": LARGE}}],
                }
            ]
        },
        {
            "messages": [MESSAGE],
            "tools": [{"type": "function", "function": {"name": "f", "description": LARGE}}],
        },
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_whatever_makes_a_conversation_long_it_waits_among_the_long_ones(
    server: FakeServer, path: str, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes: list[str] = []
    run = FairLane.run

    async def noted(lane: FairLane, client: str, work: Callable[[], Any]) -> Any:
        lanes.append(lane._name)
        return await run(lane, client, work)

    monkeypatch.setattr(FairLane, "run", noted)
    post(server, path, max_tokens=1, **fields)

    assert lanes == ["long prompt"]


# ---- what is stored --------------------------------------------------------------------------------------


@pytest.mark.parametrize("characters", [0, 100_000])
def test_a_client_that_stores_much_takes_the_place_of_its_own(characters: int) -> None:
    store = ResponseStore()
    store.put("modest", "mine", [{"role": "user", "content": "a" * 1000}], "{}")
    for number in range(responses.MOST_KEPT + 500):
        store.put("greedy", f"n{number}", [{"role": "user", "content": "a" * characters}], "{}")

    assert store.conversation("modest", "mine")
    assert store.conversation("greedy", f"n{responses.MOST_KEPT + 499}")
    with pytest.raises(ApiError):
        store.conversation("greedy", "n0")


def test_what_is_too_old_is_forgotten_whoever_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ResponseStore()
    store.put("gone", "1", [], "{}")
    monkeypatch.setattr(responses, "STORED_S", -1.0)
    with pytest.raises(ApiError):
        store.conversation("other", "2")
    monkeypatch.setattr(responses, "STORED_S", 3600.0)
    with pytest.raises(ApiError):
        store.conversation("gone", "1")


# ---- every route -----------------------------------------------------------------------------------------


def routes(server: FakeServer, method: str) -> list[str]:
    matching = [
        route for route in server.app.routes if isinstance(route, Route) and method in (route.methods or ())
    ]
    return sorted(route.path.replace("{name:path}", "fake") for route in matching)


def test_no_route_takes_from_a_page_what_it_may_send_unasked(server: FakeServer) -> None:
    posts = routes(server, "POST")
    assert {"/v1/responses", "/tokenize", "/detokenize", "/v1/chat/completions"} <= set(posts)
    for path in posts:
        for sent_by in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
            headers = {"Content-Type": "text/plain", **sent_by}
            answer = httpx.post(f"{server.url}{path}", content=b"{}", headers=headers)
            assert answer.status_code in (403, 415), path


def test_no_route_answers_for_a_host_of_another(server: FakeServer) -> None:
    for method in ("GET", "POST"):
        for path in routes(server, method):
            answer = httpx.request(method, f"{server.url}{path}", headers={"Host": "evil.example"})
            assert answer.status_code == 421, path


def test_no_route_but_health_is_open_where_a_key_is_asked_for() -> None:
    with fake_server(HttpLimits(api_keys=KEYS)) as locked:
        for method in ("GET", "POST"):
            for path in set(routes(locked, method)) - {"/health", "/ready"}:
                assert httpx.request(method, f"{locked.url}{path}").status_code == 401, path


@pytest.mark.parametrize("digits", [10, 4299, 4300])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", '"input":"a","max_output_tokens":N'),
        ("/v1/chat/completions", '"messages":[{"role":"user","content":"a"}],"max_completion_tokens":N'),
        ("/detokenize", '"tokens":[N]'),
        ("/detokenize", '"tokens":[-N]'),
        ("/v1/completions", '"prompt":[N]'),
        ("/v1/completions", '"prompt":[[1],[N]]'),
        *(
            ("/v1/completions", f'"prompt":"a","{field}":N')
            for field in ("max_tokens", "top_k", "best_of", "n")
        ),
    ],
)
def test_integers_of_thousands_of_digits_are_mistakes_on_every_route(
    server: FakeServer, path: str, body: str, digits: int
) -> None:
    body = body.replace("N", "9" * digits)
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}{path}", content=f'{{"model":"fake",{body}}}', headers=headers)

    assert answer.status_code == 400
    assert len(answer.text) < 500


def test_a_model_that_was_not_asked_for_by_its_name(server: FakeServer) -> None:
    """A name with escape sequences comes back as text."""
    answer = post(server, "/v1/responses", model="x\n\x1b[31m", input="a")
    assert answer.status_code == 404
    assert "\x1b" not in answer.json()["error"]["message"]

"""Streams that say nothing for long, as while a long prompt is computed, say that they are still there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import threading
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from phasewise.serving.engine.messages import EngineLoad, Progress, Submit
from phasewise.serving.errors import StepFailed
from phasewise.serving.http.answers.prompt_work import PromptWork
from phasewise.serving.http.http_settings import HttpLimits
from phasewise.serving.scheduling.pacing import Pacing
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import until
from tests.support.tiers import n_examples

LIMITS = HttpLimits(sign_of_life_s=0.05)
SILENT = HttpLimits(sign_of_life_s=60.0)
COMMENT = ": keep-alive"
PATHS = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 5},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 5},
    "/v1/responses": {"input": "abc", "max_output_tokens": 5},
}


class Gate:
    """Holds the engine before a step while it is shut."""

    def __init__(self, server: FakeServer) -> None:
        self.open = threading.Event()
        server.ranks.before_step = lambda: self.open.wait(60)


@contextlib.contextmanager
def held(limits: HttpLimits = LIMITS) -> Iterator[tuple[FakeServer, Gate]]:
    with fake_server(limits) as server:
        gate = Gate(server)
        try:
            yield server, gate
        finally:
            gate.open.set()


def body(path: str, **more: object) -> dict[str, object]:
    return {"model": "fake", "temperature": 0, "stream": True, **PATHS[path], **more}


def events(lines: list[str]) -> list[str]:
    """Without comments, and what differs from answer to answer."""
    data = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [json.dumps([event.get("choices"), event.get("type"), event.get("delta")]) for event in data]


@pytest.mark.parametrize("path", PATHS)
def test_while_a_prompt_is_computed_comments_come_and_then_the_same_events(path: str) -> None:
    with (
        held() as (server, gate),
        httpx.stream("POST", f"{server.url}{path}", json=body(path), timeout=60) as answer,
    ):
        assert answer.status_code == 200
        lines = []
        for line in answer.iter_lines():
            lines.append(line)
            if line == COMMENT and lines.count(COMMENT) == 3:
                assert not any(earlier.startswith("data:") for earlier in lines)
                gate.open.set()
    with fake_server(SILENT) as server:
        plain = httpx.post(f"{server.url}{path}", json=body(path)).text.splitlines()

    assert lines.count(COMMENT) >= 3
    assert events(lines) == events(plain)
    assert COMMENT not in plain
    assert lines[-2:] == plain[-2:] or path == "/v1/responses"


def test_silence_between_two_tokens_is_no_longer() -> None:
    with held() as (server, gate):
        server.ranks.before_step = lambda: len(server.ranks.batches) < 3 or gate.open.wait(60)
        url, asked = f"{server.url}/v1/completions", body("/v1/completions", max_tokens=20, ignore_eos=True)
        with httpx.stream("POST", url, json=asked, timeout=60) as answer:
            lines = answer.iter_lines()
            assert any(line.startswith("data: ") for line in lines)
            assert COMMENT in lines
            gate.open.set()
            assert "data: [DONE]" in lines


def test_who_minds_gets_none_and_the_status_of_what_fails() -> None:
    with held() as (server, gate):
        answers: list[httpx.Response] = []

        def ask() -> None:
            off = {"X-Stream-Comments": "off"}
            asked = body("/v1/completions")
            answers.append(httpx.post(f"{server.url}/v1/completions", json=asked, headers=off, timeout=60))

        for fails in (False, True):
            gate.open.clear()
            asking = threading.Thread(target=ask)
            asking.start()
            until(lambda: server.client.n_live == 1, "it was not sent on")
            threading.Event().wait(5 * LIMITS.sign_of_life_s)
            server.ranks.fail_with = StepFailed("no") if fails else None
            gate.open.set()
            asking.join(60)
    assert [answer.status_code for answer in answers] == [200, 500]
    assert COMMENT not in answers[0].text


def test_an_answer_that_is_not_streamed_has_none() -> None:
    with held() as (server, gate):
        threading.Timer(5 * LIMITS.sign_of_life_s, gate.open.set).start()
        answer = httpx.post(f"{server.url}/v1/completions", json=body("/v1/completions", stream=False))
    assert answer.json()["choices"][0]["text"]
    assert COMMENT not in answer.text


@pytest.mark.parametrize("path", PATHS)
def test_what_fails_after_a_sign_of_life_is_told_in_the_stream(path: str) -> None:
    with held() as (server, gate):
        with httpx.stream("POST", f"{server.url}{path}", json=body(path), timeout=60) as answer:
            lines = answer.iter_lines()
            assert COMMENT in lines
            server.ranks.fail_with = StepFailed("the step failed")
            gate.open.set()
            rest = list(lines)
        server.ranks.fail_with = None
    assert "the step failed" in rest[-2]


def test_a_client_that_leaves_during_its_prompt_frees_its_place() -> None:
    with held() as (server, gate):
        url = f"{server.url}/v1/completions"
        with httpx.stream("POST", url, json=body("/v1/completions"), timeout=60) as answer:
            assert COMMENT in answer.iter_lines()
        until(lambda: server.client.n_live == 0, "it is still waited for")
        gate.open.set()
        server.wait_until_idle()


def test_openais_client_goes_on() -> None:
    async def ask(server: FakeServer, gate: Gate) -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
            asyncio.get_running_loop().call_later(5 * LIMITS.sign_of_life_s, gate.open.set)
            chat = await api.chat.completions.create(**body("/v1/chat/completions"))  # type: ignore[call-overload]
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in chat if chunk.choices])
            gate.open.clear()
            asyncio.get_running_loop().call_later(5 * LIMITS.sign_of_life_s, gate.open.set)
            response = await api.responses.create(**body("/v1/responses"))  # type: ignore[call-overload]
            parts = [event.delta async for event in response if event.type == "response.output_text.delta"]
            return text, "".join(parts)

    with held() as (server, gate):
        texts = asyncio.run(ask(server, gate))
    assert len(texts[0]) == 5
    assert texts[0] == texts[1]


# ---- signs in the forms of other APIs --------------------------------------------------------------------

PING = 'data: {"type":"ping"}'
CHAT = [{"role": "user", "content": "abc"}]


def test_messages_have_pings_and_the_official_client_goes_on() -> None:
    asked = {"model": "fake", "max_tokens": 5, "messages": CHAT}
    with held() as (server, gate):
        with httpx.stream("POST", f"{server.url}/v1/messages", json={**asked, "stream": True}) as answer:
            lines = answer.iter_lines()
            for _ in range(2):
                assert PING in lines
            gate.open.set()
            assert 'data: {"type":"message_stop"}' in lines
        gate.open.clear()
        with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as api:
            threading.Timer(5 * LIMITS.sign_of_life_s, gate.open.set).start()
            greedy = {"extra_body": {"temperature": 0}}
            with api.messages.stream(**asked, **greedy) as stream:  # type: ignore[arg-type]
                text = "".join(stream.text_stream)
            whole = api.messages.create(**asked, **greedy)  # type: ignore[call-overload]
    assert text == whole.content[0].text
    assert len(text) == 5


def test_ollamas_lines_have_spaces_before_them_and_the_official_client_goes_on() -> None:
    options = {"num_predict": 5, "temperature": 0}
    with held() as (server, gate):
        asked = {"model": "fake", "messages": CHAT, "options": options}
        with httpx.stream("POST", f"{server.url}/api/chat", json=asked, timeout=60) as answer:
            parts = answer.iter_raw()
            assert [next(parts), next(parts)] == [b" ", b" "]
            gate.open.set()
            assert [json.loads(line) for line in b"".join(parts).splitlines()][-1]["done"]
        gate.open.clear()
        client = ollama.Client(host=server.url)
        threading.Timer(5 * LIMITS.sign_of_life_s, gate.open.set).start()
        pieces = client.chat("fake", CHAT, options=options, stream=True)
        text = "".join(piece.message.content or "" for piece in pieces)
        whole = client.chat("fake", CHAT, options=options)
    assert text == whole.message.content
    assert len(text) == 5


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/api/chat"])
def test_spaces_before_json_come_where_they_are_asked_for(path: str) -> None:
    more = {"prompt": "abc"} if path == "/v1/completions" else {"messages": CHAT}
    asked = {"model": "fake", "temperature": 0, "max_tokens": 5, "stream": False, **more}
    asked |= {"options": {"num_predict": 5, "temperature": 0}} if path == "/api/chat" else {}
    on = {"X-Json-Whitespace": "on"}
    with held() as (server, gate):
        late = _opened_by_spaces(gate, f"{server.url}{path}", asked, on)
        gate.open.clear()
        server.ranks.fail_with = StepFailed("the step failed")
        failed = _opened_by_spaces(gate, f"{server.url}{path}", asked, on)
    with fake_server(SILENT) as server:
        soon = httpx.post(f"{server.url}{path}", json=asked, headers=on)
    assert late.startswith(b"  ")
    assert not soon.text.startswith("  ")
    assert sorted(json.loads(late)) == sorted(soon.json())
    assert "the step failed" in json.dumps(json.loads(failed)["error"])


def _opened_by_spaces(gate: Gate, url: str, asked: dict[str, object], headers: dict[str, str]) -> bytes:
    """The body of a response with status 200; its step goes on once two spaces have come."""
    body = b""
    with httpx.stream("POST", url, json=asked, headers=headers) as response:
        assert response.status_code == 200
        for piece in response.iter_raw():
            body += piece
            if len(body) >= 2:
                gate.open.set()
    return body


# ---- the progress of prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_events_tell_the_progress_of_a_prompt_to_its_end(path: str) -> None:
    long = "abcdefghij" * 40
    chat = [{"role": "user", "content": long}]
    fields: dict[str, object] = {"prompt": long} if path == "/v1/completions" else {"messages": chat}
    with fake_server() as server:
        server.ranks.before_step = lambda: until(lambda: _has_taken_all(server), "it is not taken")
        plain = httpx.post(f"{server.url}{path}", json=body(path, **fields)).text
        asked = body(path, **fields, return_progress=True, n=2, cache_salt="another")
        told = httpx.post(f"{server.url}{path}", json=asked)
    assert "prompt_progress" not in plain
    assert "x-ignored-fields" not in told.headers
    chunks = [json.loads(line[6:]) for line in told.text.splitlines() if line.startswith("data: {")]
    steps = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert len(steps) > 3
    assert {step["total"] for step in steps} == {steps[0]["total"]}
    assert {step["cache"] for step in steps} == {0}
    assert steps[-1]["processed"] == steps[-1]["total"]
    processed, times = [step["processed"] for step in steps], [step["time_ms"] for step in steps]
    assert processed == sorted(set(processed))
    assert times == sorted(times)
    first_word = next(index for index, chunk in enumerate(chunks) if has_text(chunk))
    assert not any("prompt_progress" in chunk for chunk in chunks[first_word:])


def _has_taken_all(server: FakeServer) -> bool:
    """Only the newest progress waits for its reader."""
    client = server.client
    return not (client._delivered or any(stream._arrived for stream in [*client._streams.values()]))


def has_text(chunk: dict[str, Any]) -> bool:
    return any(choice.get("text") or choice.get("delta", {}).get("content") for choice in chunk["choices"])


def test_openais_client_reads_the_progress() -> None:
    with held() as (server, gate), openai.OpenAI(base_url=f"{server.url}/v1", api_key="any") as api:
        gate.open.set()
        asked = body("/v1/chat/completions")
        chunks = list(api.chat.completions.create(**asked, extra_body={"return_progress": True}))  # type: ignore[call-overload]
    told = [chunk.model_extra["prompt_progress"] for chunk in chunks if chunk.model_extra]
    assert [step["processed"] == step["total"] for step in told] == [True]
    assert len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)) == 5


def test_a_client_that_leaves_in_its_prompt_is_gone_within_one_step() -> None:
    """No more of a prompt of many steps is computed than the step under way when the client left."""
    with fake_server(LIMITS) as server:
        steps = threading.Semaphore(0)
        server.ranks.before_step = lambda: steps.acquire(timeout=60)
        asked = body("/v1/completions", prompt="abcdefghij" * 40)
        with httpx.stream("POST", f"{server.url}/v1/completions", json=asked, timeout=60) as answer:
            lines = answer.iter_lines()  # one that is dropped closes the connection
            assert COMMENT in lines
            steps.release(3)
            until(lambda: len(server.ranks.batches) == 3, "three steps are not done")
        until(lambda: server.client.n_live == 0, "it is still waited for")
        steps.release(100)
        server.wait_until_idle()
        assert len(server.ranks.batches) <= 4


# ---- the expected time -----------------------------------------------------------------------------------


def test_a_header_tells_the_time_until_the_first_token_once_one_was_seen() -> None:
    with fake_server() as server:
        server.engine.pacing = Pacing(10**8, 512)
        fields = {"prompt": "abc", "max_tokens": 2, "stream": True}
        first = server.post("/v1/completions", **fields)
        server.wait_until_idle()
        second = server.post("/v1/completions", **fields)
    assert "x-estimated-ttft" not in first.headers
    assert re.fullmatch(r"[0-9]+\.[0-9] s", second.headers["x-estimated-ttft"])


LOAD = EngineLoad(0, 1, 0, 100, prompt_token_ns=2e6)


def asked(name: str, n_tokens: int, model: str = "") -> Submit:
    return Submit(name, (1,) * n_tokens, model=model)


def seconds(
    work: PromptWork, n_tokens: int, client: str, load: EngineLoad = LOAD, wait_s: float = 0
) -> float:
    first_token_s = work.seconds_until_first_token(asked("new", n_tokens), client, load, wait_s)
    assert first_token_s is not None
    return first_token_s


def test_a_prompt_alone_takes_its_own_tokens() -> None:
    assert seconds(PromptWork(), 500, "a") == pytest.approx(1.0)


def test_nothing_is_told_before_anything_was_seen() -> None:
    work, request = PromptWork(), asked("new", 5)
    assert work.seconds_until_first_token(request, "a", None, 0) is None
    assert work.seconds_until_first_token(request, "a", LOAD._replace(prompt_token_ns=0), 0) is None


@pytest.mark.parametrize("seed", range(n_examples(40)))
def test_it_is_between_that_of_its_own_client_alone_and_that_of_all(seed: int) -> None:
    """Equal parts: another client costs at most as much as one's own prompts, and at most all it has."""
    rng = random.Random(seed)
    work, own, others = PromptWork(), 0, {"b": 0, "c": 0}
    for number in range(rng.randrange(12)):
        client, n_tokens = rng.choice("abc"), rng.randrange(1, 3000)
        work.sent(asked(str(number), n_tokens), client)
        n_done = rng.randrange(n_tokens)
        work.goes_on(Progress(str(number), n_tokens, 0, n_done, 5))
        if rng.random() < 0.3:
            work.ended(str(number))
            continue
        left = n_tokens - n_done
        own += left * (client == "a")
        others = {other: had + left * (client == other) for other, had in others.items()}
    n_new = rng.randrange(1, 2000)
    token_s = LOAD.prompt_token_ns / 1e9
    expected = n_new + own + sum(min(had, n_new + own) for had in others.values())
    assert seconds(work, n_new, "a") == pytest.approx(expected * token_s)
    assert seconds(work, n_new, "a", wait_s=1e6) == pytest.approx(1e6 + n_new * token_s)
    assert seconds(work, n_new + 1, "a") > seconds(work, n_new, "a")


def test_engines_of_other_models_take_turns() -> None:
    busy, idle = LOAD._replace(n_running=1), LOAD._replace(n_running=0)
    load = LOAD._replace(by_model={"x": idle, "y": busy, "z": idle})
    work = PromptWork()
    work.sent(asked("other", 1000, "y"), "a")
    request = asked("new", 500, "x")
    assert work.seconds_until_first_token(request, "a", load, 0) == pytest.approx(2.0)
    assert work.seconds_until_first_token(asked("new", 5, "gone"), "a", load, 0) is None

"""Streams that say nothing for long, as while a long prompt is computed, say that they are still there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import openai
import pytest

from phasewise.serving.errors import StepFailed
from phasewise.serving.http.http_settings import HttpLimits
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import until

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
    import anthropic

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

"""Streams that say nothing for long, as while a long prompt is computed, say that they are still there."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator

import httpx
import openai
import pytest

from phasewise.serving.errors import StepFailed
from phasewise.serving.http.http_settings import HttpLimits
from tests.support.servers.fake_server import FakeServer, fake_server
from tests.support.servers.rude_clients import until

LIMITS = HttpLimits(sign_of_life_s=0.05)
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
        server.ranks.before_step = lambda: self.open.wait(20)


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
    return [json.dumps([one.get("choices"), one.get("type"), one.get("delta")]) for one in data]


@pytest.mark.parametrize("path", PATHS)
def test_while_a_prompt_is_computed_comments_come_and_then_the_same_events(path: str) -> None:
    with held() as (server, gate):
        with httpx.stream("POST", f"{server.url}{path}", json=body(path), timeout=20) as answer:
            assert answer.status_code == 200
            lines = []
            for line in answer.iter_lines():
                lines.append(line)
                if line == COMMENT and lines.count(COMMENT) == 3:
                    assert not any(one.startswith("data:") for one in lines)
                    gate.open.set()
        plain = httpx.post(f"{server.url}{path}", json=body(path)).text.splitlines()

    assert lines.count(COMMENT) >= 3
    assert events(lines) == events(plain)
    assert COMMENT not in plain
    assert lines[-2:] == plain[-2:] or path == "/v1/responses"


def test_silence_between_two_tokens_is_no_longer() -> None:
    with held() as (server, gate):
        gate.open.set()
        url, asked = f"{server.url}/v1/completions", body("/v1/completions", max_tokens=400, ignore_eos=True)
        with httpx.stream("POST", url, json=asked, timeout=20) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            gate.open.clear()
            assert COMMENT in lines
            gate.open.set()
            assert "data: [DONE]" in lines


def test_who_minds_gets_none_and_the_status_of_what_fails() -> None:
    with held() as (server, gate):
        answers: list[httpx.Response] = []

        def ask() -> None:
            off = {"X-Stream-Comments": "off"}
            asked = body("/v1/completions")
            answers.append(httpx.post(f"{server.url}/v1/completions", json=asked, headers=off, timeout=20))

        for fails in (False, True):
            gate.open.clear()
            asking = threading.Thread(target=ask)
            asking.start()
            until(lambda: server.client.n_live == 1, "it was not sent on")
            threading.Event().wait(5 * LIMITS.sign_of_life_s)
            server.ranks.fail_with = StepFailed("no") if fails else None
            gate.open.set()
            asking.join(20)
    assert [one.status_code for one in answers] == [200, 500]
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
        with httpx.stream("POST", f"{server.url}{path}", json=body(path), timeout=20) as answer:
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
        with httpx.stream("POST", url, json=body("/v1/completions"), timeout=20) as answer:
            assert COMMENT in answer.iter_lines()
        until(lambda: server.client.n_live == 0, "it is still waited for")
        gate.open.set()
        server.wait_until_idle()


def test_openais_client_goes_on() -> None:
    async def ask(server: FakeServer, gate: Gate) -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as api:
            asyncio.get_running_loop().call_later(5 * LIMITS.sign_of_life_s, gate.open.set)
            chat = await api.chat.completions.create(**body("/v1/chat/completions"))  # type: ignore[call-overload]
            text = "".join([one.choices[0].delta.content or "" async for one in chat if one.choices])
            gate.open.clear()
            asyncio.get_running_loop().call_later(5 * LIMITS.sign_of_life_s, gate.open.set)
            response = await api.responses.create(**body("/v1/responses"))  # type: ignore[call-overload]
            parts = [one.delta async for one in response if one.type == "response.output_text.delta"]
            return text, "".join(parts)

    with held() as (server, gate):
        texts = asyncio.run(ask(server, gate))
    assert len(texts[0]) == 5
    assert texts[0] == texts[1]

"""Requests in the shape that agents send: every API takes them, and every template writes them out."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from phasewise.serving.http.requests import response_schemas
from phasewise.serving.http.requests.calls import check_tools, conversation_of
from phasewise.serving.http.requests.chat_schemas import ChatRequest
from phasewise.serving.http.routes import messages, ollama
from phasewise.serving.text.chat_template import ChatTemplate, ChatTemplateError, rendered
from phasewise.serving.tools.dialect import Dialect, dialect_of
from tests.support import SHARED
from tests.support.agent_bodies import AgentBody, bodies, variants
from tests.support.models import chat_templates, tool_templates
from tests.support.servers.scripted_engine import scripted_server

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
OURS = {**tool_templates.TEMPLATES, **chat_templates.TEMPLATES}
FORMS: dict[str, tuple[type[BaseModel], Callable[[Any], ChatRequest]]] = {
    "/v1/chat/completions": (ChatRequest, lambda body: body),
    "/v1/responses": (response_schemas.ResponsesRequest, partial(response_schemas.chat_of, before=[])),
    "/v1/messages": (messages.MessagesRequest, messages.chat_of),
    "/api/chat": (ollama.OllamaChatRequest, ollama.chat_of),
}
_NAMED = {
    "codex": {"tools.web_search", "tools.mcp", "content.input_image", "input.web_search_call"},
    "claude-code": {"tools.web_search_20250305", "content.image"},
    "qwen-code": {"content.image_url"},
    "pi": {"content.image_url"},
    "ollama": {"content.image"},
}
"""The parts of the last request of an agent that cannot be run or read."""


def chat_of(asked: AgentBody) -> ChatRequest:
    kind, convert = FORMS[asked.path]
    return convert(kind.model_validate({"model": "m", **asked.body}, strict=None))


@pytest.mark.parametrize("asked", bodies(), ids=lambda asked: asked.agent)
def test_every_body_is_one_request(asked: AgentBody) -> None:
    chat = chat_of(asked)
    check_tools(chat)
    assert chat.messages[-1].text
    is_last = len(chat.messages) == max(
        len(chat_of(each).messages) for each in bodies() if each.agent == asked.agent
    )
    if is_last:
        assert set(chat.ignored()) == _NAMED.get(asked.agent, set())
    assert "billing" not in str([message.text for message in chat.messages])


@cache
def compiled(source: str) -> tuple[ChatTemplate, Dialect]:
    template = ChatTemplate(source, SPECIAL)
    return template, dialect_of(source, lambda _text: None, frozenset(), turn=template.turn_form())


def written(source: str, asked: AgentBody) -> str:
    """The prompt, as a server writes it."""
    template, dialect = compiled(source)
    chat = conversation_of(chat_of(asked), dialect)
    return rendered(template, {**chat._asdict(), "lacks": dialect.turn.lacks})


@pytest.mark.parametrize("name", OURS)
def test_every_template_writes_what_was_asked_last(name: str) -> None:
    for asked in [*bodies(), *variants()]:
        prompt = written(OURS[name], asked)
        assert "Read it." in prompt or "List" in prompt, asked.agent


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "templates").is_dir(), reason="no reference data: publishers' templates")
def test_every_published_template_takes_every_body() -> None:
    failed = set()
    for path in sorted((SHARED / "templates").glob("*.jinja")):
        for asked in [*bodies(), *variants()]:
            try:
                written(path.read_text(encoding="utf-8"), asked)
            except ChatTemplateError:
                failed.add((path.stem, asked.agent))
    assert not failed


def test_of_allowed_tools_no_other_is_shown() -> None:
    (asked,) = (each for each in variants() if "allowed_tools" in each.body.get("tool_choice", {}))
    chat = chat_of(asked)

    assert [function.name for function in chat.functions] == ["shell"]
    assert chat.tool_choice == "auto"


def test_a_choice_of_a_tool_that_a_server_runs_is_named() -> None:
    """It is none here: the model chooses."""
    (asked,) = (each for each in variants() if "mcp" in str(each.body.get("tool_choice")))
    chat = chat_of(asked)

    assert (chat.tool_choice, "tool_choice.mcp" in chat.ignored()) == ("auto", True)


def test_a_server_answers_every_body() -> None:
    with scripted_server(tool_templates.HERMES, "<|im_start|>assistant\n", context=60_000) as (server, ranks):
        ranks.script = lambda _prompt: "ok"
        for asked in bodies():
            answer = httpx.post(f"{server.url}{asked.path}", json={"model": "fake", **asked.body}, timeout=60)
            assert answer.status_code == 200, (asked.agent, answer.text)
            assert "ok" in answer.text or '"o"' in answer.text

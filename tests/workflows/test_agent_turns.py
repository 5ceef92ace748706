"""Turns of agents on a real engine: of a prompt that goes on, little more than what is new is computed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip(
    "phasewise.cython_kernels._native", reason="the kernels are not built", exc_type=ImportError
)
from tests.support.models.family_models import write_family_hf
from tests.support.models.tiny_models import write_tiny_hf
from tests.support.servers.served_command import Server, own_places, serving

CHUNK = 256
TEMPLATE = """\
{%- set last = namespace(user=-1, assistant=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' %}{% set last.user = loop.index0 %}{% endif -%}
{%- if message.role == 'assistant' %}{% set last.assistant = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
<s>{{ message.role }}
{% if message.role == 'assistant' and message.reasoning_content and loop.index0 WHERE -%}
<think>{{ message.reasoning_content }}</think>
{%- endif -%}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}</s>
{%- endfor -%}
{%- if add_generation_prompt %}<s>assistant
<think>{% endif -%}"""
SHAPES = {"qwen35": "> last.user", "lfm2": "== last.assistant"}
"""By the family of a model: whose thoughts its template keeps."""


@pytest.fixture(scope="module", params=SHAPES)
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("hybrid")
    model = write_family_hf(home / "model", request.param, {"max_position_embeddings": 16384})
    template = TEMPLATE.replace("WHERE", SHAPES[request.param])
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with serving(model, own_places(home), "--context", 12288, "--max-sequences", 2, "--port", 0) as server:
        yield server


def _posted(server: Server, path: str, body: dict[str, Any]) -> Any:
    answer = httpx.post(server.url + path, json={"model": "model", **body}, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def _n_shared(left: list[int], right: list[int]) -> int:
    pairs = enumerate(zip(left, right, strict=False))
    return next((index for index, (mine, theirs) in pairs if mine != theirs), min(len(left), len(right)))


@pytest.mark.slow
@pytest.mark.parametrize("sends_thoughts", [True, False])
def test_after_twenty_calls_a_question_costs_its_new_tokens(hybrid: Server, sends_thoughts: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": f"{sends_thoughts} rules. " * 40}]
    asked: list[list[int]] = []
    for question in range(3):
        messages.append({"role": "user", "content": f"question {question}: what does the log say?"})
        for call in range(21 if question == 1 else 3):
            tokens = _posted(hybrid, "/tokenize", {"messages": messages})["tokens"]
            usage = _posted(hybrid, "/v1/chat/completions", {"messages": messages, "max_tokens": 3})["usage"]
            shared = max((_n_shared(tokens, old) for old in asked), default=0)
            n_computed = len(tokens) - usage["prompt_tokens_details"]["cached_tokens"]

            assert usage["prompt_tokens"] == len(tokens)
            assert n_computed <= len(tokens) - shared + CHUNK, (question, call)
            asked.append(tokens)
            called = {"name": "read", "arguments": json.dumps({"line": 100 * question + call})}
            turn = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": called}],
            }
            thought = {"reasoning_content": f"I look at line {call}. " * 4} if sends_thoughts else {}
            messages += [
                {**turn, **thought},
                {"role": "tool", "tool_call_id": "c", "content": f"line {call} " * 30},
            ]
        messages[-2:] = [{"role": "assistant", "content": "It says nothing.", **thought}]
    assert len(asked[-1]) > 8000


@pytest.mark.slow
def test_a_first_block_that_changes_with_every_request_costs_nothing(tmp_path: Path) -> None:
    """The shape of a coding agent's requests over the Messages API: three turns."""
    model = write_tiny_hf(tmp_path / "model", config={"max_position_embeddings": 16384})
    messages: list[dict[str, Any]] = []
    before = 0
    with serving(model, own_places(tmp_path), "--context", 12288, "--port", 0) as server:
        for turn in range(3):
            billing = f"x-anthropic-billing-header: cc_version=2.1.{turn}; cc_entrypoint=cli; cch={turn}a5f1;"
            system = [
                {"type": "text", "text": billing},
                {
                    "type": "text",
                    "text": "You write programs. " * 300,
                    "cache_control": {"type": "ephemeral"},
                },
            ]
            messages.append({"role": "user", "content": [{"type": "text", "text": f"Now step {turn}."}]})
            body = {"system": system, "messages": messages, "max_tokens": 4}
            answer = _posted(server, "/v1/messages", body)
            usage = answer["usage"]

            assert usage["cache_read_input_tokens"] >= 0.98 * before, turn
            before = usage["cache_read_input_tokens"] + usage["input_tokens"]
            assert before > 6000
            messages.append({"role": "assistant", "content": [{"type": "text", "text": "Done."}]})

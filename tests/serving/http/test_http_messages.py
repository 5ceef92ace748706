"""`/v1/messages` through the Anthropic client; every object and event is held to the client's own types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from pydantic import TypeAdapter

from phasewise.serving.http.http_settings import HttpLimits
from tests.support.models.tool_templates import HERMES
from tests.support.servers.scripted_engine import Scripted, ScriptedRanks, scripted_server

if TYPE_CHECKING:
    import anthropic

TOOLS: Any = [{"name": "add", "description": "sums", "input_schema": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "hi"}]


@cache
def validator(name: str) -> Any:
    """Of one of the client's types. The client is loaded where it is used: that takes a second."""
    from anthropic import types

    return TypeAdapter(getattr(types, name))


def asked(running: Scripted, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": HELLO, "max_tokens": 200, "temperature": 0, **fields}
    return httpx.post(f"{running[0].url}/v1/messages", json=body, timeout=60)


def events_of(response: httpx.Response) -> list[Any]:
    """Each validated, under its own name; blocks open and close in order."""
    raw_events = []
    for frame in response.text.split("\n\n"):
        name, _, data = frame.partition("\ndata: ")
        if data:
            raw_events.append(json.loads(data))
            assert name == f"event: {raw_events[-1]['type']}"
    n_open = 0
    for event in raw_events:
        n_open += (event["type"] == "content_block_start") - (event["type"] == "content_block_stop")
        assert n_open in (0, 1)
    assert n_open == 0
    return [validator("RawMessageStreamEvent").validate_python(raw_event) for raw_event in raw_events]


@pytest.fixture(scope="module")
def client(running: Scripted) -> Iterator[anthropic.Anthropic]:
    import anthropic

    with anthropic.Anthropic(base_url=running[0].url, api_key="any", max_retries=0, timeout=60) as opened:
        yield opened


def test_a_text_whole_and_streamed(client: anthropic.Anthropic, ranks: ScriptedRanks) -> None:
    seen: list[str] = []
    ranks.script = lambda prompt: (seen.append(prompt), "Paris is it.")[1]
    fields: Any = {"model": "fake", "max_tokens": 100, "messages": HELLO, "extra_body": {"temperature": 0}}

    whole = client.messages.create(system=[{"type": "text", "text": "Be brief."}], **fields)

    assert [(block.type, getattr(block, "text", "")) for block in whole.content] == [("text", "Paris is it.")]
    assert (whole.stop_reason, whole.stop_sequence) == ("end_turn", None)
    assert whole.usage.output_tokens == len("Paris is it.") + 1
    assert "Be brief." in seen[0]
    with client.messages.stream(system="Be brief.", **fields) as stream:
        said = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert said == "Paris is it."
    assert [block.type for block in final.content] == ["text"]
    n_prompt = whole.usage.input_tokens + (whole.usage.cache_read_input_tokens or 0)
    assert final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0) == n_prompt
    count = client.messages.count_tokens(system="Be brief.", messages=HELLO, model="fake")
    assert count.input_tokens == n_prompt


def test_thoughts_text_and_calls_are_blocks(running: Scripted, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: f"<think>\nHm.\n</think>\n\nI add.\n{CALL}\n{CALL}"
    whole = validator("Message").validate_python(asked(running, tools=TOOLS).json())
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole.stop_reason == "tool_use"
    assert [block.input for block in whole.content if block.type == "tool_use"] == [{"n": 1}, {"n": 1}]
    assert len({block.id for block in whole.content if block.type == "tool_use"}) == 2

    events = events_of(asked(running, tools=TOOLS, stream=True))
    begun = [event.content_block.type for event in events if event.type == "content_block_start"]
    assert begun == [block.type for block in whole.content]
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    assert "".join(delta.thinking for delta in deltas if delta.type == "thinking_delta") == "Hm."
    assert "".join(delta.text for delta in deltas if delta.type == "text_delta") == "I add."
    pieces = "".join(delta.partial_json for delta in deltas if delta.type == "input_json_delta")
    assert pieces.replace(" ", "") == '{"n":1}{"n":1}'
    assert (events[0].type, events[-2].type, events[-1].type) == (
        "message_start",
        "message_delta",
        "message_stop",
    )
    assert events[-2].delta.stop_reason == "tool_use"
    assert events[-2].usage.output_tokens == whole.usage.output_tokens


def test_an_agent_s_turns_reach_the_model(client: anthropic.Anthropic, ranks: ScriptedRanks) -> None:
    seen: list[str] = []
    ranks.script = lambda prompt: (
        seen.append(prompt),
        CALL if "tool_response" not in prompt else "It is 2.",
    )[1]
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]}]
    fields: Any = {"model": "fake", "max_tokens": 100, "tools": TOOLS, "extra_body": {"temperature": 0}}
    first = client.messages.create(messages=messages, **fields)
    (call,) = first.content
    assert call.type == "tool_use"
    messages += [
        {"role": "assistant", "content": first.content},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "two", "is_error": True},
                {"type": "text", "text": "sure?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    ranks.script = lambda prompt: (seen.append(prompt), "It is 2.")[1]
    second = client.messages.create(messages=messages, **fields)
    assert [block.text for block in second.content if block.type == "text"] == ["It is 2."]
    assert "Error: two" in seen[-1]
    assert seen[-1].index("Error: two") < seen[-1].index("sure?")
    assert seen[-1].count("<tool_call>") >= 1


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_call_can_be_required(running: Scripted, ranks: ScriptedRanks, choice: Any) -> None:
    ranks.script = lambda _prompt: "no"
    wanted = {**choice, "disable_parallel_tool_use": True}
    said = validator("Message").validate_python(asked(running, tools=TOOLS, tool_choice=wanted).json())
    assert [block.type for block in said.content] == ["tool_use"]


def test_why_an_answer_ended(running: Scripted, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: "one two three"

    def ending(**fields: Any) -> tuple[str, str | None, str]:
        said = validator("Message").validate_python(asked(running, **fields).json())
        streamed = events_of(asked(running, stream=True, **fields))[-2].delta
        assert (streamed.stop_reason, streamed.stop_sequence) == (said.stop_reason, said.stop_sequence)
        text = "".join(block.text for block in said.content if block.type == "text")
        return str(said.stop_reason), said.stop_sequence, text

    assert ending() == ("end_turn", None, "one two three")
    assert ending(max_tokens=4) == ("max_tokens", None, "one ")
    assert ending(stop_sequences=["three", "two"]) == ("stop_sequence", "two", "one ")
    ranks.script = lambda _prompt: "on and " * 100
    long = [{"role": "user", "content": "on and " * 540}]
    assert ending(messages=long, max_tokens=100_000)[0] == "model_context_window_exceeded"


@pytest.mark.parametrize("thinking", [None, {"type": "disabled"}, {"type": "enabled", "budget_tokens": 1024}])
def test_thinking_is_off_unless_asked_for(thinking: Any) -> None:
    template = HERMES.replace("{%- if add_generation", "{{ enable_thinking }}{%- if add_generation")
    assert template != HERMES
    with scripted_server(template, "<|im_start|>assistant\n") as running:
        seen: list[str] = []
        running[1].script = lambda prompt: (seen.append(prompt), "a")[1]
        assert asked(running, **({"thinking": thinking} if thinking else {})).status_code == 200
        is_on = bool(thinking) and thinking["type"] == "enabled"
        assert str(is_on) in seen[0]
        assert str(not is_on) not in seen[0]


RESULT = {"type": "tool_result", "tool_use_id": "a"}


def _of_user(*blocks: Any) -> Any:
    return [{"role": "user", "content": list(blocks)}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": _of_user({"type": "image", "source": {}})}, "messages"),
        ({"messages": _of_user({"type": "tool_use", "id": "a", "name": "b", "input": {}})}, "tool_use"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "{"}]}, "go on"),
        ({"messages": [{"role": "assistant", "content": [RESULT]}, *HELLO]}, "user's"),
        ({"tools": [{"name": "a"}]}, "input_schema"),
        ({"tools": [{"type": "web_search_20250305"}], "tool_choice": {"type": "any"}}, "tools"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "name"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": 1.5}, "temperature"),
        ({"model": "claude-none"}, "claude-none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_the_client_s_shape(
    running: Scripted, fields: dict[str, Any], named: str
) -> None:
    refusal = asked(running, **fields)
    said = refusal.json()
    is_unknown = named.startswith("claude")
    assert refusal.status_code == (404 if is_unknown else 400)
    assert said["type"] == "error"
    assert said["error"]["type"] == ("not_found_error" if is_unknown else "invalid_request_error")
    assert named in said["error"]["message"]
    assert "\n" not in said["error"]["message"]


def test_the_key_comes_in_either_header() -> None:
    import anthropic

    limits = HttpLimits(api_keys=("secret",))
    with scripted_server(HERMES, "<|im_start|>assistant\n", limits=limits) as (server, ranks):
        ranks.script = lambda _prompt: "a"
        for key in ({"api_key": "secret"}, {"auth_token": "secret"}):
            with anthropic.Anthropic(base_url=server.url, max_retries=0, **key) as client:  # type: ignore[arg-type]
                assert client.messages.create(model="fake", max_tokens=9, messages=HELLO).content
        with (
            anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as client,
            pytest.raises(anthropic.AuthenticationError, match="does not know it"),
        ):
            client.messages.create(model="fake", max_tokens=9, messages=HELLO)


def test_a_failure_within_a_stream_is_an_error_event(running: Scripted, ranks: ScriptedRanks) -> None:
    def script(_prompt: str) -> str:
        raise ValueError("broken")

    ranks.script = script
    refusal = asked(running, stream=True)
    assert refusal.status_code == 500
    assert refusal.json()["error"]["type"] == "api_error"

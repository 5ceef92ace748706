"""Tools and thoughts through the OpenAI client, on a server whose model answers by a script."""

from __future__ import annotations

import json
from typing import Any

import httpx
import jsonschema_rs
import openai
import pytest

from tests.support.servers.scripted_engine import Scripted, ScriptedRanks

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "get_weather", "description": "now", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "no_arguments"}},
]
HELLO: Any = [{"role": "user", "content": "hi"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def asked(running: Scripted, **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": HELLO, "temperature": 0, "max_tokens": 300, **fields}
    return httpx.post(f"{running[0].url}/v1/chat/completions", json=body, timeout=60)


def test_calls_come_as_tool_calls_whole_and_streamed(api: openai.OpenAI, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: f"I look.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"
    fields: Any = {"model": "fake", "messages": HELLO, "tools": TOOLS, "temperature": 0}

    whole = api.chat.completions.create(**fields).choices[0]

    assert (whole.message.content, whole.finish_reason) == ("I look.", "tool_calls")
    calls: Any = whole.message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Paris"}, {"city": "Rome"}]
    assert {call.function.name for call in calls} == {"get_weather"}
    assert len({call.id for call in calls}) == 2

    with api.chat.completions.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.done" in kinds
    assert (final.message.content, final.finish_reason) == ("I look.", "tool_calls")
    streamed: Any = final.message.tool_calls
    assert [call.function.arguments for call in streamed] == [call.function.arguments for call in calls]


def test_arguments_come_in_pieces_that_join_to_those_of_the_whole_answer(
    api: openai.OpenAI, ranks: ScriptedRanks
) -> None:
    ranks.script = lambda _prompt: f"{CALL}\n{CALL.replace('Paris', 'Rome')}"
    fields: Any = {"model": "fake", "messages": HELLO, "tools": TOOLS, "temperature": 0}

    whole: Any = api.chat.completions.create(**fields).choices[0].message.tool_calls
    deltas: list[Any] = [
        call
        for chunk in api.chat.completions.create(stream=True, **fields)
        for call in chunk.choices[0].delta.tool_calls or ()
    ]

    for index, call in enumerate(whole):
        first, *rest = [delta for delta in deltas if delta.index == index]
        assert (first.function.name, first.type) == (call.function.name, "function")
        assert first.id
        assert len(rest) >= len("Paris")  # the model's tokens are bytes
        assert all(delta.function.name is None and delta.id is None for delta in rest)
        pieces = [delta.function.arguments for delta in (first, *rest)]
        assert "".join(pieces) == call.function.arguments


def test_a_call_cut_off_within_its_arguments_stays_a_call(running: Scripted, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: CALL
    n_tokens = CALL.index("Paris") + 2
    choice = asked(running, tools=TOOLS, max_tokens=n_tokens).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["arguments"], choice["finish_reason"]) == ('{"city": "Pa', "length")


def test_thoughts_come_apart(api: openai.OpenAI, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: f"<think>\nHm, {CALL}\n</think>\n\nYes."
    fields: Any = {"model": "fake", "messages": HELLO, "tools": TOOLS, "temperature": 0}

    message: Any = api.chat.completions.create(**fields).choices[0].message
    assert (message.reasoning_content, message.content) == (f"Hm, {CALL}", "Yes.")
    assert message.tool_calls is None

    thought = said = ""
    for chunk in api.chat.completions.create(stream=True, **fields):
        delta: Any = chunk.choices[0].delta
        thought += getattr(delta, "reasoning_content", None) or ""
        said += delta.content or ""
    assert (thought, said) == (f"Hm, {CALL}", "Yes.")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_required_comes_whatever_the_model_wants_to_say(
    running: Scripted, ranks: ScriptedRanks, choice: Any, stream: bool
) -> None:
    ranks.script = lambda _prompt: "I would rather talk, and talk"
    response = asked(running, tools=TOOLS[:1], tool_choice=choice, stream=stream, parallel_tool_calls=False)
    assert response.status_code == 200
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line[6:7] == "{"]
        deltas = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
        call = deltas[0]
        call["function"]["arguments"] = "".join(delta["function"]["arguments"] for delta in deltas)
        reason = events[-1]["choices"][0]["finish_reason"]
    else:
        choice_ = response.json()["choices"][0]
        (call,), reason = choice_["message"]["tool_calls"], choice_["finish_reason"]
    assert reason == "tool_calls"
    assert call["function"]["name"] == "get_weather"
    jsonschema_rs.validate(WEATHER, json.loads(call["function"]["arguments"]))


def test_an_automatic_call_is_held_to_its_schema_once_it_begins(
    running: Scripted, ranks: ScriptedRanks
) -> None:
    ranks.script = lambda _prompt: 'So: <tool_call>\n{"name": "wrong", "arguments": {"town": 3, '
    choice = asked(running, tools=TOOLS[:1]).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["message"]["content"], call["function"]["name"]) == ("So:", "get_weather")
    jsonschema_rs.validate(WEATHER, json.loads(call["function"]["arguments"]))


def test_a_thinking_model_thinks_before_it_must_call(running: Scripted, ranks: ScriptedRanks) -> None:
    """The byte vocabulary has no token for `<think>`, so the call comes at once."""
    ranks.script = lambda _prompt: "<think>a</think>"
    choice = asked(running, tools=TOOLS[:1], tool_choice="required", parallel_tool_calls=False).json()
    assert choice["choices"][0]["message"]["tool_calls"]


def test_an_answer_in_json_may_take_the_place_of_a_call(running: Scripted, ranks: ScriptedRanks) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    ranks.script = lambda _prompt: '{"a": 1}'
    said = asked(running, tools=TOOLS, response_format=wanted).json()["choices"][0]["message"]
    assert json.loads(said["content"]) == {"a": 1}
    ranks.script = lambda _prompt: CALL
    said = asked(running, tools=TOOLS, response_format=wanted).json()["choices"][0]["message"]
    assert json.loads(said["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


def test_a_held_call_cut_short_before_its_arguments_is_nothing(
    running: Scripted, ranks: ScriptedRanks
) -> None:
    ranks.script = lambda _prompt: CALL
    choice = asked(running, tools=TOOLS, max_tokens=30).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")


UNHELD: tuple[tuple[dict[str, Any], str], ...] = (
    ({"type": "array", "uniqueItems": True, "contains": {}}, "tools.odd.contains,tools.odd.uniqueItems"),
    ({"type": "string", "pattern": r"^\d{3}\b"}, "tools.odd.pattern"),
    ({"type": "string", "pattern": "["}, "tools.odd.pattern"),
    ({"type": "string", "format": "a colour"}, "tools.odd.format"),
    ({"type": "integer", "multipleOf": 3, "not": {"const": 3}}, "tools.odd.not"),
    ({"type": "integer", "multipleOf": 7, "minimum": 1, "maximum": 3}, "tools.odd.parameters"),
    ({"type": "string", "pattern": r"^\S+$", "maxLength": 65536}, ""),
    ({"type": "string", "pattern": "^a+$"}, ""),
)


@pytest.mark.many
@pytest.mark.parametrize(("schema", "named_fields"), UNHELD)
def test_a_schema_that_cannot_be_held_disables_no_other_and_is_named(
    running: Scripted, ranks: ScriptedRanks, schema: dict[str, Any], named_fields: str
) -> None:
    """Of 8 tools one has it: calls are held all the same, the others by their schemas. The header names what
    is not held, the first time and when the grammar is known."""
    ranks.script = lambda _prompt: "Hello."
    odd = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    tools = [{"type": "function", "function": {"name": f"f{n}", "parameters": WEATHER}} for n in range(7)]
    tools.insert(3, {"type": "function", "function": {"name": "odd", "parameters": odd}})
    named = {"type": "function", "function": {"name": "f6"}}
    for choice in ("required", "required", "auto"):
        answer = asked(running, tools=tools, tool_choice=choice)
        assert answer.headers.get("x-ignored-fields", "") == named_fields
    for choice in ("required", named):
        answer = asked(running, tools=tools, tool_choice=choice, parallel_tool_calls=False)
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        if choice is named:
            jsonschema_rs.validate(WEATHER, json.loads(call["function"]["arguments"]))


def test_what_was_called_and_answered_is_in_the_next_prompt(running: Scripted, ranks: ScriptedRanks) -> None:
    seen: list[str] = []
    ranks.script = lambda prompt: (seen.append(prompt), "It rains.")[1]
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Ü"}'}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
    ]
    assert asked(running, tools=TOOLS, messages=messages).status_code == 200
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ü"}}\n</tool_call>' in seen[0]
    assert "<|im_start|>tool\nrain" in seen[0]


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice", "must be none, auto, required"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "names x",
        ),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "twice"),
        ({"tools": [TOOLS[1]] * 10_000}, "tools", "at most 1024"),
        ({"tools": [{"type": "web"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "function", "function": {"name": "a" * 257}}]}, "tools", "256"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "cannot set messages"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort", "low"),
    ],
)
def test_what_cannot_be_is_refused(running: Scripted, fields: dict[str, Any], param: str, says: str) -> None:
    response = asked(running, **fields)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert says in response.json()["error"]["message"]


def nested(depth: int) -> str:
    """The text of a schema: Python's own encoder does not go so deep."""
    return '{"type":"object","properties":{"a":' * depth + '{"type":"string"}' + "}}" * depth


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("depth", [20, 60, 1000])
def test_deep_schemas_are_no_error_of_the_server(
    running: Scripted, ranks: ScriptedRanks, choice: str, depth: int
) -> None:
    """Too deep for a grammar: refused where a call is required, else the model writes as it likes."""
    ranks.script = lambda _prompt: "Hello"
    tool = f'{{"type": "function", "function": {{"name": "deep", "parameters": {nested(depth)}}}}}'
    fields = f'"tools": [{tool}], "tool_choice": "{choice}", "max_tokens": 5, "model": "fake"'
    response = httpx.post(
        f"{running[0].url}/v1/chat/completions",
        content=f'{{"messages": [{{"role": "user", "content": "a"}}], {fields}}}',
        timeout=60,
    )
    is_refused = depth == 1000 or (depth == 60 and choice == "required")
    assert response.status_code == (400 if is_refused else 200), response.text

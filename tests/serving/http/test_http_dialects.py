"""Agents' requests: parts that this server cannot run or read are left out and named, in every API."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from phasewise.serving.http.errors import ApiError
from phasewise.serving.http.requests.chat_schemas import ChatRequest, plain_names
from phasewise.serving.http.routes.ollama import closed
from tests.support.models.tool_templates import HERMES
from tests.support.servers.scripted_engine import Scripted, ScriptedRanks, scripted_server
from tests.support.tiers import examples

Running = Scripted
GREEDY = {"temperature": 0}
EVENTS: Any = TypeAdapter(ResponseStreamEvent)
IMAGE = {
    "chat": {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}},
    "responses": {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
    "messages": {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}},
}
SHELL = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
CODEX_TOOLS: Any = [
    {"type": "function", "name": "shell", "description": "runs", "parameters": SHELL, "strict": False},
    {"type": "custom", "name": "patch", "format": GRAMMAR},
    {"type": "namespace", "name": "agents", "description": "more", "tools": [
        {"type": "function", "name": "close", "parameters": {"type": "object", "properties": {}}},
    ]},
    {"type": "web_search", "external_web_access": False},
    {"type": "mcp", "server_label": "x", "server_url": "http://x"},
]  # fmt: skip


def sent(running: Running, path: str, **fields: Any) -> httpx.Response:
    return httpx.post(f"{running[0].url}{path}", json={"model": "fake", **fields}, timeout=60)


def called(name: str, **arguments: Any) -> str:
    said = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{said}\n</tool_call>"


def responses(running: Running, **fields: Any) -> httpx.Response:
    return sent(running, "/v1/responses", **{"input": "hi", "temperature": 0, "tools": CODEX_TOOLS, **fields})


def chat(running: Running, *messages: Any, **fields: Any) -> httpx.Response:
    return sent(running, "/v1/chat/completions", messages=list(messages), temperature=0, **fields)


def anthropic(running: Running, *messages: Any, **fields: Any) -> httpx.Response:
    return sent(running, "/v1/messages", messages=list(messages), temperature=0, max_tokens=50, **fields)


@pytest.fixture
def prompts(ranks: ScriptedRanks) -> list[str]:
    """The prompts that the model is shown, answer by answer; it says "ok"."""
    seen: list[str] = []

    def script(prompt: str) -> str:
        if not seen or seen[-1] != prompt:
            seen.append(prompt)
        return "ok"

    ranks.script = script
    return seen


# ---- tools ----------------------------------------------------------------------------------------------


def test_tools_that_a_server_would_run_are_left_out_and_named(running: Running, prompts: list[str]) -> None:
    answer = responses(running)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Ignored-Fields"] == "tools.mcp,tools.web_search"
    assert all(name in prompts[-1] for name in ("shell", "patch", "agents__close", "start: X"))
    assert "web_search" not in prompts[-1]

    of_server = [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "bash_20250124", "name": "bash"},
    ]
    own = {"name": "read", "input_schema": {"type": "object"}}
    answer = anthropic(running, {"role": "user", "content": "hi"}, tools=[*of_server, own])
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Ignored-Fields"] == "tools.bash_20250124,tools.web_search_20250305"
    assert "read" in prompts[-1]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("text", ['*** Begin\n+"a\\b"', "", "\ta\n"])
def test_a_call_of_a_custom_tool_is_its_text(
    running: Running, ranks: ScriptedRanks, text: str, choice: str
) -> None:
    ranks.script = lambda _prompt: called("patch", input=text)
    asked = {"tool_choice": choice, "tools": [CODEX_TOOLS[1]]}
    whole = Response.model_validate(responses(running, **asked).json())
    (item,) = whole.output
    assert item.type == "custom_tool_call"
    assert (item.name, item.input) == ("patch", text)

    frames = responses(running, stream=True, **asked).text.split("\n\n")
    events = [EVENTS.validate_json(frame.partition("data: ")[2]) for frame in frames if frame]
    kinds = [event.type for event in events]
    assert kinds[2:6] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert (events[3].delta, events[4].input, events[5].item.input) == (text, text, text)
    assert [event.sequence_number for event in events] == list(range(len(events)))


def _text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def test_what_an_agent_did_before_is_shown(running: Running, prompts: list[str]) -> None:
    before = [
        {"type": "message", "role": "user", "content": "go"},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"},
        {"type": "custom_tool_call", "call_id": "a", "name": "patch", "input": "+line"},
        {"type": "custom_tool_call_output", "call_id": "a", "output": "patched"},
        {"type": "web_search_call", "id": "w", "status": "completed", "action": {"type": "search"}},
        {"type": "function_call", "call_id": "b", "namespace": "agents", "name": "close", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "b", "output": [_text("closed")]},
        {"type": "message", "role": "user", "content": [_text("on")]},
    ]  # fmt: skip
    answer = responses(running, input=before)
    assert answer.status_code == 200, answer.text
    assert "input.web_search_call" in answer.headers["X-Ignored-Fields"]
    said = ('"+line"', "patched", '"agents__close"', "closed", "on<|im_end|>")
    places = [prompts[-1].rindex(each) for each in said]
    assert places == sorted(places)


def test_a_chat_s_custom_tool_answers_in_its_form(running: Running, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: called("patch", input="+a")
    tools = [{"type": "custom", "custom": {"name": "patch"}}]
    hi = {"role": "user", "content": "hi"}
    (choice,) = chat(running, hi, tools=tools).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "+a"})
    result = {"role": "tool", "tool_call_id": call["id"], "content": "b"}
    again = chat(running, hi, {"role": "assistant", "tool_calls": [call]}, result, tools=tools)
    assert again.status_code == 200


NAMES = ("mcp/files read", "a b", "a/b", "ns:do", "日本", "x" * 200)


@pytest.mark.many
@pytest.mark.parametrize("name", NAMES)
def test_names_that_no_template_holds_come_back_as_they_were(
    running: Running, ranks: ScriptedRanks, name: str
) -> None:
    tools = [{"type": "function", "function": {"name": each, "parameters": SHELL}} for each in NAMES]
    ranks.script = lambda _prompt: called(plain_names(NAMES)[name], cmd="ls")
    asked: Any = {"tools": tools, "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
    for stream in (False, True):
        answer = sent(running, "/v1/chat/completions", **asked, stream=stream)
        assert answer.status_code == 200, answer.text
        assert f'"name":{json.dumps(name, ensure_ascii=False)}' in answer.text
    said = sent(running, "/api/chat", **asked, stream=False, options=GREEDY).json()
    assert said["message"]["tool_calls"][0]["function"]["name"] == name
    choice = {"type": "function", "function": {"name": name}}
    assert sent(running, "/v1/chat/completions", **asked, tool_choice=choice).status_code == 200
    calls = [{"id": "a", "type": "function", "function": {"name": name, "arguments": "{}"}}]
    asked["messages"].append({"role": "assistant", "tool_calls": calls})
    asked["messages"].append({"role": "tool", "tool_call_id": "a", "name": name})
    assert sent(running, "/v1/chat/completions", **asked).status_code == 200


@examples(100)
@given(st.lists(st.text("ab/ _", min_size=1, max_size=4) | st.text(min_size=1, max_size=150), max_size=30))
def test_no_two_names_become_one(names: list[str]) -> None:
    plain = plain_names(names)
    assert set(plain) == set(names)
    assert len(set(plain.values())) == len(plain)
    assert all(len(name) <= 128 and name.isascii() and not set(name) & set("/ \n") for name in plain.values())


def test_a_thousand_tools_are_taken(running: Running, prompts: list[str]) -> None:
    tools = [{"type": "function", "function": {"name": f"f{number}"}} for number in range(1024)]
    with scripted_server(HERMES, "<|im_start|>assistant\n", context=200_000) as (server, ranks):
        ranks.script = lambda _prompt: "ok"
        answer = chat((server, ranks), {"role": "user", "content": "hi"}, tools=tools)
    assert answer.status_code == 200, answer.text


# ---- contents -------------------------------------------------------------------------------------------


def _chat_image(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}]


def _past(content: Any) -> list[Any]:
    """A conversation with a result of a tool."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": content},
    ]


@pytest.mark.parametrize("part", [*IMAGE.values(), {"type": "input_audio", "input_audio": {}}])
def test_an_image_of_the_past_is_a_text_and_a_new_one_is_refused(
    running: Running, prompts: list[str], part: dict[str, Any]
) -> None:
    look, on = _chat_image(part), {"role": "user", "content": "on"}
    for taken in ([*look, {"role": "assistant", "content": "a"}, on], _past([part])):
        answer = chat(running, *taken)
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Ignored-Fields"] == f"content.{part['type']}"
        assert f"[{part['type']}: left out" in prompts[-1]
    for refused in (look, [on, *look], [*look, on]):
        answer = chat(running, *refused)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages"
        said = f"this server reads text alone, and a part of type {part['type']!r}"
        assert said in answer.json()["error"]["message"]


def test_so_it_is_in_the_other_apis(running: Running, prompts: list[str]) -> None:
    call = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
    ask = {"role": "user", "content": "go"}

    def result(content: Any) -> list[Any]:
        block = {"type": "tool_result", "tool_use_id": "a", "content": content}
        return [ask, {"role": "assistant", "content": [call]}, {"role": "user", "content": [block]}]

    document = {"type": "document", "title": "Plan", "source": {"type": "text", "data": "first this"}}
    hit = {"type": "search_result", "title": "T", "source": "u", "content": [{"type": "text", "text": "hit"}]}
    reference = {"type": "tool_reference", "tool_name": "grep"}
    held = ((IMAGE["messages"], "left out"), (document, "first this"), (hit, "hit"), (reference, "grep"))
    for part, says in held:
        answer = anthropic(running, *result([{"type": "text", "text": "see"}, part]))
        assert answer.status_code == 200, answer.text
        assert answer.headers["X-Ignored-Fields"] == f"content.{part['type']}"
        assert f"[{part['type']}" in prompts[-1]
        assert says in prompts[-1]
    assert anthropic(running, *result([])).status_code == 200
    assert anthropic(running, *result(None)).status_code == 200
    assert anthropic(running, {"role": "user", "content": [document]}).status_code == 200
    assert anthropic(running, {"role": "user", "content": [IMAGE["messages"]]}).status_code == 400

    output = {"type": "function_call_output", "call_id": "a", "output": [IMAGE["responses"]]}
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "a", "name": "f"},
        output,
    ]
    answer = responses(running, input=items)
    assert answer.status_code == 200, answer.text
    assert "content.input_image" in answer.headers["X-Ignored-Fields"]
    assert responses(running, input=[*items[:2], {**output, "output": []}]).status_code == 200
    refused = responses(running, input=[{"role": "user", "content": [IMAGE["responses"]]}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input")
    assert "this server reads text alone, and a part of type " in refused.json()["error"]["message"]

    look = {"role": "user", "content": "look", "images": ["AA=="]}
    assert sent(running, "/api/chat", messages=[look], stream=False).status_code == 400
    told = [look, {"role": "assistant", "content": "a"}, ask]
    answer = sent(running, "/api/chat", messages=told, stream=False)
    assert (answer.status_code, answer.headers["X-Ignored-Fields"]) == (200, "content.image")


_WORDS = st.text("ab[] \n", max_size=5)
_VALUES = st.recursive(
    _WORDS | st.none() | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["text", "source", "content", "title", "type"]), inner, max_size=3)
    ),
    max_leaves=6,
)
_KINDS = st.sampled_from(["text", "image_url", "input_audio", "document", "file", "refusal", "x"])
_PARTS = st.builds(lambda kind, more: {**more, "type": kind}, _KINDS, st.dictionaries(
    st.sampled_from(["source", "content", "title", "refusal", "data"]), _VALUES, max_size=3
) | st.fixed_dictionaries({"text": _WORDS}))  # fmt: skip
_MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": _WORDS | st.lists(_PARTS, max_size=3),
    }
)


@examples(200)
@given(st.lists(_MESSAGES, min_size=1, max_size=5))
def test_whatever_the_parts_are_a_conversation_is_texts_or_refused(messages: list[dict[str, Any]]) -> None:
    try:
        body = ChatRequest.of({"model": "m", "messages": messages})
    except ApiError:
        return
    assert all(isinstance(message.content, str) for message in body.messages)
    kinds = {
        part["type"] for each in messages if isinstance(each["content"], list) for part in each["content"]
    }
    assert set(body.ignored()) == {f"content.{kind}" for kind in kinds - {"text", "refusal"}}
    again = ChatRequest.of({"model": "m", "messages": [each.model_dump() for each in body.messages]})
    assert [each.text for each in again.messages] == [each.text for each in body.messages]


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ('{"a":', {"_raw": '{"a":'}),
        ("[1]", {"_raw": "[1]"}),
        ('"x"', {"_raw": '"x"'}),
        ("", {}),
        (" ", {}),
        ("null", {"_raw": "null"}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ([1], {"_raw": [1]}),
        ('{"a": NaN}', {"_raw": '{"a": NaN}'}),
        ("[" * 5000, {"_raw": "[" * 5000}),
    ],
)
def test_arguments_that_are_no_object_are_shown_in_one(
    running: Running, prompts: list[str], arguments: Any, shown: Any
) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    past = [
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "b"},
    ]
    with scripted_server(HERMES, "<|im_start|>assistant\n", context=20_000) as (server, ranks):
        seen: list[str] = []
        ranks.script = lambda prompt: (seen.append(prompt), "ok")[1]
        answer = chat((server, ranks), *past)
    assert answer.status_code == 200, answer.text
    assert json.dumps({"name": "f", "arguments": shown}) in seen[0]


# ---- prompts that stay the same -------------------------------------------------------------------------


def _billing(number: int) -> str:
    return f"x-anthropic-billing-header: cc_version=2.1.{number}; cc_entrypoint=cli; cch={number:05};"


@pytest.mark.parametrize("in_blocks", [True, False])
def test_a_header_that_changes_with_every_request_is_no_part_of_the_prompt(
    running: Running, prompts: list[str], in_blocks: bool
) -> None:
    counts = set()
    for number in (1, 22, 333):
        texts = [_billing(number), "You are an agent.", "Be brief."]
        system: Any = [{"type": "text", "text": text} for text in texts] if in_blocks else "\n".join(texts)
        asked = {"system": system, "messages": [{"role": "user", "content": "hi"}], "model": "fake"}
        assert anthropic(running, *asked["messages"], system=system).status_code == 200
        counts.add(sent(running, "/v1/messages/count_tokens", **asked).json()["input_tokens"])
        routed = {"role": "system", "content": system if in_blocks else [{"type": "text", "text": system}]}
        assert chat(running, routed, *asked["messages"]).status_code == 200
    assert len(counts) == 1
    assert not any("billing" in prompt for prompt in prompts)
    assert len(set(prompts)) <= 2  # one by each way of joining blocks
    assert all("You are an agent." in prompt for prompt in prompts)


# ---- lengths --------------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "hi"}]
ASKING: dict[str, Callable[[str, int], tuple[str, dict[str, Any]]]] = {
    "chat": lambda text, most: ("/v1/chat/completions", {"messages": _user(text), "max_tokens": most}),
    "newer chat": lambda text, most: (
        "/v1/chat/completions",
        {"messages": _user(text), "max_completion_tokens": most},
    ),
    "completions": lambda text, most: ("/v1/completions", {"prompt": text, "max_tokens": most}),
    "responses": lambda text, most: ("/v1/responses", {"input": text, "max_output_tokens": most}),
    "messages": lambda text, most: ("/v1/messages", {"messages": _user(text), "max_tokens": most}),
    "ollama": lambda text, most: (
        "/api/chat",
        {"messages": _user(text), "stream": False, "options": {"num_predict": most}},
    ),
    "ollama prompt": lambda text, most: (
        "/api/generate",
        {"prompt": text, "raw": True, "stream": False, "options": {"num_predict": most}},
    ),
}
_LENGTHS = {
    "chat": '"finish_reason":"length"',
    "newer chat": '"finish_reason":"length"',
    "completions": '"finish_reason":"length"',
    "responses": '"reason":"max_output_tokens"',
    "messages": '"stop_reason":"model_context_window_exceeded"',
    "ollama": '"done_reason":"length"',
    "ollama prompt": '"done_reason":"length"',
}
_TOO_LONG = {
    "chat": "This model's maximum context length is 300 tokens. However, your messages resulted in",
    "completions": "This model's maximum context length is 300 tokens.",
    "responses": "Your input exceeds the context window of this model.",
    "messages": "prompt is too long: ",
    "ollama": "the input length exceeds the context length",
}


def _user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("dialect", ASKING)
def test_an_answer_gets_the_room_that_there_is(dialect: str) -> None:
    with scripted_server(HERMES, "<|im_start|>assistant\n", context=300) as running:
        running[1].script = lambda _prompt: "a" * 1000
        path, fields = ASKING[dialect]("hi", 8000)
        cut = sent(running, path, **fields)
        assert cut.status_code == 200, cut.text
        assert _LENGTHS[dialect] in cut.text
        assert 0 < int(cut.headers["X-Clamped-Max-Tokens"]) < 300
        path, fields = ASKING[dialect]("hi", 5)
        assert "X-Clamped-Max-Tokens" not in sent(running, path, **fields).headers


@pytest.mark.parametrize("dialect", _TOO_LONG)
@pytest.mark.parametrize("n_over", [0, 1, 5000])
def test_a_prompt_without_room_for_an_answer_is_refused_in_the_words_of_its_api(
    dialect: str, n_over: int
) -> None:
    with scripted_server(HERMES, "<|im_start|>assistant\n", context=300) as running:
        path, fields = ASKING[dialect]("a" * (300 + n_over), 1)
        refused = sent(running, path, **fields)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert _TOO_LONG[dialect] in (error if isinstance(error, str) else error["message"])
    if dialect == "messages":
        n_prompt, most = (int(word) for word in error["message"].split() if word.isdigit())
        assert n_prompt > most == 299


# ---- what clients of other servers expect ---------------------------------------------------------------


def test_paths_mean_the_same_without_v1(running: Running, prompts: list[str]) -> None:
    fields: dict[str, dict[str, Any]] = {
        "/chat/completions": {"messages": HELLO},
        "/completions": {"prompt": "hi"},
        "/responses": {"input": "hi"},
        "/messages": {"messages": HELLO, "max_tokens": 5},
        "/messages/count_tokens": {"messages": HELLO},
    }
    for path, body in fields.items():
        assert sent(running, path, **body).status_code == 200, path
        assert sent(running, f"/v1{path}", **body).status_code == 200, path
    assert "type" in sent(running, "/messages", messages=[]).json()  # refused in Anthropic's shape
    url = running[0].url
    assert httpx.get(f"{url}/models").json() == httpx.get(f"{url}/v1/models").json()
    assert httpx.get(f"{url}/models/fake").status_code == 200


# ---- fields that are not known --------------------------------------------------------------------------


def test_what_another_server_ran_is_left_out_of_an_answer_s_past(
    running: Running, prompts: list[str]
) -> None:
    ran = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": []},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "I have searched."},
    ]
    past = [{"role": "user", "content": []}, {"role": "assistant", "content": ran}]
    answer = anthropic(running, *past, {"role": "user", "content": "on"})
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Ignored-Fields"] == "content.server_tool_use,content.web_search_tool_result"
    assert "assistant\nI have searched.<|im_end|>" in prompts[-1]


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/chat/completions", {"messages": HELLO}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": HELLO}),
        ("/api/chat", {"messages": HELLO, "stream": False}),
        ("/api/generate", {"prompt": "hi", "stream": False}),
        ("/api/show", {}),
        ("/tokenize", {"prompt": "hi"}),
        ("/detokenize", {"tokens": [97]}),
    ],
)
def test_misspelt_fields_are_named(
    running: Running, prompts: list[str], path: str, fields: dict[str, Any]
) -> None:
    answer = sent(running, path, **fields, max_tokenz=5)
    assert answer.status_code == 200, answer.text
    assert answer.headers["X-Ignored-Fields"] == "max_tokenz"
    if path in ("/api/chat", "/api/generate"):
        answer = sent(running, path, **fields, options={"num_predikt": 1, "num_ctx": 100})
        assert answer.headers["X-Ignored-Fields"] == "options.num_predikt"


_OPEN = {"type": "object", "properties": {"a": {"type": "string"}}}
_CLOSED = {**_OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "means"),
    [
        (_OPEN, _CLOSED),
        ({"type": "object"}, {"type": "object"}),
        ({**_OPEN, "additionalProperties": True}, {**_OPEN, "additionalProperties": True}),
        ({"type": "array", "items": _OPEN}, {"type": "array", "items": _CLOSED}),
        ({"anyOf": [_OPEN, {"type": "null"}]}, {"anyOf": [_CLOSED, {"type": "null"}]}),
        ({"allOf": [_OPEN, _OPEN]}, {"allOf": [_OPEN, _OPEN]}),
        ({**_OPEN, "anyOf": [_OPEN]}, {**_OPEN, "anyOf": [_OPEN]}),
        ({"$defs": {"x": _OPEN}, "$ref": "#/$defs/x"}, {"$defs": {"x": _CLOSED}, "$ref": "#/$defs/x"}),
        (
            {"type": "object", "properties": {"properties": _OPEN, "enum": {"const": _OPEN}}},
            {
                "type": "object",
                "properties": {"properties": _CLOSED, "enum": {"const": _OPEN}},
                "additionalProperties": False,
            },
        ),
    ],
)
def test_objects_are_closed_where_nothing_is_said(schema: Any, means: Any) -> None:
    assert closed(schema) == means


def test_a_schema_of_ollama_s_ends(running: Running, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: '{"a": "b", "c": "d"}'
    answer = sent(running, "/api/chat", messages=HELLO, stream=False, format=_OPEN, options=GREEDY)
    assert json.loads(answer.json()["message"]["content"]) == {"a": "b"}


def test_nothing_that_is_left_out_makes_a_copy_of_a_request_differ() -> None:
    body = ChatRequest.of(
        {"model": "m", "messages": _past([IMAGE["chat"]]), "tools": [{"type": "web_search"}]}
    )
    assert body.model_copy(update={"model": "n"}).ignored() == ("content.image_url", "tools.web_search")

"""Ollama's API through its own client, on a server whose model answers by a script."""

from __future__ import annotations

from typing import Any

import httpx
import ollama
import pytest

from tests.support.servers.scripted_engine import Scripted, ScriptedRanks

TOOLS: Any = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"n": 1}}\n</tool_call>'
HELLO: Any = [{"role": "user", "content": "hi"}]
GREEDY: Any = {"temperature": 0}


@pytest.fixture(scope="module")
def client(running: Scripted) -> ollama.Client:
    return ollama.Client(host=running[0].url)


def asked(running: Scripted, path: str = "chat", **fields: Any) -> httpx.Response:
    body = {"model": "fake", "messages": HELLO, "stream": False, "options": GREEDY, **fields}
    return httpx.post(f"{running[0].url}/api/{path}", json=body, timeout=60)


def test_fields_that_say_nothing_here_are_named_in_a_header(running: Scripted) -> None:
    for path, fields in (("chat", {}), ("generate", {"prompt": "hi"}), ("chat", {"stream": True})):
        answer = asked(running, path, **fields, context=[1], keep_alive=5, suffix="", **{"no name": 1})
        named = {"context", "messages"} if path == "generate" else {"context"}
        assert answer.headers["X-Ignored-Fields"] == ",".join(sorted(named))
    assert "X-Ignored-Fields" not in asked(running).headers


def test_models_are_listed_and_shown(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == ["fake"]
    assert [model.model for model in client.ps().models] == ["fake"]
    shown = client.show("fake:latest")
    assert set(shown.capabilities or ()) >= {"completion", "tools"}
    with pytest.raises(ollama.ResponseError, match="'other' is not served here"):
        client.show("other")


def test_a_chat_whole_and_streamed(client: ollama.Client, ranks: ScriptedRanks) -> None:
    ranks.script = lambda _prompt: "<think>\nHm.\n</think>\n\nParis is it."

    whole = client.chat(model="fake", messages=HELLO, options=GREEDY, tools=TOOLS)

    assert (whole.message.content, whole.message.thinking) == ("Paris is it.", "Hm.")
    assert (whole.done, whole.done_reason) == (True, "stop")
    times = (whole.total_duration, whole.prompt_eval_duration, whole.eval_duration)
    assert all(time is not None and time >= 0 for time in times)
    pieces = list(client.chat(model="fake", messages=HELLO, options=GREEDY, tools=TOOLS, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == "Paris is it."
    assert "".join(piece.message.thinking or "" for piece in pieces) == "Hm."
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert (pieces[-1].eval_count, pieces[-1].prompt_eval_count) == (
        whole.eval_count,
        whole.prompt_eval_count,
    )


def test_calls_come_whole_and_their_results_go_back(client: ollama.Client, ranks: ScriptedRanks) -> None:
    seen: list[str] = []
    ranks.script = lambda _prompt: f"{CALL}\n{CALL}"
    fields: Any = {"model": "fake", "options": GREEDY, "tools": TOOLS}
    whole = client.chat(messages=HELLO, **fields).message
    streamed = [
        call
        for piece in client.chat(messages=HELLO, stream=True, **fields)
        for call in piece.message.tool_calls or ()
    ]
    assert [dict(call.function.arguments) for call in whole.tool_calls or ()] == [{"n": 1}, {"n": 1}]
    assert streamed == whole.tool_calls

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "It is 2."

    ranks.script = script
    results: Any = [{"role": "tool", "tool_name": "add", "content": content} for content in ("one", "two")]
    assert client.chat(messages=[*HELLO, whole, *results], **fields).message.content == "It is 2."
    assert seen[0].index("<|im_start|>tool\none") < seen[0].index("<|im_start|>tool\ntwo")


def test_a_prompt_is_a_chat_unless_it_is_raw(client: ollama.Client, ranks: ScriptedRanks) -> None:
    seen: list[str] = []

    def script(prompt: str) -> str:
        seen.append(prompt)
        return "Paris."

    ranks.script = script
    whole = client.generate(model="fake", prompt="The capital?", system="Be brief.", options=GREEDY)
    pieces = list(client.generate(model="fake", prompt="The capital?", options=GREEDY, stream=True))
    assert (whole.response, "".join(piece.response for piece in pieces)) == ("Paris.", "Paris.")
    assert "Be brief." in seen[0]
    assert "<|im_start|>user\nThe capital?" in seen[0]
    n_template = whole.prompt_eval_count
    raw = client.generate(model="fake", prompt="The capital?", raw=True, options=GREEDY)
    assert raw.prompt_eval_count == len("The capital?")
    assert n_template is not None
    assert n_template > len("The capital?")
    loaded = client.generate(model="fake")
    assert (loaded.done_reason, str(loaded.created_at)[-1]) == ("load", "Z")
    assert client.chat(model="fake").done_reason == "load"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        ("chat", {"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "image"),
        ("chat", {"messages": [{"role": "robot", "content": "a"}]}, "messages"),
        ("chat", {"options": {"temperature": -1}}, "options"),
        ("chat", {"format": "xml"}, "format"),
        ("generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("generate", {"prompt": "a", "receipt": True}, "receipt"),
        ("generate", {"prompt": "a", "images": ["aGk="]}, "images"),
        ("show", {"model": 1}, "model"),
    ],
)
def test_what_cannot_be_is_refused_in_the_client_s_shape(
    running: Scripted, path: str, fields: dict[str, Any], named: str
) -> None:
    refusal = asked(running, path, **fields)
    assert refusal.status_code == 400
    said = refusal.json()
    assert list(said) == ["error"]
    assert named in said["error"]
    assert "\n" not in said["error"]

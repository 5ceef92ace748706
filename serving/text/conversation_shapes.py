"""Rewrites conversations into a form that a template takes, where it refuses or drops what clients send.

A template is probed once with sentinels. Each shape of conversation that it lacks is then rewritten in every
conversation, so that a prompt stays a prefix of the next one."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
Write = Callable[[Sequence[Message], Sequence[Message], bool, Mapping[str, Any]], str | None]
"""Messages, tools, whether an answer is opened, variables -> the prompt; None where the template refuses."""
_LEFT_OUT: dict[str, dict[str, Any]] = {"object": {"additionalProperties": False}, "array": {"items": {}}}
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought")
_INTRODUCTION = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def shaped(messages: Sequence[Message], lacks: Iterable[str]) -> Messages:
    """The conversation with these shapes rewritten."""
    out = [dict(message) for message in messages]
    for name, (change, _) in _SHAPES.items():
        if name in lacks:
            out = change(out)
    return out


def plain_tools(value: Any) -> Any:
    """Tools with every field that schemas may leave out, and one type for each value."""
    if isinstance(value, list | tuple):
        return [plain_tools(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    out = {key: plain_tools(item) for key, item in value.items()}
    stated = out.get("type")
    if isinstance(stated, list):
        out["type"] = next((name for name in stated if name != "null"), "string")
    if isinstance(stated, str | list):
        out = {"description": "", **_LEFT_OUT.get(str(out["type"]), {}), **out}
    return out


def written_out(messages: Sequence[Message], tools: Sequence[Message]) -> Messages:
    """The conversation for a template without tools: tools, calls and results written as text in messages of
    system, user and assistant. The words are those that Hermes models were trained on."""
    out: Messages = []
    for message in _calls_as_text([dict(message) for message in messages]):
        result = f"<tool_response>\n{message['content']}\n</tool_response>"
        if message["role"] != "tool":
            out.append(message)
        elif out and out[-1]["role"] == "user" and out[-1]["content"].startswith("<tool_response>"):
            out[-1]["content"] += f"\n{result}"  # results of one turn are one message
        else:
            out.append({"role": "user", "content": result})
    if not tools:
        return out
    shown = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    n_leading = next((n for n, message in enumerate(out) if message["role"] != "system"), len(out))
    return _join_leading([*out[:n_leading], {"role": "system", "content": shown}, *out[n_leading:]])


def shapes_lacked(write: Write, tools: Sequence[Message]) -> tuple[str, ...]:
    """The shapes that a template refuses or of which it drops a text, but takes once they are rewritten."""
    lacks: list[str] = []
    for name, (_, probes) in _SHAPES.items():
        for probe in probes:
            changed = shaped(probe, [*lacks, name])
            if not _is_taken(write, shaped(probe, lacks), tools) and _is_taken(write, changed, tools):
                lacks.append(name)
    if write([_USER], _BARE, True, {}) is None and write([_USER], plain_tools(_BARE), True, {}) is not None:
        lacks.append("bare schemas")
    return tuple(lacks)


def takes_any_id(write: Write, tools: Sequence[Message], lacks: Sequence[str]) -> bool:
    """False if the template refuses calls with ids like OpenAI's but takes ids of nine characters."""
    called = json.dumps(shaped(_CALLED, lacks))
    longer = json.loads(called.replace("qcallid01", f"call_{'0' * 24}"))
    is_taken = write(longer, tools, True, {}) is not None
    return is_taken or write(json.loads(called), tools, True, {}) is None


def _is_taken(write: Write, messages: Messages, tools: Sequence[Message]) -> bool:
    text = write(messages, tools, True, {})
    marks = re.findall(r"q(?:probe|name|value)\w+", json.dumps(messages))
    return text is not None and all(mark in text for mark in marks)


def _without(message: Message, *fields: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in fields}


def _joined(messages: Messages, joins: Callable[[Messages, Message], bool]) -> Messages:
    """Messages with a message's text appended to the one before, wherever `joins` is true."""
    out: Messages = []
    for message in messages:
        if out and joins(out, message):
            texts = [str(text) for text in (out[-1]["content"], message["content"]) if text]
            out[-1] = {**out[-1], **message, "role": out[-1]["role"], "content": "\n\n".join(texts)}
        else:
            out.append(message)
    return out


def _join_leading(messages: Messages) -> Messages:
    return _joined(messages, lambda out, m: len(out) == 1 and out[0]["role"] == m["role"] == "system")


def _move_later(messages: Messages) -> Messages:
    """Move a later system text into the next user's turn, or a turn of its own; the prefix stays cached."""
    out: Messages = []
    waiting = ""
    for message in messages:
        if message["role"] == "system" and any(other["role"] != "system" for other in out):
            waiting += f"{message['content']}\n\n"
            continue
        if waiting and message["role"] == "user":
            message, waiting = {**message, "content": f"{waiting}{message['content']}"}, ""
        elif waiting and message["role"] == "assistant":
            out.append({"role": "user", "content": waiting.rstrip()})
            waiting = ""
        out.append(message)
    return [*out, {"role": "user", "content": waiting.rstrip()}] if waiting else out


def _join_neighbours(messages: Messages) -> Messages:
    def joins(out: Messages, message: Message) -> bool:
        calls = out[-1].get("tool_calls") or message.get("tool_calls")
        return out[-1]["role"] == message["role"] and message["role"] in ("user", "assistant") and not calls

    return _joined(messages, joins)


def _join_to_result(messages: Messages) -> Messages:
    """Append a user's text right after a tool's result to that result."""
    return _joined(messages, lambda out, m: out[-1]["role"] == "tool" and m["role"] == "user")


def _system_to_user(messages: Messages) -> Messages:
    """Move the leading system text into the first user's turn."""
    if not messages or messages[0]["role"] != "system":
        return messages
    said, *out = _join_leading(messages)
    first = next((n for n, message in enumerate(out) if message["role"] == "user"), None)
    if first is None:
        return [{**said, "role": "user"}, *out]
    out[first] = {**out[first], "content": f"{said['content']}\n\n{out[first]['content']}"}
    return out


def _said_at_all(messages: Messages) -> Messages:
    """Remove answers without text and calls."""
    return [m for m in messages if m["role"] != "assistant" or m.get("content") or m.get("tool_calls")]


def _user_first(messages: Messages) -> Messages:
    """Insert a user's turn before an answer that comes first."""
    first = next((n for n, message in enumerate(messages) if message["role"] != "system"), 0)
    if not messages or messages[first]["role"] != "assistant":
        return messages
    return [*messages[:first], {"role": "user", "content": "..."}, *messages[first:]]


def _lone_results(messages: Messages) -> Messages:
    """Turn results of calls that are not in the conversation into user's turns."""
    calls = (n for n, m in enumerate(messages) if m["role"] == "assistant" and m.get("tool_calls"))
    first = next(calls, len(messages))
    out = [{"role": "user", "content": m["content"]} if m["role"] == "tool" else m for m in messages[:first]]
    return [*out, *messages[first:]]


def _one_call(messages: Messages) -> Messages:
    """Divide messages of several calls into messages of one call, each followed by its result."""
    out: Messages = []
    left = list(messages)
    while left:
        message = left.pop(0)
        if len(calls := message.get("tool_calls") or []) < 2:
            out.append(message)
            continue
        results = list(itertools.takewhile(lambda other: other["role"] == "tool", left))
        left = left[len(results) :]
        ids = [call.get("id") for call in calls]
        for call in calls:
            out.append({**message, "tool_calls": [call]})
            out += [result for result in results if result.get("tool_call_id") == call.get("id")]
            message = {**_without(message, *THOUGHTS), "content": ""}
        out += [result for result in results if result.get("tool_call_id") not in ids]
    return out


def _text_before_calls(messages: Messages) -> Messages:
    """Move text beside calls into a message of its own."""
    out: Messages = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            out.append(_without(message, "tool_calls"))
            message = {**_without(message, *THOUGHTS), "content": ""}
        out.append(message)
    return out


def _without_thoughts(messages: Messages) -> Messages:
    return [_without(m, *THOUGHTS) if m.get("tool_calls") and m.get("content") else m for m in messages]


def _text_arguments(messages: Messages) -> Messages:
    out = json.loads(json.dumps(messages))
    for function in (call["function"] for m in out for call in m.get("tool_calls") or []):
        if not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return out  # type: ignore[no-any-return]


def _calls_as_text(messages: Messages) -> Messages:
    """Write calls as text, in the words of Hermes models."""
    out: Messages = []
    for message in messages:
        texts = [str(message["content"])] if message.get("content") else []
        for call in message.get("tool_calls") or []:
            said = {key: call["function"][key] for key in ("name", "arguments")}
            texts.append(f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>")
        text = {"content": "\n".join(texts)} if message.get("tool_calls") else {}
        out.append(_without(message, "tool_calls") | text)
    return out


# Shapes to try, cheapest change first


def _said(role: str, number: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"qprobe{role}{number}", **more}


def _calls(*numbers: int, **more: Any) -> dict[str, Any]:
    functions = [(n, {"name": f"qname{n}", "arguments": {"a": f"qvalue{n}"}}) for n in numbers]
    calls = [{"id": f"qcallid0{n}", "type": "function", "function": function} for n, function in functions]
    return _said("assistant", 2, tool_calls=calls, **more)


_ASSISTANT, _USER, _SYSTEM = _said("assistant", 1), _said("user", 1), _said("system", 1)
_RESULT, _SECOND = (_said("tool", n, tool_call_id=f"qcallid0{n}", name=f"qname{n}") for n in (1, 2))
_CALLED = [_USER, {**_calls(1), "content": ""}, _RESULT]
_TEXT_AND_CALL = [_USER, _calls(1), _RESULT, _said("assistant", 3), _said("user", 3)]
_SHAPES: dict[str, tuple[Callable[[Messages], Messages], list[Messages]]] = {
    "leading systems": (_join_leading, [[_SYSTEM, _said("system", 2), _USER]]),
    "system": (_system_to_user, [[_SYSTEM, _USER], [_SYSTEM, *_CALLED]]),
    "later systems": (_move_later, [[_SYSTEM, _USER, _ASSISTANT, _said("system", 2), _said("user", 2)]]),
    "arguments as objects": (_text_arguments, [_CALLED]),
    "results without calls": (_lone_results, [[_RESULT, _USER]]),
    "silent answers": (_said_at_all, [[_USER, {**_ASSISTANT, "content": ""}, _said("user", 2)]]),
    "answers first": (_user_first, [[_ASSISTANT, _USER]]),
    "several calls": (_one_call, [[_USER, {**_calls(1, 2), "content": ""}, _RESULT, _SECOND]]),
    "thoughts beside text and calls": (
        _without_thoughts, [[_USER, _calls(1, **dict.fromkeys(THOUGHTS, "qthought")), _RESULT]]
    ),
    "text beside calls": (_text_before_calls, [_TEXT_AND_CALL]),
    "user after result": (_join_to_result, [[*_CALLED, _said("user", 2)]]),
    "neighbours": (_join_neighbours, [[_USER, _said("user", 2)]]),
    "calls": (_calls_as_text, [_CALLED]),
}  # fmt: skip
LAST_RESORT = frozenset(_SHAPES) - {"system", "arguments as objects", "calls"}
"""Shapes to rewrite in a conversation that the template still refuses."""
_PROPERTIES = {
    "a": {"type": ["string", "null"]},
    "b": {"type": "object"},
    "c": {"type": "array", "items": {"type": "object", "properties": {}}},
}
_PARAMETERS = {"type": "object", "properties": _PROPERTIES}
_BARE = [{"type": "function", "function": {"name": "f", "description": "", "parameters": _PARAMETERS}}]

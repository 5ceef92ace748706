"""Conversations in a form that a template takes, where it refuses or drops what clients send.

A template is probed once with sentinels; each shape that it lacks is then changed in every conversation, so
that a prompt stays the beginning of the next one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Messages = list[dict[str, Any]]
Write = Callable[[Sequence[Message], Sequence[Message], bool, Mapping[str, Any]], str | None]
"""Messages, tools, whether an answer is opened, variables -> the prompt; None where the template refuses."""
THOUGHTS = ("reasoning_content", "thinking", "reasoning", "thought")


def shaped(messages: Sequence[Message], lacks: Iterable[str]) -> Messages:
    """The conversation without these shapes."""
    out = [dict(message) for message in messages]
    for name, change in _CHANGES.items():
        if name in lacks:
            out = change(out)
    return out


def plain_tools(tools: Sequence[Message]) -> list[Any]:
    """The tools with all that schemas may leave out, and one type for each value."""
    return [_plain_type(tool) for tool in tools]


def shapes_lacked(write: Write, tools: Sequence[Message]) -> tuple[str, ...]:
    """The shapes that a template refuses, or of which it drops a text, and takes once they are changed."""
    lacks: list[str] = []
    for names in [*zip(_CHANGES), _BOTH]:
        for probe in _PROBES[names[0]]:
            changed = shaped(probe, [*lacks, *names])
            if not _is_taken(write, shaped(probe, lacks), tools) and _is_taken(write, changed, tools):
                lacks += names
    if write([_USER], _BARE, True, {}) is None and write([_USER], plain_tools(_BARE), True, {}) is not None:
        lacks.append("bare schemas")
    return tuple(lacks)


def takes_any_id(write: Write, tools: Sequence[Message], lacks: Sequence[str]) -> bool:
    """False if calls may not have the ids that OpenAI's have, but may have others of nine characters."""
    called = json.dumps(shaped(_CALLED, lacks))
    longer = json.loads(called.replace("qcallid01", f"call_{'0' * 24}"))
    is_taken = write(longer, tools, True, {}) is not None
    return is_taken or write(json.loads(called), tools, True, {}) is None


def _is_taken(write: Write, messages: Messages, tools: Sequence[Message]) -> bool:
    text = write(messages, tools, True, {})
    return text is not None and all(
        mark in text for mark in _marks(messages) if not mark.startswith(("qthought", "qcallid"))
    )


def _marks(value: Any) -> list[str]:
    return re.findall(r"q(?:probe|name|value|call|thought)\w+", json.dumps(value))


def _said(role: str, number: int, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": f"qprobe{role}{number}", **more}


def _calls(*numbers: int) -> list[dict[str, Any]]:
    functions = [(n, {"name": f"qname{n}", "arguments": {"a": f"qvalue{n}"}}) for n in numbers]
    return [{"id": f"qcallid0{n}", "type": "function", "function": function} for n, function in functions]


def _result(number: int) -> dict[str, Any]:
    return _said("tool", number, tool_call_id=f"qcallid0{number}", name=f"qname{number}")


# What is changed, cheapest first


def _join_leading(messages: Messages) -> Messages:
    n_leading = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if n_leading < 2:
        return messages
    text = "\n\n".join(str(message["content"]) for message in messages[:n_leading])
    return [{**messages[0], "content": text}, *messages[n_leading:]]


def _move_later(messages: Messages) -> Messages:
    """A later system text into the next user's turn, or one of its own: what came before it stays cached."""
    out: Messages = []
    waiting = ""
    for message in messages:
        if message["role"] == "system" and any(other["role"] != "system" for other in out):
            waiting += f"{message['content']}\n\n"
        elif waiting and message["role"] == "user":
            out.append({**message, "content": f"{waiting}{message['content']}"})
            waiting = ""
        else:
            if waiting and message["role"] == "assistant":
                out.append({"role": "user", "content": waiting.rstrip()})
                waiting = ""
            out.append(message)
    return [*out, {"role": "user", "content": waiting.rstrip()}] if waiting else out


def _join_neighbours(messages: Messages) -> Messages:
    out: Messages = []
    for message in messages:
        last = out[-1] if out else None
        joins = (
            last is not None and last["role"] == message["role"] and message["role"] in ("user", "assistant")
        )
        if last is not None and joins and not (last.get("tool_calls") or message.get("tool_calls")):
            texts = [str(text) for text in (last["content"], message["content"]) if text]
            out[-1] = {**last, **message, "content": "\n\n".join(texts)}
        else:
            out.append(message)
    return out


def _join_to_result(messages: Messages) -> Messages:
    """The words of a user right after a tool's result, into that result."""
    out: Messages = []
    for message in messages:
        if out and out[-1]["role"] == "tool" and message["role"] == "user":
            out[-1] = {**out[-1], "content": f"{out[-1]['content']}\n\n{message['content']}"}
        else:
            out.append(message)
    return out


def _system_to_user(messages: Messages) -> Messages:
    """The leading system text, into the first user's turn."""
    if not messages or messages[0]["role"] != "system":
        return messages
    said, *out = _join_leading(messages)
    first = next((n for n, message in enumerate(out) if message["role"] == "user"), None)
    if first is None:
        return [{**said, "role": "user"}, *out]
    out[first] = {**out[first], "content": f"{said['content']}\n\n{out[first]['content']}"}
    return out


def _said_at_all(messages: Messages) -> Messages:
    """Without answers that say and call nothing."""
    return [
        message
        for message in messages
        if message["role"] != "assistant" or message.get("content") or message.get("tool_calls")
    ]


def _user_first(messages: Messages) -> Messages:
    """A word of a user before an answer that comes first."""
    first = next((n for n, message in enumerate(messages) if message["role"] != "system"), 0)
    if not messages or messages[first]["role"] != "assistant":
        return messages
    return [*messages[:first], {"role": "user", "content": "..."}, *messages[first:]]


def _lone_results(messages: Messages) -> Messages:
    """Results of calls that are not in the conversation, as words of the user."""
    out: Messages = []
    for message in messages:
        has_call = any(each["role"] == "assistant" and each.get("tool_calls") for each in out)
        is_lone = message["role"] == "tool" and not has_call
        out.append({"role": "user", "content": message["content"]} if is_lone else message)
    return out


def _one_call(messages: Messages) -> Messages:
    """One call a message, each with its result behind it."""
    out: Messages = []
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            out.append(message)
            continue
        n_results = next((n for n, other in enumerate(left) if other["role"] != "tool"), len(left))
        results, left = left[:n_results], left[n_results:]
        for number, call in enumerate(calls):
            bare = {key: value for key, value in message.items() if key not in THOUGHTS}
            out.append({**(message if not number else {**bare, "content": ""}), "tool_calls": [call]})
            out += [result for result in results if result.get("tool_call_id") == call.get("id")]
        ids = {call.get("id") for call in calls}
        out += [result for result in results if result.get("tool_call_id") not in ids]
    return out


def _text_before_calls(messages: Messages) -> Messages:
    """Text beside calls in a message of its own."""
    out: Messages = []
    for message in messages:
        if message.get("tool_calls") and message.get("content"):
            out.append({key: value for key, value in message.items() if key != "tool_calls"})
            out.append({**{k: v for k, v in message.items() if k not in THOUGHTS}, "content": ""})
        else:
            out.append(message)
    return out


def _without_thoughts(messages: Messages) -> Messages:
    return [
        {key: value for key, value in message.items() if key not in THOUGHTS}
        if message.get("tool_calls") and message.get("content")
        else message
        for message in messages
    ]


def _null_text(messages: Messages) -> Messages:
    return [
        {**message, "content": None} if message.get("tool_calls") and not message.get("content") else message
        for message in messages
    ]


def _text_arguments(messages: Messages) -> Messages:
    return [
        {**message, "tool_calls": [_text_call(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _text_call(call: Message) -> dict[str, Any]:
    function, given = call["function"], call["function"]["arguments"]
    text = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _calls_as_text(messages: Messages) -> Messages:
    """Calls in the words that models know who were taught no others."""
    out: Messages = []
    for message in messages:
        calls = message.get("tool_calls") or []
        said = [
            json.dumps({key: call["function"][key] for key in ("name", "arguments")}, ensure_ascii=False)
            for call in calls
        ]
        text = "\n".join(
            [str(message["content"] or ""), *(f"<tool_call>\n{call}\n</tool_call>" for call in said)]
        )
        bare = {key: value for key, value in message.items() if key != "tool_calls"}
        out.append({**bare, "content": text.lstrip("\n")} if calls else message)
    return out


def _plain_type(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain_type(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    out = {key: _plain_type(item) for key, item in value.items()}
    stated = out.get("type")
    if isinstance(stated, list):
        out["type"] = next((name for name in stated if name != "null"), "string")
    if isinstance(stated, str | list):
        left_out = {"object": ("additionalProperties", False), "array": ("items", {})}.get(str(out["type"]))
        out = {"description": "", **dict([left_out] if left_out else []), **out}
    return out


_ASSISTANT, _USER = _said("assistant", 1), _said("user", 1)
_CALLED = [_USER, _said("assistant", 2, content="", tool_calls=_calls(1)), _result(1)]
_CHANGES: dict[str, Callable[[Messages], Messages]] = {
    "leading systems": _join_leading,
    "system": _system_to_user,
    "later systems": _move_later,
    "empty text beside calls": _null_text,
    "arguments as objects": _text_arguments,
    "results without calls": _lone_results,
    "silent answers": _said_at_all,
    "answers first": _user_first,
    "several calls": _one_call,
    "thoughts beside text and calls": _without_thoughts,
    "text beside calls": _text_before_calls,
    "user after result": _join_to_result,
    "neighbours": _join_neighbours,
    "calls": _calls_as_text,
}
LAST_RESORT = (
    *("leading systems", "later systems", "results without calls", "silent answers", "answers first"),
    *("several calls", "thoughts beside text and calls"),
    *("text beside calls", "user after result", "neighbours"),
)
"""For a conversation that is refused all the same."""
_BOTH = ("empty text beside calls", "arguments as objects")
_FINAL = [_said("assistant", 3), _said("user", 3)]
_PROBES: dict[str, list[Messages]] = {
    "leading systems": [[_said("system", 1), _said("system", 2), _USER]],
    "system": [[_said("system", 1), _USER], [_said("system", 1), *_CALLED]],
    "later systems": [[_said("system", 1), _USER, _ASSISTANT, _said("system", 2), _said("user", 2)]],
    "empty text beside calls": [_CALLED],
    "arguments as objects": [_CALLED],
    "results without calls": [[_result(1), _USER]],
    "silent answers": [[_USER, _said("assistant", 1, content=""), _said("user", 2)]],
    "answers first": [[_ASSISTANT, _USER]],
    "several calls": [
        [_USER, _said("assistant", 2, content="", tool_calls=_calls(1, 2)), _result(1), _result(2)]
    ],
    "thoughts beside text and calls": [
        [
            _USER,
            _said("assistant", 2, tool_calls=_calls(1), **dict.fromkeys(THOUGHTS, "qthought")),
            _result(1),
        ]
    ],
    "text beside calls": [[_USER, _said("assistant", 2, tool_calls=_calls(1)), _result(1), *_FINAL]],
    "user after result": [[*_CALLED, _said("user", 2)]],
    "neighbours": [[_USER, _said("user", 2)]],
    "calls": [_CALLED],
}
_BARE = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": ["string", "null"]},
                    "b": {"type": "object"},
                    "c": {"type": "array", "items": {"type": "object", "properties": {}}},
                },
            },
        },
    }
]

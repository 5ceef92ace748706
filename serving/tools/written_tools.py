"""Conversations with tools for templates that know none: tools, calls and results written out as text.

The words are those that Hermes models were trained on: many models have seen them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

_INTRODUCTION = (
    "You may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n"
    "<tools>\n{tools}\n</tools>\n\n"
    "For each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{{"name": <function-name>, "arguments": <args-json-object>}}\n</tool_call>'
)


def written_out(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in messages of system, user and assistant that have contents alone."""
    out: list[dict[str, Any]] = []
    for message in messages:
        said = _plain(message)
        if out and message["role"] == "tool" and out[-1]["role"] == "user" and _is_result(out[-1]):
            out[-1]["content"] += f"\n{said['content']}"  # results of one turn are one message
        else:
            out.append(said)
    if tools:
        shown = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if out and out[0]["role"] == "system":
            out[0]["content"] = f"{out[0]['content']}\n\n{shown}"
        else:
            out.insert(0, {"role": "system", "content": shown})
    return out


def _plain(message: Message) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if not message.get("tool_calls"):
        return dict(message)
    calls = [json.dumps(_called(call), ensure_ascii=False) for call in message["tool_calls"]]
    parts = [message["content"]] if message["content"] else []
    parts += [f"<tool_call>\n{call}\n</tool_call>" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}


def _called(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def _is_result(message: Message) -> bool:
    content: str = message["content"]
    return content.startswith("<tool_response>")
